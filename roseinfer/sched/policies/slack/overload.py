"""Overload: limits on price and pace of requests while not all of them can be served."""

from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, sqrt
from typing import NamedTuple

from roseinfer.core.slo import Cause
from roseinfer.sched.policies.slack.demand import MAX_CONSTANT_SHARE

PRICED = (Cause.PRICE, Cause.PACE, Cause.TENANT)  # causes of requests that are not worth their cost
MAX_FILL_SHARE = 1.05  # of the machine, to which the requests below the price limit fill it
MIN_GAIN_RATIO = 1.1  # requests served at a slower pace, relative to the fastest, for which it is in force
MAX_PACES = 8  # compared with each other
MAX_QUIET_GAPS = 10.0  # mean gaps between requests without a new one, after which the stream has ended
UPDATE_S = 0.5

# Pace in seconds -> cost of any step, and of the experts of a row; see `CostParams.cost_tangent`.
CostTangent = Callable[[float], tuple[float, float]]


class Offer(NamedTuple):
    """Work that an arrived request offers. `price_s`: compared with the limit; above its work for a heavy tenant.

    `pace_s`: longest time between steps that it accepts, inf if any. `can_wait`: it may start at any time. `tokens`:
    decoded tokens, for each of which `work_s` includes `expert_s`, which depends on how full steps are.
    """

    at_s: float
    work_s: float
    price_s: float
    pace_s: float
    can_wait: bool = False
    tokens: float = 0.0
    expert_s: float = 0.0

    def work_at(self, expert_s: float) -> float:
        return self.work_s + self.tokens * (expert_s - self.expert_s)


class PriceLimit:
    """Limits on price and pace of requests under overload. `limit_s`: seconds of work per request, else inf.

    `pace_s`: shortest time between steps that is worth its cost; 0 = any. `overloaded`: not all can be served, so those
    that can wait do. `load`: offered seconds of work per second of requests that cannot wait, 0 after their stream has
    ended. `fastest_s`: shortest time between steps that a request needs. `mean_s`: smoothed work of the
    offered requests.

    If the requests of the last `window_s` seconds need more than the machine has, serving the cheapest serves most. So
    the limit is the work up to which requests fill the machine. A request above it starts only while there is room to
    spare.

    Each step has a constant cost. So even a single request that needs a step every `pace_s` takes that cost over
    `pace_s` of the machine. Of all paces that requests need, the one at which most are served is in force. A pace
    slower than the fastest needs a clear gain, since all faster requests are rejected then.
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self.limit_s = inf
        self.pace_s = 0.0
        self.overloaded = False
        self.load = 0.0
        self.fastest_s = self.mean_s = 0.0
        self._window_s = window_s
        self._offered: deque[Offer] = deque()
        self._works: list[float] = []  # of those, sorted
        self._next_s = -inf
        self._first_s = inf

    def offer(self, offer: Offer) -> None:
        self._offered.append(offer)
        self.mean_s += 0.01 * (offer.work_s - self.mean_s) if self.mean_s else offer.work_s
        self._first_s = min(self._first_s, offer.at_s)

    def price_s(self, work_s: float, fairness: float) -> float:
        """Return the price of work: work^(1 - w) * other^w, with w = sqrt(fairness). `other` is the work whose rank
        among all recent requests equals the rank of `work_s` in its own third of them. So with fairness 1 each third
        has the same chance, the cheapest of each first.
        """
        count = len(self._works)
        if not fairness or not count:
            return work_s
        place = 3 * min(bisect(self._works, work_s), count - 1) % count
        other_s, weight = self._works[place], sqrt(fairness)
        return work_s ** (1 - weight) * other_s**weight

    def objection(self, price_s: float, pace_s: float, can_wait: bool) -> Cause | None:
        """Return why a request is not worth its cost at present; None if it is."""
        if price_s > self.limit_s or (self.overloaded and can_wait):
            return Cause.PRICE
        return Cause.PACE if pace_s < self.pace_s else None

    def update(self, now_s: float, usable_share: float, cost_tangent: CostTangent) -> bool:
        """Update the limits at intervals. Return True after an update. `usable_share`: usable share of the time."""
        if now_s < self._next_s or self._first_s == inf:
            return False
        self._next_s = now_s + UPDATE_S
        offered = self._offered
        while offered and offered[0].at_s < now_s - self._window_s:
            offered.popleft()
        self._works = sorted([offer.work_s for offer in offered])
        span_s = min(self._window_s, max(now_s - self._first_s, self._window_s / 6))
        paces = _paces(offered)
        time, expert_s = _time_share(paces[0], usable_share, cost_tangent)
        self.limit_s, self.pace_s = inf, 0.0
        self.fastest_s = paces[0] if paces[0] < inf else 0.0
        urgent = [offer for offer in offered if not offer.can_wait]
        still_arriving = urgent and now_s - urgent[-1].at_s <= MAX_QUIET_GAPS * span_s / len(urgent)
        self.load = sum([offer.work_at(expert_s) for offer in urgent]) / span_s if still_arriving else 0.0
        self.overloaded = sum([offer.work_at(expert_s) for offer in offered]) > time * span_s
        if self.overloaded:
            self._limit(urgent, span_s, usable_share, cost_tangent)
        return True

    def _limit(self, urgent: Sequence[Offer], span_s: float, usable_share: float, cost_tangent: CostTangent) -> None:
        """Set the limits at which most of these requests are served."""
        cheapest_first = sorted(urgent, key=lambda offer: offer.price_s)
        best = 0.0
        for pace_s in _paces(urgent):
            time, expert_s = _time_share(pace_s, usable_share, cost_tangent)
            served, limit_s = _served(cheapest_first, pace_s, time * span_s, expert_s)
            if not best:  # the fastest pace
                best, self.limit_s = served * MIN_GAIN_RATIO, limit_s
                if limit_s == inf:
                    return  # all requests fit
            elif served > best:
                best, self.limit_s, self.pace_s = served, limit_s, pace_s


def _time_share(pace_s: float, usable_share: float, cost_tangent: CostTangent) -> tuple[float, float]:
    """Return the share of the time for requests with a step every `pace_s`, and the experts' cost per row."""
    constant_s, expert_s = cost_tangent(usable_share * pace_s)
    return MAX_FILL_SHARE * (usable_share - min(MAX_CONSTANT_SHARE, constant_s / pace_s)), expert_s


def _paces(offered: Sequence[Offer] | deque[Offer]) -> list[float]:
    """Return the paces that requests need, the fastest first; some of them if there are many."""
    ordered = sorted([offer.pace_s for offer in offered if offer.pace_s < inf])
    paces = sorted(set(ordered))
    if len(paces) <= MAX_PACES:
        return paces or [inf]
    return sorted({ordered[i * (len(ordered) - 1) // (MAX_PACES - 1)] for i in range(MAX_PACES)})


def _served(cheapest_first: Sequence[Offer], pace_s: float, left_s: float, expert_s: float) -> tuple[int, float]:
    """Return how many requests that accept the pace fit, and the price of the first that does not."""
    served = 0
    for offer in cheapest_first:
        if offer.pace_s >= pace_s:
            left_s -= offer.work_at(expert_s)
            if left_s < 0:
                return served, offer.price_s
            served += 1
    return served, inf
