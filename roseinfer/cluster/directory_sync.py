"""Synchronisation of a routed engine with a directory."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from roseinfer.cluster.directory import Directory, EngineEntry
from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.core.errors import RoseinferError
from roseinfer.engine.live import LiveRequests

log = logging.getLogger(__name__)

# Makes the connector of an engine with a number. Raises `RoseinferError` for an unusable entry.
MakeConnector = Callable[[EngineEntry, int], Connector]


class EngineSet(Protocol):
    """Methods of `RoutedEngine` that a directory drives."""

    def add(self, make_connector: Callable[[int], Connector], number: int | None = None) -> int: ...

    def retire(self, number: int, drain_s: float) -> None: ...

    def set_listed(self, number: int, listed: bool) -> None: ...

    def has(self, number: int) -> bool: ...


class DirectorySync:
    """Keep `engines` equal to the entries of `directory`.

    An entry for which `make_connector` raises is skipped until its address or incarnation changes.
    """

    def __init__(self, directory: Directory, make_connector: MakeConnector, engines: EngineSet, drain_s: float) -> None:
        self._directory = directory
        self._make_connector = make_connector
        self._engines = engines
        self._drain_s = drain_s
        self._numbers: dict[tuple[str, str], int | None] = {}  # None: unusable
        self._retiring: set[int] = set()

    async def run(self) -> None:
        """Sync at every change until cancelled."""
        while True:
            try:
                self.sync()
            except Exception:
                log.exception("cannot apply the directory of engines")
            await self._directory.changed()

    def sync(self) -> None:
        """Add, retire and remove engines to match the directory."""
        entries = {entry.key: entry for entry in self._directory.entries()}
        known = self._numbers
        for key in [key for key, number in known.items() if self._is_over(number, key in entries)]:
            del known[key]
        for key, number in known.items():
            if number is not None:
                self._engines.set_listed(number, key in entries)
        for key, entry in entries.items():
            if key not in known and not entry.retiring:
                known[key] = self._added(entry)
            elif entry.retiring:
                self._retire(known.get(key))

    def _is_over(self, number: int | None, listed: bool) -> bool:
        """True if an engine is gone; a later entry of the same key adds it again."""
        return not listed if number is None else not self._engines.has(number)

    def _added(self, entry: EngineEntry) -> int | None:
        try:
            number = self._engines.add(partial(self._make_connector, entry), entry.number)
        except RoseinferError as error:
            log.error("cannot use the engine at %s: %s", entry.address, error)
            return None
        except Exception:  # a bug must not keep the other engines from being added
            log.exception("cannot use the engine at %s", entry.address)
            return None
        log.info("engine %d is at %s", number, entry.address)
        return number

    def _retire(self, number: int | None) -> None:
        if number is not None and number not in self._retiring:
            self._retiring.add(number)
            self._engines.retire(number, self._drain_s)


async def start_from_directory(
    directory: Directory,
    make_connector: MakeConnector,
    requests: LiveRequests,
    router: RouterSetup,
    drain_s: float,
) -> RoutedEngine:
    """Return a `RoutedEngine` of the engines in a directory, once one of them is up. There is no timeout.

    `drain_s`: how long begun requests may stay on a retiring engine. Raise `ConfigError` as `RoutedEngine.start` does.
    """
    engine = RoutedEngine((), requests, router, dynamic=True)
    engine.run_background(DirectorySync(directory, make_connector, engine, drain_s).run())
    await engine.open()
    return engine
