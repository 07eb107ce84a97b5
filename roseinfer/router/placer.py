"""Placement of requests: what one API process knows of the engines, and the choice of one for each request."""

from collections.abc import Container, Iterable
from math import inf
from random import Random

from roseinfer.core.promise import Promise
from roseinfer.router.base import EngineForecast, Placement, RoutingRequest
from roseinfer.router.breaker import AttemptOutcome
from roseinfer.router.registry import make_routing_policy
from roseinfer.router.view import EngineView

DEFAULT_BLOCKS = 16_384
MAX_BLOCKS = 131_072  # per engine whose contents are modelled


class Placer:
    """Chooses an engine for each request. Not thread-safe; every process has its own.

    `routing`: name of the policy (`registry.ROUTERS`). `engines`: their numbers. `share`: number of processes that
    place requests, including this one. `blocks`: KV blocks of an engine. `delay_s`: time until an engine has read a
    request; an older promise does not include it. `seed`: of random choices; random by default, so that processes with
    the same view do not all choose the same engine.

    All times are on one monotonic clock, that of `Promise.at_s`.
    """

    def __init__(
        self,
        routing: str,
        engines: Iterable[int],
        *,
        share: int = 1,
        blocks: int = DEFAULT_BLOCKS,
        delay_s: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._policy = make_routing_policy(routing, Random(seed))
        self._blocks, self._share, self._delay_s = min(blocks, MAX_BLOCKS), share, delay_s
        self.views: dict[int, EngineView] = {}
        self._number = 0
        for engine in engines:
            self.add(engine)

    # --- engines ------------------------------------------------------------------------------------------------
    def add(self, engine: int) -> None:
        """Add an engine. Its number must never have been used before."""
        self.views[engine] = EngineView(engine, self._blocks, self._share, self._delay_s)

    def remove(self, engine: int) -> None:
        """Remove an engine for good. Later calls about its requests have no effect."""
        del self.views[engine]

    def update(self, engine: int, promise: Promise) -> None:
        """Store an engine's newest promise. Takes a few microseconds: skip promises that have been seen."""
        self.views[engine].update(promise)

    def set_available(self, engine: int, available: bool) -> None:
        """Set whether an engine is reachable. Initially every engine is."""
        self.views[engine].set_available(available)

    def reset(self, engine: int) -> None:
        """Forget the promise, cache and failures of an engine that was restarted."""
        self.views[engine].reset()

    def report(self, engine: int, outcome: AttemptOutcome, now_s: float) -> None:
        """Report the outcome of a request to the engine's breaker."""
        view = self.views.get(engine)
        if view is not None:
            view.breaker.report(outcome, now_s)

    def is_breaker_open(self, engine: int) -> bool:
        return not self.views[engine].breaker.closed

    # --- placement ----------------------------------------------------------------------------------------------
    def place(self, request: RoutingRequest, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        """Choose an engine and count the request as sent. Return None if no engine accepts requests."""
        candidates = self.candidates(now_s, excluded)
        if not candidates:
            return None
        if len(candidates) == 1:
            view, reason = candidates[0], "only"
        else:
            view, reason = self._policy.choose(request, candidates, now_s)
        return self._send(view, request, now_s, reason)

    def place_retry(self, request: RoutingRequest, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        """Place a rejected request on the least loaded engine that still meets its objectives, if there is one.

        `request` has the time that is left of the objectives.
        """
        best: EngineView | None = None
        least = inf
        for view in self.candidates(now_s, excluded):
            forecast = self._forecast(view, request, now_s)
            cost = forecast.pace_cost + forecast.utilisation
            if view.priced and forecast.meets_objectives and cost < least:
                best, least = view, cost
        return None if best is None else self._send(best, request, now_s, "retry")

    def on_first_token(self, placement: Placement, cached_tokens: int) -> None:
        """Record the first token of a request; `cached_tokens` of its prompt were in the engine's prefix cache."""
        view = self.views.get(placement.engine)
        if view is not None:
            view.on_first_token(placement.request, placement.forecast.cached_tokens, cached_tokens)

    def on_unprefilled(self, placement: Placement) -> None:
        """Record that a request ended before its prompt was computed, so no cache has it."""
        view = self.views.get(placement.engine)
        if view is not None:
            view.on_unprefilled(placement.request, placement.forecast.cached_tokens)

    # --- forecasts ----------------------------------------------------------------------------------------------
    def best_ttft_s(self, request: RoutingRequest, now_s: float) -> float:
        """Return the smallest predicted TTFT of all engines, in seconds.

        0 if no engine publishes costs, inf if no engine accepts requests.
        """
        views = [view for view in self.views.values() if view.accepts_requests]
        return min([self._forecast(view, request, now_s).ttft_s for view in views], default=inf)

    def attainable_when_idle(self, request: RoutingRequest) -> bool:
        """Return True if some engine publishes costs and would meet the objectives if it were idle."""
        views = self.views.values()
        return any(view.attainable_when_idle(request) for view in views if view.accepts_requests and view.priced)

    def forecast(self, engine: int, request: RoutingRequest, now_s: float) -> EngineForecast:
        return self._forecast(self.views[engine], request, now_s)

    def candidates(self, now_s: float, excluded: Container[int]) -> list[EngineView]:
        return [
            view
            for view in self.views.values()
            if view.accepts_requests and view.engine not in excluded and view.breaker.admits(now_s)
        ]

    def _forecast(self, view: EngineView, request: RoutingRequest, now_s: float) -> EngineForecast:
        return view.forecast(request, now_s, view.cached_tokens(request))

    def _send(self, view: EngineView, request: RoutingRequest, now_s: float, reason: str) -> Placement:
        forecast = self._forecast(view, request, now_s)
        view.on_sent(request, forecast.cached_tokens, now_s)
        self._number += 1
        return Placement(self._number, view.engine, reason, forecast, request)
