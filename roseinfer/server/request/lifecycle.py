"""What the server as a whole may do: whether it takes requests, which it holds and can end, and how it winds down."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Protocol

from roseinfer.core.clock import Clock
from roseinfer.server.http.errors import ApiError, unavailable


class Guard:
    """`with guard:` around the work of the current task. The first cause given to `interrupt` is raised out of it.

    The task itself is cancelled, as `asyncio.timeout` does it: a second task to watch over the first would cost every
    request more than its own bookkeeping.
    """

    def __init__(self) -> None:
        self._cause: Exception | None = None
        self._task: asyncio.Task[object] | None = None

    def interrupt(self, cause: Exception) -> None:
        if self._cause is None:
            self._cause = cause
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> None:
        if self._cause is not None:
            raise self._cause
        self._task = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        task, self._task = self._task, None
        assert task is not None, "entered first"
        if self._cause is None:
            return
        # `interrupt` found the task waiting, so its cancellation has arrived here. Others may have cancelled it too.
        if task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._cause from None


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


class Occupancy:
    """What the requests in the server take up. Who serves beside others puts a class in its place that knows of
    theirs too.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.prompts = 0

    def take(self, requests: int, prompts: int) -> None:
        """Negative numbers give it back."""
        self.requests += requests
        self.prompts += prompts

    def all_requests(self) -> int:
        return self.requests

    def all_prompts(self) -> int:
        return self.prompts


class Ticket:
    """`with` it a request has a place in the server: one prompt's room, until `grow` says how many it brings. It may be
    given back before, when the engine is done and only the answer is to be delivered.
    """

    def __init__(self, lifecycle: "Lifecycle") -> None:
        self._lifecycle = lifecycle
        self._prompts = 0

    def __enter__(self) -> "Ticket":
        self._lifecycle.take_room(1, 1)
        self._prompts = 1
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        if self._prompts:
            self._lifecycle.take_room(-1, -self._prompts)
            self._prompts = 0

    def grow(self, prompts: int) -> None:
        self._lifecycle.take_room(0, prompts - self._prompts)
        self._prompts = prompts


class Lifecycle:
    """Admission and winding down. `max_prompts` bounds the prompts of all requests in the server, running or not.

    `share`: the part of the server's requests that come here, for estimates of how fast it serves.
    """

    def __init__(self, max_prompts: int, clock: Clock, room: Occupancy | None = None, share: float = 1.0) -> None:
        self.phase = Phase.LOADING
        self.room = room or Occupancy()
        self._max_prompts = max_prompts
        self._share = share
        self._rate = DrainRate(clock)
        self._live: dict[Interruptible, None] = {}
        self._deliveries: dict[Interruptible, None] = {}
        self._stopped: ApiError | None = None
        self._changed = asyncio.Event()
        self._on_end: list[Callable[[ApiError], None]] = []

    def on_end(self, listener: Callable[[ApiError], None]) -> None:
        """Have `listener` called when the server is to end, with what to say then: at once, whatever still runs."""
        self._on_end.append(listener)

    def ready(self) -> None:
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY

    def begin_drain(self) -> None:
        self.phase = Phase.DRAINING
        self._tell_end(_draining())

    def _tell_end(self, cause: ApiError) -> None:
        listeners, self._on_end = self._on_end, []
        for listener in listeners:
            listener(cause)

    def refusal(self) -> ApiError | None:
        """Why a new request would be turned away now, or None."""
        if self.phase is Phase.LOADING:
            return unavailable("loading", "The model is still loading", LOADING_RETRY_S)
        if self.phase is Phase.DRAINING:
            return _draining()
        prompts = self.room.all_prompts()
        if prompts >= self._max_prompts:
            wait_s = self.retry_after_s(prompts - self._max_prompts + 1)
            return unavailable("queue_full", f"{prompts} prompts are in the server, its limit", wait_s)
        return None

    def retry_after_s(self, prompts: int) -> float:
        """Estimated seconds until that many more prompts have finished."""
        return self._rate.seconds_for(math.ceil(prompts * self._share))

    def ticket(self) -> Ticket:
        """Room for a request. `refusal()` has been asked before."""
        return Ticket(self)

    def take_room(self, requests: int, prompts: int) -> None:
        """Negative numbers give it back."""
        self.room.take(requests, prompts)
        if requests < 0:
            self._changed.set()

    @property
    def requests(self) -> int:
        """Those that came here."""
        return self.room.requests

    def finished(self, prompts: int) -> None:
        """Prompts that ran to their end, for the drain rate."""
        for _ in range(min(prompts, RATE_WINDOW)):
            self._rate.note()

    def begin(self, request: Interruptible) -> None:
        """Make `request` known to `interrupt_all`, and once the engine is `done_with` it to `cut`, until its `end`.

        Raises the cause if everything was stopped already.
        """
        if self._stopped is not None:
            raise self._stopped
        self._live[request] = None

    def end(self, request: Interruptible) -> None:
        """Forget `request`, whether or not it has begun."""
        self._live.pop(request, None)
        self._deliveries.pop(request, None)
        self._changed.set()

    def done_with(self, request: Interruptible) -> None:
        """What is left of a live request is to deliver its answer."""
        if request in self._live:
            del self._live[request]
            self._deliveries[request] = None

    def deliver(self, answer: Interruptible) -> None:
        """Make the last part of an answer, which the engine is done with, known to `cut`, until its `end`."""
        self._deliveries[answer] = None

    @property
    def delivering(self) -> int:
        """Answers that are complete, and that their clients have not all taken."""
        return len(self._deliveries)

    def interrupt_all(self, cause: ApiError) -> int:
        """Ends every running request with `cause`; returns how many there were."""
        live = list(self._live)
        for request in live:
            request.interrupt(cause)
        return len(live)

    def stop(self, cause: ApiError) -> int:
        """Like `interrupt_all`, and nothing can start any more."""
        self._stopped = cause
        self._tell_end(cause)
        return self.interrupt_all(cause)

    def cut(self, cause: ApiError) -> None:
        """End what is being delivered."""
        for answer in list(self._deliveries):
            answer.interrupt(cause)

    async def idle(self) -> None:
        """Returns when no request has a place in the server."""
        await self._until(lambda: not self.requests)

    async def delivered(self) -> None:
        """Returns when all requests have ended and all answers are with the kernel or their clients."""
        await self._until(lambda: not self.requests and not self._live and not self._deliveries)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


def _draining() -> ApiError:
    return unavailable("draining", "The server is shutting down", DRAINING_RETRY_S)
