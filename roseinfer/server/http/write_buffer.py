"""Transport that joins the writes of one turn of the event loop and cuts connections of clients that do not read."""

import asyncio
import logging
from typing import Any

log = logging.getLogger(__name__)

# Unsent bytes that a client must take within the write timeout: less than any network connection carries.
MIN_PROGRESS_BYTES = 2**16


class WriteBuffer(asyncio.Transport):
    """Collects the writes of one turn of the event loop, so that a head and its body are one packet and one call.

    uvloop passes on each write at once, and a write costs more than all other work per token in this process.

    After `expect_progress` or `close`, a client that takes almost nothing of the unsent data for `timeout_s` seconds
    loses its connection. Otherwise the rest of its answer would stay in memory forever.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._pending: list[bytes] = []
        self._passed_bytes = 0  # given to the transport since the start
        self._timer: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._pending:
            self._loop.call_soon(self.flush)
        self._pending.append(bytes(data))

    def write_through(self, data: bytes) -> None:
        """Write now, after the pending data."""
        if self._pending:
            self._pending.append(data)
            self.flush()
        else:
            self._pass(data)

    def flush(self) -> None:
        if self._pending:
            data = self._pending[0] if len(self._pending) == 1 else b"".join(self._pending)
            self._pending.clear()
            self._pass(data)

    def _pass(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._passed_bytes += len(data)
            self._transport.write(data)

    def close(self) -> None:
        self.flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            self.expect_progress()

    def abort(self) -> None:
        self._transport.abort()

    # --- the write timeout --------------------------------------------------------------------------------------
    def expect_progress(self) -> None:
        """Start the write timeout: the client does not take what it is sent."""
        if self._timer is None:
            unsent = self._transport.get_write_buffer_size()
            target = self._passed_bytes - unsent + min(unsent, MIN_PROGRESS_BYTES)
            self._timer = self._loop.call_later(self._timeout_s, self._check_progress, target)

    def stop_expecting(self) -> None:
        """Stop the write timeout: the client has taken most of the data, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_progress(self, target: int) -> None:
        """Abort unless `target` bytes have been sent since the start of the connection."""
        self._timer = None
        unsent = self._transport.get_write_buffer_size()
        if self._passed_bytes - unsent < target:
            log.info("closing a connection: the client read almost nothing for %g s", self._timeout_s)
            self.abort()
        elif unsent:
            self.expect_progress()

    # --- pass-through -------------------------------------------------------------------------------------------
    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
