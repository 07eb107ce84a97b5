"""What the server as a whole may do: whether it takes requests, which ones it holds, and how it winds down."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from roseinfer.core.clock import Clock
from roseinfer.server.errors import ApiError, unavailable

log = logging.getLogger(__name__)

RATE_WINDOW = 64
MAX_RETRY_S = 60.0
UNKNOWN_RATE_RETRY_S = 1.0
LOADING_RETRY_S = 2.0
DRAINING_RETRY_S = 5.0


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"


class Interruptible(Protocol):
    def interrupt(self, cause: ApiError) -> None: ...


class DrainRate:
    """How fast prompts have been finishing, from the times of the last `RATE_WINDOW` ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_s: deque[float] = deque(maxlen=RATE_WINDOW)

    def note(self) -> None:
        self._ends_s.append(self._clock.now())

    def seconds_for(self, count: int) -> float:
        """Estimated seconds until `count` more prompts have finished, within [1, MAX_RETRY_S]."""
        if len(self._ends_s) < 2:
            return UNKNOWN_RATE_RETRY_S
        span_s = self._clock.now() - self._ends_s[0]
        return min(max(1.0, count * span_s / len(self._ends_s)), MAX_RETRY_S)


class Ticket:
    """The place of one HTTP request; it takes one prompt's room until `grow` says how many it brings."""

    def __init__(self) -> None:
        self.prompts = 1


class Lifecycle:
    """Admission and winding down. `prompts` counts those of all requests in the server, running or not."""

    def __init__(self, max_prompts: int, clock: Clock) -> None:
        self.phase = Phase.LOADING
        self.prompts = 0
        self.requests = 0
        self._max_prompts = max_prompts
        self._rate = DrainRate(clock)
        self._live: dict[Interruptible, None] = {}
        self._stopped: ApiError | None = None
        self._changed = asyncio.Event()

    def ready(self) -> None:
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def begin_drain(self) -> None:
        self.phase = Phase.DRAINING

    def refusal(self) -> ApiError | None:
        """Why a new request would be turned away now, or None."""
        if self.phase is Phase.LOADING:
            return unavailable("loading", "The model is still loading", LOADING_RETRY_S)
        if self.phase is Phase.DRAINING:
            return unavailable("draining", "The server is shutting down", DRAINING_RETRY_S)
        if self.prompts >= self._max_prompts:
            wait_s = self.retry_after_s(self.prompts - self._max_prompts + 1)
            return unavailable("queue_full", f"{self.prompts} prompts are in the server, its limit", wait_s)
        return None

    def retry_after_s(self, prompts: int) -> float:
        """Estimated seconds until that many more prompts have finished."""
        return self._rate.seconds_for(prompts)

    @contextmanager
    def ticket(self) -> Iterator[Ticket]:
        """Holds room for a request. `refusal()` has been asked before."""
        ticket = Ticket()
        self.requests += 1
        self.prompts += 1
        try:
            yield ticket
        finally:
            self.requests -= 1
            self.prompts -= ticket.prompts
            self._changed.set()

    def grow(self, ticket: Ticket, prompts: int) -> None:
        self.prompts += prompts - ticket.prompts
        ticket.prompts = prompts

    def finished(self, prompts: int) -> None:
        """Prompts that ran to their end, for the drain rate."""
        for _ in range(min(prompts, RATE_WINDOW)):
            self._rate.note()

    @contextmanager
    def live(self, request: Interruptible) -> Iterator[None]:
        """Makes `request` known to `interrupt_all`. Raises the cause if everything was stopped already."""
        if self._stopped is not None:
            raise self._stopped
        self._live[request] = None
        try:
            yield
        finally:
            del self._live[request]

    def interrupt_all(self, cause: ApiError) -> int:
        """Ends every running request with `cause`; returns how many there were."""
        live = list(self._live)
        for request in live:
            request.interrupt(cause)
        return len(live)

    def stop(self, cause: ApiError) -> int:
        """Like `interrupt_all`, and nothing can start any more."""
        self._stopped = cause
        return self.interrupt_all(cause)

    async def idle(self) -> None:
        """Returns when no request is left in the server."""
        while self.requests:
            self._changed.clear()
            await self._changed.wait()
