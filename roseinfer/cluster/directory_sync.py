"""A routed engine whose engines are those that a directory names, as they come and go."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from roseinfer.cluster.directory import Directory, EngineEntry
from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.replicas import DEFAULT_ROUTER
from roseinfer.core.errors import RoseinferError
from roseinfer.engine.live import InflightLimit, LiveRequests
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# How long requests that have begun may stay in an engine that retires, in seconds, as with `--drain-timeout`.
DEFAULT_DRAIN_S = 30.0

# The way to an engine that is to have this number. Raises `RoseinferError` if there can be none.
MakeConnector = Callable[[EngineEntry, int], Connector]


class EngineSet(Protocol):
    """As much of a `RoutedEngine` as follows a directory."""

    def add(self, make_connector: Callable[[int], Connector], number: int | None = None) -> int: ...

    def retire(self, number: int, drain_s: float) -> None: ...

    def set_listed(self, number: int, listed: bool) -> None: ...

    def has(self, number: int) -> bool: ...


class DirectorySync:
    """Keep `engines` equal to the entries of `directory`.

    An entry for which `make_connector` raises is skipped until its address or incarnation changes.
    """

    def __init__(
        self, directory: Directory, make_connector: MakeConnector, engines: EngineSet, drain_s: float = DEFAULT_DRAIN_S
    ) -> None:
        self._directory = directory
        self._way_of = make_connector
        self._engines = engines
        self._drain_s = drain_s
        self._numbers: dict[tuple[str, str], int | None] = {}  # None: there is no way to it
        self._retiring: set[int] = set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                self.sync()
            except Exception:
                log.exception("the directory of engines could not be followed")
            await self._directory.changed()

    def sync(self) -> None:
        """Add, retire and forget what the directory says now."""
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
        """Whether it is gone: if it is named again it comes anew."""
        return not listed if number is None else not self._engines.has(number)

    def _added(self, entry: EngineEntry) -> int | None:
        try:
            number = self._engines.add(partial(self._way_of, entry), entry.number)
        except RoseinferError as error:
            log.error("there is no way to the engine at %s: %s", entry.address, error)
            return None
        except Exception:  # a fault of ours on the way to one keeps no other from being followed
            log.exception("there is no way to the engine at %s", entry.address)
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
    tokenizer: Tokenizer,
    *,
    router: str = DEFAULT_ROUTER,
    inflight: InflightLimit | None = None,
    prefix: str = "",
    processes: int = 1,
    record: Path | None = None,
    clock: Clock | None = None,
    drain_s: float = DEFAULT_DRAIN_S,
) -> RoutedEngine:
    """A `RoutedEngine` of the engines that a directory names, once one of them is up, however long that takes.

    `prefix` must be no other client's of these engines, on any host. `drain_s`: how long requests that have begun
    may stay in an engine that retires before they go on elsewhere. The rest as in `RoutedEngine.start`, which also says
    what is raised.
    """
    requests = LiveRequests(tokenizer, clock or MonotonicClock(), inflight or InflightLimit(), prefix)
    engine = RoutedEngine((), requests, dynamic=True, router=router, processes=processes, record=record)
    engine.run_background(DirectorySync(directory, make_connector, engine, drain_s).run())
    await engine.open()
    return engine
