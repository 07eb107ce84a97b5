"""Files of recorded runs: one JSON object per line."""

import contextlib
import json
import logging
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import IO, Any

from roseinfer.core.errors import ConfigError

log = logging.getLogger(__name__)

# Upper bound on what a process that is killed under load loses.
FLUSH_INTERVAL_S = 1.0
BUFFER_BYTES = 2**20


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode()


class Recorder:
    """File of a recording, readable by this user only. Raise `ConfigError` if it cannot be written.

    A file that exists keeps its content until `begin`. A later error only ends the recording.
    """

    def __init__(self, path: str | Path, encode: Callable[[dict[str, Any]], bytes] = _encode) -> None:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"record: cannot write '{path}': {error.strerror}") from error
        self._path = path
        self._file = os.fdopen(descriptor, "wb", buffering=BUFFER_BYTES)
        _flush_before_forks(self._file)
        self._encode = encode
        self._flushed_s = -inf

    def begin(self, line: dict[str, Any]) -> None:
        """Empty the file, keep it from other users, and write its first line."""
        descriptor = self._file.fileno()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # no pipe and no terminal
            with contextlib.suppress(PermissionError):  # another user's file
                os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, 0)
        self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(self._encode(line) + b"\n")
        except OSError as error:
            self._stop_recording(error)

    def flush_if_due(self, now_s: float) -> None:
        """Flush if the last flush was long enough ago."""
        if now_s >= self._flushed_s + FLUSH_INTERVAL_S:
            self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Write buffered lines to the file."""
        if self._file.closed:
            return
        self._flushed_s = now_s
        try:
            self._file.flush()
        except OSError as error:
            self._stop_recording(error)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:
            log.error("cannot write the end of the recording '%s': %s", self._path, error)

    def _stop_recording(self, error: OSError) -> None:
        """Close the file after an error: a full disk must not stop the process."""
        log.error("cannot write the recording '%s', so it ends here: %s", self._path, error)
        self.close()


def file_after_restart(path: str | None) -> str | None:
    """Return `path`, or None with an error in the log if it cannot be written: a restart must not fail for it."""
    if path is None:
        return None
    try:
        Recorder(path).close()
    except ConfigError as error:
        log.error("%s; the process restarts without a recording", error)
        return None
    return path


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a recording; the last one may be cut if the process was killed."""
    with Path(path).open(encoding="utf-8") as lines:
        for text in lines:
            if text.endswith("\n"):
                yield json.loads(text)


def _flush_before_forks(file: IO[bytes]) -> None:
    """Flush before each fork. Otherwise the fork would write the buffered lines again when it ends."""
    known = weakref.ref(file)

    def flush() -> None:
        file = known()
        if file is not None and not file.closed:
            with contextlib.suppress(OSError):  # `Recorder` reports the error with the next write
                file.flush()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=flush)
