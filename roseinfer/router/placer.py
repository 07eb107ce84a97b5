"""Where requests go: what a process that receives requests knows of several engines, and asks when one comes."""

from collections.abc import Container, Iterable
from math import inf
from random import Random

from roseinfer.core.promise import Promise
from roseinfer.router.base import Ask, Outlook, Placement
from roseinfer.router.breaker import Outcome
from roseinfer.router.registry import make_routing
from roseinfer.router.view import EngineView

BLOCKS = 16_384
MOST_BLOCKS = 131_072  # of an engine, of which it is remembered what they hold


class Placer:
    """Chooses an engine for each request. Not thread-safe; every process has its own.

    `routing`: the way of choosing, by name (`registry.ROUTERS`). `engines`: their numbers. `share`: how many processes
    place requests, this one included. `blocks`: KV blocks of an engine. `delay_s`: how long a request takes until an
    engine has read it; a promise from before that does not count it. `seed`: of what is left to chance, by default
    drawn, so that processes that see the same do not all choose the same.

    All times are on one monotonic clock, that of the promises' `at_s`.
    """

    def __init__(
        self,
        routing: str,
        engines: Iterable[int],
        *,
        share: int = 1,
        blocks: int = BLOCKS,
        delay_s: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._routing = make_routing(routing, Random(seed))
        self._blocks, self._share, self._delay_s = min(blocks, MOST_BLOCKS), share, delay_s
        self._views: dict[int, EngineView] = {}
        self._number = 0
        for engine in engines:
            self.add(engine)

    # --- engines come and go ------------------------------------------------------------------------------------
    def add(self, engine: int) -> None:
        """An engine of which nothing is known yet, with a number that no other has, or has had."""
        self._views[engine] = EngineView(engine, self._blocks, self._share, self._delay_s)

    def drop(self, engine: int) -> None:
        """It is gone for good. What is still heard of requests that were there changes nothing."""
        del self._views[engine]

    # --- what is heard of engines -------------------------------------------------------------------------------
    def update(self, engine: int, promise: Promise) -> None:
        """What an engine published. Costs a few microseconds: not for a promise that has been seen."""
        self._views[engine].update(promise)

    def set_up(self, engine: int, up: bool) -> None:
        """Whether an engine is there at all. At first all are."""
        self._views[engine].set_up(up)

    def forget(self, engine: int) -> None:
        """An engine was started anew: neither its promise, nor its cache, nor its failures are the former one's."""
        self._views[engine].forget()

    def report(self, engine: int, outcome: Outcome, now_s: float) -> None:
        """What came of a request there, for the engine's breaker."""
        view = self._views.get(engine)
        if view is not None:
            view.breaker.report(outcome, now_s)

    def breaker_open(self, engine: int) -> bool:
        return not self._views[engine].breaker.closed

    # --- placing ------------------------------------------------------------------------------------------------
    def place(self, ask: Ask, now_s: float, but: Container[int] = ()) -> Placement | None:
        """Where a request goes, which counts as sent from then on; None if nobody takes requests. `but`: engines that
        do not come into question.
        """
        candidates = self._candidates(now_s, but)
        if not candidates:
            return None
        if len(candidates) == 1:
            view, reason = candidates[0], "only"
        else:
            chosen, reason = self._routing.choose(ask, candidates, now_s)
            view = self._views[chosen.engine]
        return self._send(view, ask, now_s, reason)

    def keeper(self, ask: Ask, now_s: float, but: Container[int] = ()) -> Placement | None:
        """Where a request goes that was refused elsewhere, if anybody's promise still holds it: the one that is least
        full with it. `ask` has what is left of the objectives.
        """
        best: EngineView | None = None
        least = inf
        for view in self._candidates(now_s, but):
            outlook = self._outlook(view, ask, now_s)
            if view.priced and outlook.keeps and outlook.extra + outlook.utilisation < least:
                best, least = view, outlook.extra + outlook.utilisation
        return None if best is None else self._send(best, ask, now_s, "retry")

    def started(self, placement: Placement, cached_tokens: int) -> None:
        """Its first token came; `cached_tokens` of its prompt were in the engine's prefix cache."""
        view = self._views.get(placement.engine)
        if view is not None:
            view.started(placement.ask, placement.outlook.cached_tokens, cached_tokens)

    def ended_unstarted(self, placement: Placement) -> None:
        """It was refused, aborted or lost before its prompt was computed: that is in no cache."""
        view = self._views.get(placement.engine)
        if view is not None:
            view.unstarted(placement.ask, placement.outlook.cached_tokens)

    # --- what could be ------------------------------------------------------------------------------------------
    def best_ttft_s(self, ask: Ask, now_s: float) -> float:
        """The smallest predicted TTFT over all engines that are there, in seconds; 0 if none says what steps cost, inf
        if there is none.
        """
        views = [view for view in self._views.values() if view.takes]
        return min([self._outlook(view, ask, now_s).ttft_s for view in views], default=inf)

    def idle_keeps(self, ask: Ask) -> bool:
        """Whether some engine says what steps cost, and could keep the objectives if it had nothing else to do."""
        return any(view.idle_keeps(ask) for view in self._views.values() if view.takes and view.priced)

    def outlook(self, engine: int, ask: Ask, now_s: float) -> Outlook:
        """What is expected of one engine."""
        return self._outlook(self._views[engine], ask, now_s)

    def _candidates(self, now_s: float, but: Container[int]) -> list[EngineView]:
        views = self._views.values()
        return [view for view in views if view.takes and view.engine not in but and view.breaker.admits(now_s)]

    def _outlook(self, view: EngineView, ask: Ask, now_s: float) -> Outlook:
        return view.outlook(ask, now_s, view.held_tokens(ask))

    def _send(self, view: EngineView, ask: Ask, now_s: float, reason: str) -> Placement:
        outlook = self._outlook(view, ask, now_s)
        view.send(ask, outlook.cached_tokens, now_s)
        self._number += 1
        return Placement(self._number, view.engine, reason, outlook, ask)
