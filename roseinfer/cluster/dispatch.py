"""Placement of requests on engines, and what happens when an engine rejects them, drains, hangs or dies."""

import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from math import inf
from typing import Protocol

from roseinfer.cluster.displaced import DisplacedRequests, Displacement, in_send_order
from roseinfer.cluster.endpoint import Endpoint
from roseinfer.cluster.endpoints import Endpoints, expected_wait_s, lost_request_error, unavailable_error
from roseinfer.cluster.routing import RoutingState, new_ask, prompt_block_keys, resumed_ask
from roseinfer.core.clock import Clock
from roseinfer.core.errors import EngineDeadError, EngineLostError, InvalidRequestError
from roseinfer.core.slo import Cause, Rejection
from roseinfer.engine.api import RoutingObserver
from roseinfer.engine.live import LiveRequest, LiveRequests
from roseinfer.router.base import EngineForecast, Placement, RoutingRequest
from roseinfer.router.breaker import AttemptOutcome
from roseinfer.router.overdue import Unanswered, overdue_moves
from roseinfer.router.placer import Placer

log = logging.getLogger(__name__)

# Promises are read at most this often: they change once per step.
MIN_REFRESH_S = 0.001
# Number of engines that a request may lose if it may have crashed them, and if it did not.
MAX_BLAMED_LOSSES_COUNT = 1
MAX_LOSSES_COUNT = 3


class NullRoutingObserver:
    """`RoutingObserver` that ignores everything."""

    def placed(self, engine: int, reason: str) -> None: ...

    def retried(self, engine: int) -> None: ...

    def placed_again(self, engine: int, cause: str) -> None: ...

    def resumed(self, engine: int, cause: str) -> None: ...

    def breaker(self, engine: int, open: bool) -> None: ...

    def engine_added(self, engine: int) -> None: ...

    def engine_removed(self, engine: int) -> None: ...


