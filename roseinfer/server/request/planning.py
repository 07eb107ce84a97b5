"""The part of a request before its run, while its prompt is made: what can end it."""

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect

from roseinfer.core.clock import Clock
from roseinfer.server.http.connection import Wire
from roseinfer.server.http.errors import deadline_exceeded
from roseinfer.server.request.lifecycle import Guard, Lifecycle, Registration


class Planning:
    """`with` it, the current task is ended when the client leaves, at the deadline, and when the server stops.

    What ends it is raised: `ClientDisconnect`, or `ApiError` 504 or 503.
    """

    __slots__ = ("_clock", "_guard", "_lifecycle", "_live", "_timer", "_wire")

    def __init__(self, lifecycle: Lifecycle, wire: Wire, clock: Clock) -> None:
        self._lifecycle = lifecycle
        self._wire = wire
        self._clock = clock
        self._guard = Guard()
        self._live: Registration
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Planning":
        self._live = self._lifecycle.live(self._guard)
        self._wire.watch(self._on_gone)
        try:
            self._guard.__enter__()
        except Exception:
            self._wire.watch(None)
            raise
        self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._live.__exit__(*exc)
        self._wire.watch(None)
        if self._timer is not None:
            self._timer.cancel()
        self._guard.__exit__(*exc)

    def end_by(self, by_s: float | None) -> None:
        """Set the deadline, on the clock that was given; None = none. Raises `ApiError` 504 if it is over."""
        if by_s is None:
            return
        left_s = by_s - self._clock.now()
        if left_s <= 0:
            raise deadline_exceeded()
        self._timer = asyncio.get_running_loop().call_later(left_s, self._on_late)

    def _on_late(self) -> None:
        self._guard.interrupt(deadline_exceeded())

    def _on_gone(self) -> None:
        self._guard.interrupt(ClientDisconnect())
