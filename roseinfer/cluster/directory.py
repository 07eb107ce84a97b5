"""Directories: they list the engines that exist, either fixed or changing."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class EngineEntry(NamedTuple):
    """Entry of an engine. `address`: in the form that the connector understands.

    `incarnation`: distinguishes engines that have had the same address; a restarted process keeps it. `number`: wanted
    number of the engine, None = any; only numbers are common to processes that use the same directory. `retiring`: it
    gets no more requests and may finish those it has.
    """

    address: str
    incarnation: str = ""
    number: int | None = None
    retiring: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.address, self.incarnation


class Directory(Protocol):
    """List of engines. Belongs to one event loop."""

    def entries(self) -> Sequence[EngineEntry]:
        """Return the present engines."""
        ...

    async def changed(self) -> None:
        """Return once `entries` may have changed since its last call."""
        ...


class FixedDirectory:
    """Directory that never changes. Engines are numbered in its order."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._entries = [EngineEntry(address, number=number) for number, address in enumerate(addresses)]

    def entries(self) -> Sequence[EngineEntry]:
        return self._entries

    async def changed(self) -> None:
        await asyncio.Event().wait()


class DynamicDirectory:
    """Directory that `set_entries` updates with all present engines.

    A missing entry retires nothing, because the caller may not know all engines yet. Such an engine is used while it
    can be reached. To retire an engine, set `retiring`.
    """

    def __init__(self, entries: Iterable[EngineEntry] = ()) -> None:
        self._entries = list(entries)
        self._changed = asyncio.Event()

    def set_entries(self, entries: Iterable[EngineEntry]) -> None:
        new = list(entries)
        if new != self._entries:
            self._entries = new
            self._changed.set()

    def entries(self) -> Sequence[EngineEntry]:
        self._changed.clear()
        return self._entries

    async def changed(self) -> None:
        await self._changed.wait()