class RequestDispatcher(Protocol):
    """Chooses engines for requests. A `FailoverHandler` whose `lost` gets an endpoint."""

    def add(self, number: int) -> None: ...

    def remove(self, number: int) -> None: ...

    def place(self, live: LiveRequest) -> Endpoint | None:
        """Return where to send a new request; None: no engine accepts requests."""
        ...

    def on_connected(self, endpoint: Endpoint, another: bool) -> None: ...

    def refresh(self) -> None: ...

    def tick(self) -> None: ...

    def lost(self, endpoint: Endpoint, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None: ...

    def place_displaced(self) -> None:
        """Send the requests of lost engines to other engines, or end them."""
        ...

    def rejected(self, live: LiveRequest, rejection: Rejection) -> Rejection | None: ...

    def cancelled(self, live: LiveRequest) -> None: ...

    def started(self, live: LiveRequest, cached_tokens: int) -> None: ...

    def observe(self, observer: RoutingObserver) -> None: ...


class SingleDispatcher:
    """Dispatcher for a single endpoint. Requests end with their engine, since no other can continue them."""

    def __init__(self, endpoints: Endpoints, requests: LiveRequests) -> None:
        self._endpoints = endpoints
        self._requests = requests

    def add(self, number: int) -> None: ...

    def remove(self, number: int) -> None: ...

    def place(self, live: LiveRequest) -> Endpoint | None:
        """Return the endpoint unless it drains. A quiet engine may recover, and no other can take the request."""
        return next((endpoint for endpoint in self._endpoints if endpoint.usable and not endpoint.draining), None)

    def on_connected(self, endpoint: Endpoint, another: bool) -> None:
        endpoint.refresh()

    def refresh(self) -> None:
        for endpoint in self._endpoints:
            endpoint.refresh()

    tick = refresh

    def lost(self, endpoint: Endpoint, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        on_purpose = endpoint.draining and not suspects
        for live in requests:
            if live in self._requests:
                live.fail(lost_request_error(live, self._endpoints, reason, on_purpose=on_purpose))

    def place_displaced(self) -> None: ...

    def rejected(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        return rejection

    def cancelled(self, live: LiveRequest) -> None: ...

    def started(self, live: LiveRequest, cached_tokens: int) -> None: ...

    def observe(self, observer: RoutingObserver) -> None: ...


class Dispatcher:
    """Dispatcher for several engines. `keyed`: the router uses keys of the prompts' blocks of `block_size` tokens.

    Every change happens within one call, so a request is always on exactly one engine. It can be cancelled at any time.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        placer: Placer,
        requests: LiveRequests,
        *,
        keyed: bool,
        block_size: int,
    ) -> None:
        self._observer: RoutingObserver = NullRoutingObserver()
        self._endpoints = endpoints
        self._placer = placer
        self._requests = requests
        self._displaced = DisplacedRequests(requests)
        self._clock: Clock = requests.clock
        self._keyed = keyed
        self._block_size = block_size
        self._open_breakers: set[int] = set()
        self._quiet: set[int] = set()
        self._refreshed_s = -inf

    # --- new requests -------------------------------------------------------------------------------------------
    def place(self, live: LiveRequest) -> Endpoint | None:
        """Return where to send a new request; None: no engine accepts requests."""
        if self._keyed:
            live.keys = prompt_block_keys(live.request, self._block_size)
        now_s = self._clock.now()
        ask = self._ask(live, now_s)
        if now_s >= self._refreshed_s + MIN_REFRESH_S:
            self.refresh()
        placement = self._placer.place(ask, now_s)
        if placement is None:
            return None
        live.routing = RoutingState.new(placement)
        self._observer.placed(placement.engine, placement.reason)
        return self._endpoints[placement.engine]

    def _ask(self, live: LiveRequest, now_s: float) -> RoutingRequest:
        ask = new_ask(live.request, live.keys, self._block_size, now_s)
        if not live.has_output:
            return ask
        return resumed_ask(ask, max(len(text.ids) for text in live.texts if not text.ended), live.left)

    def started(self, live: LiveRequest, cached_tokens: int) -> None:
        """Implement `FailoverHandler`."""
        if isinstance(live.routing, RoutingState):
            placement = live.routing.placement
            self._placer.on_first_token(placement, cached_tokens)
            self._placer.report(placement.engine, AttemptOutcome.ANSWERED, self._clock.now())

    def cancelled(self, live: LiveRequest) -> None:
        """Implement `FailoverHandler`."""
        self._forget_prefix(live)

    def observe(self, observer: RoutingObserver) -> None:
        """Report placements to `observer` from now on, and the present engines at once."""
        self._observer = observer
        for endpoint in self._endpoints:
            observer.engine_added(endpoint.number)

    # --- engines that come and go -------------------------------------------------------------------------------
    def add(self, number: int) -> None:
        """Add an engine that is not connected yet."""
        self._placer.add(number)
        self._placer.set_available(number, False)
        self._observer.engine_added(number)

    def remove(self, number: int) -> None:
        """Remove an engine that holds no request."""
        self._placer.remove(number)
        self._quiet.discard(number)
        self._open_breakers.discard(number)
        self._observer.engine_removed(number)

    # --- what engines say ---------------------------------------------------------------------------------------
    def on_connected(self, endpoint: Endpoint, another: bool) -> None:
        """Handle a new connection. `another`: to another process than before."""
        if another:
            self._placer.reset(endpoint.number)
        self.refresh()
        self.place_displaced()

    def refresh(self) -> None:
        """Pass the newest promises to the router."""
        self._refreshed_s = self._clock.now()
        for endpoint in self._endpoints:
            promise = endpoint.refresh()
            if promise is not None:
                self._placer.update(endpoint.number, promise)
            self._placer.set_available(endpoint.number, endpoint.accepts_requests)

    def tick(self) -> None:
        """Move requests off engines that drain, hang, were lost or are full. Called periodically."""
        self.refresh()
        self.place_displaced()
        for endpoint in self._endpoints:
            if endpoint.engine is not None and endpoint.quiet:
                self._evacuate(endpoint, "quiet", partial(_lost_too_many, blamed=not endpoint.host_lost))
            elif endpoint.engine is not None and endpoint.draining:
                self._evacuate(endpoint, "drain", _never if endpoint.must_empty else _has_output)
            elif endpoint.engine is not None:
                self._relieve(endpoint)
        self._report_faults()
        self._report_breakers()

    def _report_faults(self) -> None:
        """Report one fault per hang, however long it lasts."""
        quiet = {endpoint.number for endpoint in self._endpoints if endpoint.engine is not None and endpoint.quiet}
        for number in quiet - self._quiet:
            self._placer.report(number, AttemptOutcome.FAULT, self._clock.now())
        self._quiet = quiet

    def _report_breakers(self) -> None:
        is_open = {endpoint.number for endpoint in self._endpoints if self._placer.is_breaker_open(endpoint.number)}
        for number in is_open ^ self._open_breakers:
            self._observer.breaker(number, number in is_open)
        self._open_breakers = is_open

    # --- requests that leave an engine --------------------------------------------------------------------------
    def _forget_prefix(self, live: LiveRequest) -> None:
        """Record that a request leaves its engine, which has not computed its prompt if there is no output."""
        if not live.has_output:
            self._placer.on_unprefilled(_routing(live).placement)

    def _evacuate(self, endpoint: Endpoint, cause: str, stays: Callable[[LiveRequest], bool]) -> None:
        """Move the requests of an engine to others while any accepts them."""
        engine = endpoint.engine
        assert engine is not None
        for live in in_send_order([live for live in self._requests.all() if live.engine is engine and not stays(live)]):
            if live.engine is not engine:  # cancelled when another one was moved
                continue
            now_s = self._clock.now()
            placement = self._placer.place(self._ask(live, now_s), now_s, (endpoint.number,))
            if placement is None:
                return
            if cause == "quiet":  # a request that moves again and again may cause the hangs
                _routing(live).record_loss(blamed=not endpoint.host_lost)
            self._forget_prefix(live)
            engine.withdraw(live)
            self._move(live, placement, cause)

    def _relieve(self, endpoint: Endpoint) -> None:
        """Move requests without objectives that wait too long to other engines. Each moves once."""
        engine, now_s = endpoint.engine, self._clock.now()
        assert engine is not None

        def sent() -> Iterator[Unanswered[LiveRequest]]:
            for live in self._requests.all():
                if live.engine is engine and not live.has_output:
                    yield Unanswered(live, _arrival_s(live), live.left, _may_leave_queue(live))

        def ask(live: LiveRequest) -> RoutingRequest | None:
            return self._ask(live, now_s) if live.engine is engine else None

        for live, placement in overdue_moves(self._placer, endpoint.number, sent, ask, now_s):
            _routing(live).left_queue = True
            self._forget_prefix(live)
            engine.withdraw(live)
            self._move(live, placement, "queue")

    def lost(self, endpoint: Endpoint, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        """Displace the requests of a lost engine, or end them. `endpoint` has noted the loss already.

        Other engines get them a little later. By then, further engines that were lost at the same time are known, so no
        request loses a second engine that was dead before it came.
        """
        drained = endpoint.draining  # before `refresh`, which may already report it as dead
        self.refresh()
        drained = (drained or endpoint.draining) and not suspects
        if not drained:
            self._placer.report(endpoint.number, AttemptOutcome.FAULT, self._clock.now())
        for live in requests:
            if live not in self._requests:  # cancelled when another one failed
                continue
            blamed = live.wire_id in suspects if suspects else not endpoint.host_lost
            error = None if drained else self._record_loss(live, reason, blamed=blamed, alone=len(suspects) == 1)
            if error is not None:
                live.fail(error)
                continue
            self._forget_prefix(live)
            self._displaced.add(live, "drain" if drained else "death", reason, self._clock.now())
        self.place_displaced()

    def _record_loss(self, live: LiveRequest, reason: str, *, blamed: bool, alone: bool) -> EngineLostError | None:
        """Count a lost engine. Return an error if the request seems to crash engines. `blamed`: it may have crashed
        this one; `alone`: it is the only suspect.
        """
        retry_s = unavailable_error(self._endpoints).retry_s
        if blamed and alone:
            return EngineLostError(f"the engine failed when it computed this request: {reason}", only_suspect=True)
        if _lost_too_many(live, blamed=blamed):
            losses = _routing(live).losses + 1
            return EngineLostError(f"request failed after losing {losses} engines: {reason}", retry_s=retry_s)
        _routing(live).record_loss(blamed=blamed)
        return None

    def place_displaced(self) -> None:
        """Send the requests of lost engines to other engines, or end those that no engine takes in time.

        Engines on this host that are ending are seen first: they get none.
        """
        now_s = self._clock.now()
        if self._displaced.any_due(now_s):
            for endpoint in self._endpoints:
                endpoint.look_for_end()
            self.refresh()
        for live, displacement in self._displaced.settled(now_s):
            try:
                self._place_again(live, displacement, now_s)
            except Exception:  # a bug here must not end the other requests
                log.exception("cannot move request %s to another engine", live.request_id)
                if live in self._requests:
                    live.fail(EngineDeadError(displacement.reason))

    def _place_again(self, live: LiveRequest, displacement: Displacement, now_s: float) -> None:
        ask = self._ask(live, now_s)
        placement = self._placer.place(ask, now_s)
        if placement is None and live.has_output:  # others can wait
            placement = self._any_usable(ask)
        if placement is not None:
            self._displaced.remove(live)
            self._move(live, placement, displacement.cause)
        elif live.has_output or not self._is_expected_by(displacement.until_s, now_s):
            on_purpose = displacement.cause == "drain"
            live.fail(lost_request_error(live, self._endpoints, displacement.reason, on_purpose=on_purpose))

    def _is_expected_by(self, until_s: float, now_s: float) -> bool:
        """True if an engine is expected to accept requests by then."""
        is_final = len(self._endpoints) > 0 and self._endpoints.health().final
        return not is_final and now_s + expected_wait_s(self._endpoints) <= until_s

    def _any_usable(self, ask: RoutingRequest) -> Placement | None:
        """Return a placement, unknown to the router, on a draining, failing or quiet engine: better than none."""
        there = [endpoint for endpoint in self._endpoints if endpoint.usable]
        if not there:
            return None
        number = min(there, key=lambda endpoint: (endpoint.quiet, endpoint.stats().running)).number
        return Placement(0, number, "only", EngineForecast(number), ask)

    def _move(self, live: LiveRequest, placement: Placement, cause: str) -> None:
        """Send a request that is on no engine to one, or end it."""
        try:
            self._resend(live, placement, cause)
        except InvalidRequestError as error:
            live.fail(error)
        except Exception:  # ours
            log.exception("cannot move request %s to another engine", live.request_id)
            live.fail(EngineDeadError(f"cannot move the request to another engine ({cause})"))

    def _resend(self, live: LiveRequest, placement: Placement, cause: str) -> None:
        routing = _routing(live)
        left = routing.placement
        if live.has_output:
            self._observer.resumed(left.engine, cause)
        elif cause == "rejected":
            self._observer.retried(left.engine)
        else:
            self._observer.placed_again(left.engine, cause)
        routing.move_to(placement, begun=live.has_output, rejected=cause == "rejected")
        engine = self._endpoints[placement.engine].engine
        assert engine is not None, "the router places requests on connected engines only"
        engine.send(live)

    # --- rejections ---------------------------------------------------------------------------------------------
    def rejected(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        """Retry a rejected request once, before its first token, on an engine that can still meet its objectives."""
        routing = _routing(live)
        if live.has_output:
            return rejection
        self.refresh()
        now_s = self._clock.now()
        ask = self._ask(live, now_s)
        here = routing.placement.engine
        self._placer.report(here, AttemptOutcome.NEUTRAL, now_s)
        self._forget_prefix(live)
        placement = None if routing.route.retries else self._placer.place_retry(ask, now_s, (here,))
        if placement is None:
            return self._combined_rejection(live, ask, rejection, now_s)
        routing.refusal = rejection
        assert live.engine is not None
        live.engine.withdraw(live)
        self._move(live, placement, "rejected")
        return None

    def _combined_rejection(
        self, live: LiveRequest, ask: RoutingRequest, rejection: Rejection, now_s: float
    ) -> Rejection:
        """Return the rejection on behalf of all engines.

        It is hopeless only if no idle engine could meet the objective. `attainable_s` is the best of the engines asked.
        """
        meta = live.request.prompt.meta
        best_s = self._placer.best_ttft_s(ask, now_s)
        if best_s > 0:  # 0 = unknown
            age_s = 0.0 if meta.arrival_s is None else now_s - meta.arrival_s
            rejection = rejection._replace(predicted_ttft_s=min(rejection.predicted_ttft_s, age_s + best_s))
        if rejection.hopeless and self._placer.attainable_when_idle(self._ask(live, meta.arrival_s or 0.0)):
            rejection = rejection._replace(cause=Cause.OTHER)
        first = _routing(live).refusal
        if first is not None and first.reason == rejection.reason:
            known = [each.attainable_s for each in (first, rejection) if each.attainable_s is not None]
            rejection = rejection._replace(attainable_s=min(known, default=None))
        return rejection


def _routing(live: LiveRequest) -> RoutingState:
    assert isinstance(live.routing, RoutingState), "set by `place`"
    return live.routing


def _arrival_s(live: LiveRequest) -> float:
    arrival_s = live.request.prompt.meta.arrival_s
    assert arrival_s is not None, "set by `LiveRequests.make`"
    return arrival_s


def _lost_too_many(live: LiveRequest, *, blamed: bool) -> bool:
    """True if a request has lost so many engines that no other gets it. `blamed`: it may have crashed this one."""
    routing = _routing(live)
    return routing.losses >= MAX_LOSSES_COUNT or (blamed and routing.blamed >= MAX_BLAMED_LOSSES_COUNT)


def _may_leave_queue(live: LiveRequest) -> bool:
    """True if a request has no objectives and has not left a queue yet."""
    slo = live.request.prompt.meta.slo
    return (slo is None or slo.empty) and not _routing(live).left_queue


def _has_output(live: LiveRequest) -> bool:
    return live.has_output


def _never(live: LiveRequest) -> bool:
    return False
