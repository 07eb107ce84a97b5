"""The engine that can promise the most: requests of a tight pace keep together, and prefixes are followed."""

from collections.abc import Sequence
from math import inf
from random import Random

from roseinfer.router.base import ROOM, Ask, Candidate
from roseinfer.router.least import Least

LONG_PREFIX = 128  # tokens in an engine's cache, from which on it is worth going there
FULL = 0.75  # mean utilisation of the engines, from which on nobody looks for room
UNEVEN, UNEVEN_SHARE = 32, 1.1  # more requests than on the least loaded, which requests without objectives avoid

Score = tuple[bool, float, float]


class Pace:
    """Least of (objectives broken, how late and how much too full, what its pace costs the others there + utilisation).

    What a step costs whatever it holds is paid as often as the request of the tightest pace on an engine asks for, so
    tight requests go where others are, as long as they fit, and then to where they cost the least. When the fleet is
    full they stay together even so: spread over all engines they would make all pay.

    Engines that hold a long prefix come first: another one is chosen only if none of them can keep the objectives, that
    one can, and the fleet is not full. A request without objectives goes where the fewest such wait. Engines whose
    policy knows no costs are chosen by their load.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._least = Least(rng)

    def choose(self, ask: Ask, candidates: Sequence[Candidate], now_s: float) -> tuple[Candidate, str]:
        priced = [candidate for candidate in candidates if candidate.priced]
        if not priced:
            return self._least.choose(ask, candidates, now_s)
        cached = _cached(ask, priced)
        holders = [i for i, tokens in enumerate(cached) if tokens >= LONG_PREFIX]
        if not ask.promised:
            near = [priced[i] for i in holders]
            return (self._calmest(near), "prefix") if near and _even(near, priced) else (self._calmest(priced), "rest")
        full = sum([candidate.utilisation for candidate in priced]) >= FULL * len(priced)
        if not holders or len(holders) == len(priced):
            return self._best(ask, priced, cached, full, now_s)[0], "prefix" if holders else "pace"
        near, there = [priced[i] for i in holders], [cached[i] for i in holders]
        chosen, score = self._best(ask, near, there, full, now_s)
        if score[0] and not full:
            other, other_score = self._best(ask, priced, cached, full, now_s)
            if not other_score[0]:
                return other, "promise"
        return chosen, "prefix"

    def _best(
        self, ask: Ask, candidates: Sequence[Candidate], cached: Sequence[int], full: bool, now_s: float
    ) -> tuple[Candidate, Score]:
        """The one with the least score, and that; of equal ones any. `full`: the fleet is, so that nobody is looked for
        who has room.
        """
        best, least, equal = candidates[0], (True, inf, inf), 0
        room = 1.0 if full else ROOM
        for candidate, tokens in zip(candidates, cached, strict=True):
            _, _, late_s, utilisation, extra, _ = candidate.outlook(ask, now_s, tokens)
            over = utilisation - 1 if utilisation > 1 else 0.0
            score = (late_s > 0 or utilisation > room, late_s + over, extra + utilisation)
            if score < least:
                best, least, equal = candidate, score, 1
            elif score == least:
                equal += 1
                if self._rng.random() * equal < 1:
                    best = candidate
        return best, least

    def _calmest(self, candidates: Sequence[Candidate]) -> Candidate:
        rng = self._rng.random
        return min(candidates, key=lambda one: (one.best_effort, one.utilisation, sum(one.load), rng()))


def _cached(ask: Ask, candidates: Sequence[Candidate]) -> Sequence[int]:
    """Tokens of its prompt that each is thought to hold."""
    if not ask.keys:
        return [0] * len(candidates)
    cached, tokens = [], 0
    for candidate in candidates:
        tokens = candidate.held_tokens(ask, tokens)
        cached.append(tokens)
    return cached


def _even(holders: Sequence[Candidate], candidates: Sequence[Candidate]) -> bool:
    """Whether the holders have not far more to do than others."""
    near, least = min([sum(one.load) for one in holders]), min([sum(one.load) for one in candidates])
    return near <= least + UNEVEN or near <= UNEVEN_SHARE * least
