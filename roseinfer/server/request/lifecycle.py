"""Lifecycle of the server: admission, running requests, and shutdown."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from types import TracebackType

from starlette.requests import ClientDisconnect

from roseinfer.core.clock import Clock
from roseinfer.server.http.connection import ClientConnection
from roseinfer.server.http.errors import MAX_RETRY_S, ApiError, deadline_exceeded, draining, unavailable


class Guard:
    """Context manager around the work of the current task. `interrupt` makes it raise the given cause.

    Cancel the task itself, like `asyncio.timeout`: a second task would cost more than a request's own bookkeeping.
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
        # The cancellation by `interrupt` arrived here. Other code may have cancelled the task too.
        if task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise self._cause from None


log = logging.getLogger(__name__)

MAX_RATE_SAMPLES = 64
UNKNOWN_RATE_RETRY_S = 1.0


class DrainRate:
    """Rate of finishing prompts, from the times of the last `MAX_RATE_SAMPLES` ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ends_s: deque[float] = deque(maxlen=MAX_RATE_SAMPLES)

    def note(self) -> None:
        self._ends_s.append(self._clock.now())

    def seconds_for(self, count: int) -> float:
        """Estimated seconds until `count` more prompts have finished, within [1, MAX_RETRY_S]."""
        if len(self._ends_s) < 2:
            return UNKNOWN_RATE_RETRY_S
        span_s = self._clock.now() - self._ends_s[0]
        return min(max(1.0, count * span_s / len(self._ends_s)), MAX_RETRY_S)


class Occupancy:
    """Requests and prompts in the server. With several API processes a subclass counts those of all."""

    def __init__(self) -> None:
        self.requests = 0
        self.prompts = 0

    def take(self, requests: int, prompts: int) -> None:
        """Add to the counts; negative numbers release."""
        self.requests += requests
        self.prompts += prompts

    def all_requests(self) -> int:
        return self.requests

    def all_prompts(self) -> int:
        return self.prompts


class Ticket:
    """Context manager that counts one request in the server, with one prompt until `grow` sets their number.

    Enter only if `Lifecycle.refusal` returns None.

    `release` may come earlier, when the engine has finished and only the answer remains to be sent.
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
    """Admission and shutdown. `max_prompts` bounds the prompts of all requests in the server, running or not.

    `share`: this process's share of the server's requests, for estimates of its rate.
    """

    def __init__(self, max_prompts: int, clock: Clock, room: Occupancy | None = None, share: float = 1.0) -> None:
        self._draining = False
        self.room = room or Occupancy()
        self._max_prompts = max_prompts
        self._share = share
        self._rate = DrainRate(clock)
        self._live: dict[Guard, None] = {}
        self._deliveries: dict[Guard, None] = {}
        self._stopped: ApiError | None = None
        self._changed = asyncio.Event()
        self._on_end: list[Callable[[ApiError], None]] = []

    def on_end(self, listener: Callable[[ApiError], None]) -> None:
        """Call `listener` with the error for new work as soon as the shutdown begins."""
        self._on_end.append(listener)

    def begin_drain(self) -> None:
        self._draining = True
        self._notify_end(draining())

    def _notify_end(self, cause: ApiError) -> None:
        listeners, self._on_end = self._on_end, []
        for listener in listeners:
            listener(cause)

    def refusal(self) -> ApiError | None:
        """Return the error for a new request, None if it may enter."""
        if self._draining:
            return draining()
        prompts = self.room.all_prompts()
        if prompts >= self._max_prompts:
            wait_s = self.retry_after_s(prompts - self._max_prompts + 1)
            limit = f"--max-num-queued-reqs {self._max_prompts}"
            return unavailable("queue_full", f"The server is at its limit of prompts ({limit})", wait_s)
        return None

    def retry_after_s(self, prompts: int) -> float:
        """Estimate the seconds until that many more prompts have finished."""
        return self._rate.seconds_for(math.ceil(prompts * self._share))

    def take_room(self, requests: int, prompts: int) -> None:
        """Add to the counts; negative numbers release."""
        self.room.take(requests, prompts)
        if requests < 0:
            self._changed.set()

    @property
    def requests(self) -> int:
        """Requests in this process."""
        return self.room.requests

    def finished(self, prompts: int) -> None:
        """Note finished prompts, for the rate."""
        for _ in range(min(prompts, MAX_RATE_SAMPLES)):
            self._rate.note()

    def begin(self, request: Guard) -> None:
        """Register `request` for `interrupt_all`, and after `done_with` for `cut`, until its `end`.

        Raises the cause after `stop`.
        """
        if self._stopped is not None:
            raise self._stopped
        self._live[request] = None

    def end(self, request: Guard) -> None:
        """Forget `request`, whether or not it has begun."""
        self._live.pop(request, None)
        self._deliveries.pop(request, None)
        self._changed.set()

    def done_with(self, request: Guard) -> None:
        """Note that the engine has finished `request` and only its answer remains to be sent."""
        if request in self._live:
            del self._live[request]
            self._deliveries[request] = None

    def deliver(self, answer: Guard) -> None:
        """Register the sending of a finished answer for `cut`, until its `end`."""
        self._deliveries[answer] = None

    @property
    def delivering(self) -> int:
        """Complete answers that are still being sent."""
        return len(self._deliveries)

    def interrupt_all(self, cause: ApiError) -> int:
        """End every running request with `cause`; return their number."""
        live = list(self._live)
        for request in live:
            request.interrupt(cause)
        return len(live)

    def stop(self, cause: ApiError) -> int:
        """Interrupt all requests and let none begin any more; return their number."""
        self._stopped = cause
        self._notify_end(cause)
        return self.interrupt_all(cause)

    def cut(self, cause: ApiError) -> None:
        """End the sending of finished answers."""
        for answer in list(self._deliveries):
            answer.interrupt(cause)

    async def idle(self) -> None:
        """Wait until no request holds a ticket."""
        await self._until(lambda: not self.requests)

    async def delivered(self) -> None:
        """Wait until all requests have ended and all answers are sent."""
        await self._until(lambda: not self.requests and not self._live and not self._deliveries)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


class RequestGuard(Guard):
    """Guard of one request. A disconnect of the client, its deadline and a shutdown interrupt it.

    Raises the cause: `ClientDisconnect`, or `ApiError` 504 or 503.
    """

    def __init__(self, lifecycle: Lifecycle, connection: ClientConnection, clock: Clock) -> None:
        super().__init__()
        self._lifecycle = lifecycle
        self._connection = connection
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        self._lifecycle.begin(self)
        self._connection.on_disconnect(self._on_disconnect)
        try:
            super().__enter__()
        except Exception:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        super().__exit__(kind, error, traceback)

    def _leave(self) -> None:
        self._lifecycle.end(self)
        self._connection.on_disconnect(None)
        if self._timer is not None:
            self._timer.cancel()

    def end_by(self, by_s: float, unless: Callable[[], bool] | None = None) -> None:
        """Set the deadline on the given clock, which counts unless `unless` returns True then.

        Raises `ApiError` 504 if it has passed.
        """
        left_s = by_s - self._clock.now()
        if left_s <= 0:
            raise deadline_exceeded()
        self._timer = asyncio.get_running_loop().call_later(left_s, self._on_late, unless)

    def _on_late(self, unless: Callable[[], bool] | None) -> None:
        if unless is None or not unless():
            self.interrupt(deadline_exceeded())

    def _on_disconnect(self) -> None:
        self.interrupt(ClientDisconnect())
