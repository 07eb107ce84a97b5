"""Who tells a process which engines there are: a list that never changes, or somebody who says so now and then."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class EngineEntry(NamedTuple):
    """An engine that is there. `address`: where, as whoever makes the way to it understands it.

    `incarnation`: which engine it is of those that have had the address, one after the other; a process that its
    keeper starts again is the same. `number`: what it is to be called; None: anything. Processes that follow the same
    directory agree on an engine only by that. `retiring`: it is to get no more requests, and may end what it has.
    """

    address: str
    incarnation: str = ""
    number: int | None = None
    retiring: bool = False

    @property
    def key(self) -> tuple[str, str]:
        return self.address, self.incarnation


class Directory(Protocol):
    """Belongs to one event loop."""

    def entries(self) -> Sequence[EngineEntry]:
        """All engines that are there now."""
        ...

    async def changed(self) -> None:
        """Returns when `entries` may say something else than when it was called last."""
        ...


class FixedDirectory:
    """These and no others, numbered as they are listed."""

    def __init__(self, addresses: Iterable[str]) -> None:
        self._entries = [EngineEntry(address, number=number) for number, address in enumerate(addresses)]

    def entries(self) -> Sequence[EngineEntry]:
        return self._entries

    async def changed(self) -> None:
        await asyncio.Event().wait()


class DynamicDirectory:
    """`tell` is called with all that are there, as often as one likes.

    Nobody is sent away by being left out: who tells may have just begun to find out. Such an engine is used as long as
    it can be reached, and forgotten when it cannot. Who wants it to go says that it is `retiring`.
    """

    def __init__(self, entries: Iterable[EngineEntry] = ()) -> None:
        self._entries = list(entries)
        self._news = asyncio.Event()

    def tell(self, entries: Iterable[EngineEntry]) -> None:
        told = list(entries)
        if told != self._entries:
            self._entries = told
            self._news.set()

    def entries(self) -> Sequence[EngineEntry]:
        self._news.clear()
        return self._entries

    async def changed(self) -> None:
        await self._news.wait()
