"""Preparation of a request: everything before its run on the engine, and what can interrupt it."""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect

from roseinfer.core.clock import Clock
from roseinfer.server.http.connection import ClientConnection
from roseinfer.server.http.errors import deadline_exceeded
from roseinfer.server.request.lifecycle import Guard, Lifecycle


class PreparationGuard(Guard):
    """Context manager that interrupts the current task when the client leaves, at the deadline and at shutdown.

    Raises the cause: `ClientDisconnect`, or `ApiError` 504 or 503.
    """

    def __init__(self, lifecycle: Lifecycle, wire: ClientConnection, clock: Clock) -> None:
        super().__init__()
        self._lifecycle = lifecycle
        self._wire = wire
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._lifecycle.begin(self)
        self._wire.on_disconnect(self._on_disconnect)
        try:
            super().__enter__()
        except Exception:
            self._leave()
            raise

    def __exit__(self, *exc: Any) -> None:
        self._leave()
        super().__exit__(*exc)

    def _leave(self) -> None:
        self._lifecycle.end(self)
        self._wire.on_disconnect(None)
        if self._timer is not None:
            self._timer.cancel()

    def end_by(self, by_s: float) -> None:
        """Set the deadline on the given clock. Raises `ApiError` 504 if it has passed."""
        left_s = by_s - self._clock.now()
        if left_s <= 0:
            raise deadline_exceeded()
        self._timer = asyncio.get_running_loop().call_later(left_s, self._on_late)

    def _on_late(self) -> None:
        self.interrupt(deadline_exceeded())

    def _on_disconnect(self) -> None:
        self.interrupt(ClientDisconnect())
