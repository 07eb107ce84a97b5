"""Standard error for lines of the log. A reader that stops, such as a paused terminal, does not stop the process."""

import contextlib
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable
from typing import TextIO, cast

log = logging.getLogger(__name__)

# Longest wait for a reader that is slow, and waits for one that stays slow, of the time.
MAX_WAIT_S = 1.0
MAX_WAIT_SHARE = 0.1


class LogStream:
    """Pipe, terminal or socket whose lines are dropped once they have waited for room for `MAX_WAIT_S`.

    Lines after that wait at most `MAX_WAIT_SHARE` of the time. When there is room again, a warning says how many were
    dropped. `send` returns the number of bytes for which `descriptor` had room; it raises `BlockingIOError` if it had
    none.
    """

    def __init__(self, descriptor: int, send: Callable[[bytes], int], encoding: str) -> None:
        self._descriptor = descriptor
        self._send = send
        self._encoding = encoding
        self._lock = threading.Lock()
        self._dropped_count = 0
        self._budget_s, self._waited_s = MAX_WAIT_S, time.monotonic()  # for waits, as of the end of the last one
        self._prefix = b""  # ends a line of which only a part was sent

    def write(self, text: str) -> None:
        data = self._prefix + text.encode(self._encoding, "backslashreplace")
        if not self._dropped_count:
            left = self._send_now(data)
            left = left and self._send_slowly(left)
            if len(left) < len(data):
                self._prefix = b"\n" if left else b""
            if not left:
                return
        with self._lock:
            self._dropped_count += 1
            if self._dropped_count == 1:
                self._start_report()

    def flush(self) -> None:
        """Do nothing: lines do not wait."""

    def _send_now(self, data: bytes) -> bytes:
        """Send what there is room for, and return the rest."""
        with contextlib.suppress(BlockingIOError):
            return data[self._send(data) :]
        return data

    def _send_slowly(self, data: bytes) -> bytes:
        """Return the rest of `data` for which the reader makes no room in time."""
        start_s = now_s = time.monotonic()
        budget_s = min(MAX_WAIT_S, self._budget_s + MAX_WAIT_SHARE * (start_s - self._waited_s))
        while data and (left_s := start_s + budget_s - now_s) > 0 and self._has_room(left_s):
            data = self._send_now(data)
            now_s = time.monotonic()
        self._waited_s = time.monotonic()
        self._budget_s = budget_s - (self._waited_s - start_s)
        return data

    def _has_room(self, timeout_s: float | None) -> bool:
        """Wait for room, or until the reader has left; None: however long it takes."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def _start_report(self) -> None:
        try:
            threading.Thread(target=self._report, name="dropped-log-lines", daemon=True).start()
        except RuntimeError:  # no thread can be started, so the next line waits again
            self._dropped_count = 0

    def _report(self) -> None:
        self._has_room(None)
        with self._lock:
            count, self._dropped_count = self._dropped_count, 0
        log.warning("lines of the log were dropped, as nothing read standard error: %d", count)


def log_stream(stream: TextIO | None) -> TextIO | None:
    """Return a `LogStream` instead of a pipe, terminal or socket, and any other stream itself."""
    if stream is None:  # Python was started with a closed standard error
        return None
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISSOCK(mode):
            return _of_socket(descriptor, stream.encoding)
        if stat.S_ISFIFO(mode) or os.isatty(descriptor):
            return _reopened(descriptor, stream.encoding)
    except (OSError, ValueError):  # no descriptor, no /proc, or a terminal of another user
        pass
    return stream


def _of_socket(descriptor: int, encoding: str) -> TextIO:
    own = socket.socket(fileno=os.dup(descriptor))
    return cast(TextIO, LogStream(own.fileno(), lambda data: own.send(data, socket.MSG_DONTWAIT), encoding))


def _reopened(descriptor: int, encoding: str) -> TextIO:
    """Open it a second time, as other programs share the flags of the first."""
    own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    return cast(TextIO, LogStream(own, lambda data: os.write(own, data), encoding))
