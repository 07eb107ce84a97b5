"""Routing policy "pace": groups requests by TPOT objective and prefers engines that have the prefix."""

from collections.abc import Sequence
from math import inf
from random import Random

from roseinfer.router.base import MAX_TRUSTED_SHARE, RoutingRequest
from roseinfer.router.least import LeastLoaded
from roseinfer.router.spared import SparedEngine
from roseinfer.router.view import EngineView

MIN_PREFIX_TOKENS = 128  # cached tokens that make an engine preferred
FULL_SHARE = 0.75  # mean utilisation from which the fleet counts as full
# Requests without objectives go to an engine with the prefix unless it has this many more than the least loaded one.
MAX_IMBALANCE_COUNT, MAX_IMBALANCE_SHARE = 32, 1.1

Score = tuple[bool, float, float]
Known = tuple[EngineView, int]  # with the tokens of the prompt that it has cached


class PaceRouting:
    """Minimise (objectives missed, lateness and overload, cost to other requests + utilisation).

    An engine pays the constant cost of a step as often as its tightest TPOT objective requires. So tight requests go
    where others are while they fit, then where they cost the least. A full fleet keeps them together too: spread
    over all engines they would slow down every request. If they are spread, one engine gets no more (`SparedEngine`).

    Engines with a long cached prefix come first; without any, those with the request's LoRA adapter in a slot. Another
    engine is chosen only if none of them meets the objectives, that one does, and the fleet is not full. A request
    without objectives goes where the fewest such requests wait. Engines whose policy publishes no costs are chosen by
    load.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._by_load = LeastLoaded(rng)
        self._spared = SparedEngine()

    def choose(self, request: RoutingRequest, candidates: Sequence[EngineView], now_s: float) -> tuple[EngineView, str]:
        priced = [candidate for candidate in candidates if candidate.priced]
        if not priced:
            return self._by_load.choose(request, candidates, now_s)
        known = list(zip(priced, _cached_tokens(request, priced), strict=True))
        holders, reason = _holders(request, known)
        if not request.has_objectives:
            preferred = [candidate for candidate, _ in holders]
            if preferred and _is_balanced(preferred, priced):
                return self._least_busy(preferred), reason
            return self._least_busy(priced), "rest"
        full = sum([candidate.utilisation for candidate in priced]) >= FULL_SHARE * len(priced)
        spared = self._spared.from_request(request, priced, full)
        if not holders:
            allowed = [one for one in known if one[0].engine != spared]
            return self._best(request, allowed, full, now_s)[0], "pace"
        chosen, score = self._best(request, holders, full, now_s)
        if score[0] and not full and len(holders) < len(known):
            other, other_score = self._best(request, known, full, now_s)
            if not other_score[0]:
                return other, "promise"
        return chosen, reason

    def _best(
        self, request: RoutingRequest, candidates: Sequence[Known], full: bool, now_s: float
    ) -> tuple[EngineView, Score]:
        """Return the candidate with the lowest score, and the score; break ties at random.

        A `full` fleet may use all of an engine, since no engine with spare capacity is left.
        """
        (best, _), least, equal = candidates[0], (True, inf, inf), 0
        limit = 1.0 if full else MAX_TRUSTED_SHARE
        for candidate, tokens in candidates:
            _, _, late_s, utilisation, pace_cost, _ = candidate.forecast(request, now_s, tokens)
            over = utilisation - 1 if utilisation > 1 else 0.0
            score = (late_s > 0 or utilisation > limit, late_s + over, pace_cost + utilisation)
            if score < least:
                best, least, equal = candidate, score, 1
            elif score == least:
                equal += 1
                if self._rng.random() * equal < 1:
                    best = candidate
        return best, least

    def _least_busy(self, candidates: Sequence[EngineView]) -> EngineView:
        rng = self._rng.random
        return min(candidates, key=lambda one: (one.best_effort, one.utilisation, sum(one.load), rng()))


def _cached_tokens(request: RoutingRequest, candidates: Sequence[EngineView]) -> Sequence[int]:
    if not request.keys:
        return [0] * len(candidates)
    cached, tokens = [], 0
    for candidate in candidates:
        tokens = candidate.cached_tokens(request, tokens)
        cached.append(tokens)
    return cached


def _holders(request: RoutingRequest, known: Sequence[Known]) -> tuple[Sequence[Known], str]:
    """Return the candidates with a long cached prefix, else those with the request's adapter, and which it is."""
    holders = [(candidate, tokens) for candidate, tokens in known if tokens >= MIN_PREFIX_TOKENS]
    if request.adapter and not holders:
        return [one for one in known if one[0].holds_adapter(request)], "adapter"
    return holders, "prefix"


def _is_balanced(holders: Sequence[EngineView], candidates: Sequence[EngineView]) -> bool:
    """Return True if the least loaded holder has at most slightly more requests than the least loaded candidate."""
    held, least = min([sum(one.load) for one in holders]), min([sum(one.load) for one in candidates])
    return held <= least + MAX_IMBALANCE_COUNT or held <= MAX_IMBALANCE_SHARE * least
