"""Shared rows of a server's engines: each engine writes its promises, the supervisor writes the engines' status."""

from pathlib import Path
from typing import Self

from roseinfer.cluster.status import EngineStatus
from roseinfer.core.promise import Promise
from roseinfer.engine.api import EngineState
from roseinfer.engine.process_transport import ENGINE_ROWS
from roseinfer.processes.shared_rows import SharedRows

_STATES = tuple(EngineState)


class EngineRows:
    """A row for each engine, read by every process of the server. A `StatusReader`."""

    _STATUS, _PID = 0, 1  # words of a row

    def __init__(self, rows: SharedRows[Promise]) -> None:
        self.engines = rows.rows
        self._rows = rows
        self._newest = [((0, 0), EngineStatus())] * self.engines  # words and their meaning

    @classmethod
    def create(cls, path: Path, engines: int) -> Self:
        """Make the file. Raises `ResourceError` if there is no room for it."""
        return cls(SharedRows.create(path, ENGINE_ROWS, engines))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the supervisor's file. Raises `ResourceError`."""
        return cls(SharedRows.open(path, ENGINE_ROWS))

    def close(self) -> None:
        self._rows.close()

    def publish(self, engine: int, promise: Promise) -> None:
        """Write a promise, as the engine itself does."""
        self._rows.write(engine, promise)

    def clear(self, engine: int) -> None:
        """Delete the promise of an engine whose process has ended."""
        self._rows.write(engine, None)

    def promise(self, engine: int) -> Promise | None:
        return self._rows.read(engine)

    def write_count(self, engine: int) -> int:
        return self._rows.written(engine)

    def set_status(self, engine: int, status: EngineStatus) -> None:
        word = 2 * (status.number * len(_STATES) + _STATES.index(status.state)) + status.final
        self._rows.set(engine, self._PID, status.pid)
        self._rows.set(engine, self._STATUS, word)

    def status(self, engine: int) -> EngineStatus:
        words = word, pid = self._rows.get(engine, self._STATUS), self._rows.get(engine, self._PID)
        seen, status = self._newest[engine]
        if words != seen:
            number, state = divmod(word // 2, len(_STATES))
            status = EngineStatus(_STATES[state], number, bool(word % 2), pid=pid)
            self._newest[engine] = (words, status)
        return status
