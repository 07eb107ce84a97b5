"""Capacity of the machine: demand over several horizons, safety margins, and price and pace limits under overload."""

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, log, sqrt
from typing import NamedTuple

from roseinfer.core.slo import Cause
from roseinfer.sched.cost.params import CostParams

HORIZON_PACES = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # in smallest TPOT objectives
MAX_STEP_PACES = 8.0  # in smallest TPOT objectives
MAX_CONSTANT_SHARE = 0.9  # of the time, for the constant cost of steps
SHORT_COUNT = 2  # the first horizons, in which only prompts count: how soon one can be computed
PRICED = (Cause.PRICE, Cause.PACE, Cause.TENANT)  # causes of `SlackState.objection`
MAX_REJECTED_SHARE = 0.03  # of the requests that are worth their cost
MIN_FILL_SHARE, FILL_STEP_SHARE = 0.7, 0.01
MAX_QUIET_GAPS = 10.0  # mean gaps between requests without a new one, after which the stream has ended
DECAY_SHARE = 0.9  # of earlier decisions that stays at each update

# Pace in seconds -> cost of any step, and of the experts of a row; see `CostParams.cost_tangent`.
CostTangent = Callable[[float], tuple[float, float]]


class Demand:
    """Demand of running requests within several horizons: shares of the machine for decoding and for prompts, and steps
    per second. `peak`: largest sum of the shares.

    A request that is ahead of its token deadlines by `slack` needs nothing until then, and afterwards `weight` seconds
    of the machine per second. Over a horizon h that is weight * max(0, h - slack). No request is assumed to end: ended
    ones are replaced, and a wrong guess costs more than a right one gains. The rate of steps is the highest that any
    request needs within h, where half of its slack counts: requests that arrive need its pace too.

    `arriving`: share of the time that prompts took recently, and will take again. Prompts count for at least that much.
    Half of it is added to the known prompts, since these are part of it.

    For a model with experts, the constant cost of a step depends on its rows. `visits` are the decoding rows per second
    in each horizon, empty for other models. Further experts of a prompt belong to its work. The constant cost is also
    most of the tightest pace. So only the slack beyond a request's pace counts, because it needs a token in that time
    anyway; otherwise prompts would start without time for them.
    """

    def __init__(
        self,
        horizons_s: Sequence[float],
        decoding: Sequence[float],
        prompts: Sequence[float],
        steps: Sequence[float],
        visits: Sequence[float],
        arriving: float,
    ) -> None:
        half = 0.5 * arriving
        shares = [d + (p + half if p > half else arriving) for d, p in zip(decoding, prompts, strict=True)]
        self._shares = shares[SHORT_COUNT:]
        self.peak = max(self._shares)
        self._horizons_s = horizons_s
        self._decoding = decoding
        self._prompts = prompts
        self._steps = steps
        self._visits = visits
        self._arriving = arriving
        self._priced: CostParams | None = None

    @classmethod
    def of(
        cls,
        slacks: Sequence[float],
        weights: Sequence[float],
        paces_s: Sequence[float],
        smallest_s: float,
        arriving: float = 0.0,
        experts: bool = False,
    ) -> "Demand":
        """Build the demand of decoding requests. `experts`: the model has experts."""
        horizons_s = [smallest_s * horizon for horizon in HORIZON_PACES]
        if experts:
            slacks = [min(slack, max(0.0, slack - pace_s)) for slack, pace_s in zip(slacks, paces_s, strict=True)]
        rows = list(zip(slacks, weights, paces_s, strict=True))
        decoding = [sum([(h - s) * w for s, w, _ in rows if s < h]) / h for h in horizons_s]
        least = 1 / (MAX_STEP_PACES * smallest_s)
        steps = [max([least, *[_paced(s, h) / pace_s for s, _, pace_s in rows]]) for h in horizons_s]
        visits = [sum([(h - s) / p for s, _, p in rows if s < h]) / h for h in horizons_s] if experts else []
        return cls(horizons_s, decoding, [0.0] * len(horizons_s), steps, visits, arriving)

    def with_one(self, weight: float, pace_s: float, work_s: float, due_s: float) -> "Demand":
        """Return the demand with one more request, whose prompt takes `work_s` seconds within `due_s`. It takes
        `weight` from now on, and needs a step every `pace_s` once its prompt is computed. The prompt counts as work / h
        from the horizon on in which it is due.
        """
        horizons_s = self._horizons_s
        prompts = zip(self._prompts, horizons_s, strict=True)
        steps = zip(self._steps, horizons_s, strict=True)
        return Demand(
            horizons_s,
            [share + weight for share in self._decoding],
            [share + work_s / (h if h > due_s else due_s) for share, h in prompts],
            [max(rate, (1 - work_s / h) / pace_s) for rate, h in steps],
            [visits + 1 / pace_s for visits in self._visits],
            self._arriving,
        )

    def fits(self, limit: float, usable_share: float, cost: CostParams, weight: float = 0.0) -> bool:
        """True if the demand plus `weight` is at most the share `limit` of the available time in each horizon.
        Available is the usable share `usable_share` of the time, less the constant cost of steps.
        """
        if self._priced is not cost:
            self._price(cost)
        for share, constant in zip(self._needed, self._constant[SHORT_COUNT:], strict=True):
            if share + weight > limit * (usable_share - constant):
                return False
        return True

    def taken_s(self, seconds: float, cost: CostParams) -> float:
        """Return what decoding and the constant cost of steps take of the next `seconds` (by the next horizon)."""
        if self._priced is not cost:
            self._price(cost)
        place = min(bisect_left(self._horizons_s, seconds), len(self._horizons_s) - 1)
        return seconds * (self._decoding[place] + self._experts[place] + self._constant[place])

    def _price(self, cost: CostParams) -> None:
        """Compute, for each horizon, the time shares of the constant cost of steps and of the rows' experts. Each row
        is charged as one more row would be, and the rest of the experts belongs to the step.
        """
        self._priced = cost
        self._constant = [min(MAX_CONSTANT_SHARE, cost.step_s * rate) for rate in self._steps]
        self._experts = [0.0] * len(self._steps)
        for place, (visits, rate) in enumerate(zip(self._visits, self._steps, strict=False)):
            self._experts[place] = visits * cost.experts_s(1, visits / rate)
            self._constant[place] += rate * cost.experts_s(visits / rate) - self._experts[place]
        self._needed = [share + own for share, own in zip(self._shares, self._experts[SHORT_COUNT:], strict=True)]


def _paced(slack: float, horizon_s: float) -> float:
    """Return the share of the horizon in which a request needs its pace, if half of its slack counts."""
    if slack < horizon_s:
        return 1 - max(0.0, slack) / (2 * horizon_s)
    return horizon_s / (2 * slack)


class Margins:
    """Margins: the shares of TPOT objectives by which token deadlines are brought forward.

    Each level of objectives (within about 10% of each other) has its own margin, because a few strict requests would
    not count among many loose ones. A margin grows a little with each finished request that came close to its limit,
    and shrinks very little with each other one. In the steady state one request in 21 comes close to its limit.
    """

    START, FLOOR, CEILING = 0.02, 0.005, 0.15
    UP, DOWN, NEAR = 0.004, 0.0002, 0.995
    MOST_LEVELS = 64

    def __init__(self) -> None:
        self._values: dict[int, float] = {}

    def of(self, tpot_s: float) -> float:
        return self._values.get(_level(tpot_s), self.START)

    def observe(self, seen_s: float, tpot_s: float) -> None:
        level = _level(tpot_s)
        old = self._values.pop(level, self.START)
        step = self.UP if seen_s > self.NEAR * tpot_s else -self.DOWN
        self._values[level] = min(self.CEILING, max(self.FLOOR, old + step))
        if len(self._values) > self.MOST_LEVELS:
            del self._values[next(iter(self._values))]  # the level unused for longest


def _level(tpot_s: float) -> int:
    return round(log(tpot_s) / log(1.1))


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

    `pace_s`: shortest time between steps that is worth its cost; 0 = any. `load`: offered seconds of work per second of
    requests that cannot wait, 0 after their stream has ended. `overloaded`: not all can be served, so those that can
    wait do. `gain`: requests served at the pace in force, relative to the fastest pace. `fastest_s`: shortest time
    between steps that a request needs.

    If the requests of the last `window_s` seconds need more than the machine has, serving the cheapest serves most. So
    the limit is the work up to which requests fill the machine (`fill` times). A request above it starts only while
    there is room to spare.

    Each step has a constant cost. So even a single request that needs a step every `pace_s` takes that cost over
    `pace_s` of the machine. Of all paces that requests need, the one at which most are served is in force. A pace
    slower than the fastest needs a clear gain (`clear` times as many), since all faster requests are rejected then.
    """

    def __init__(
        self, window_s: float = 30.0, fill: float = 1.0, every_s: float = 0.5, clear: float = 1.1, levels: int = 8
    ) -> None:
        self.limit_s = inf
        self.pace_s = 0.0
        self.load = 0.0
        self._decided = self._refused = 0.0
        self.overloaded = False
        self.gain, self.fastest_s = 1.0, 0.0
        self.mean_s = 0.0  # smoothed work of the offered requests
        self._window_s = window_s
        self._fill = self._most = fill
        self._every_s = every_s
        self._clear = clear
        self._levels = levels
        self._offered: deque[Offer] = deque()
        self._works: list[float] = []  # of those, sorted
        self._next_s = -inf
        self._first_s: float | None = None

    def offer(self, offer: Offer) -> None:
        self._offered.append(offer)
        self.mean_s += 0.01 * (offer.work_s - self.mean_s) if self.mean_s else offer.work_s
        if self._first_s is None:
            self._first_s = offer.at_s

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

    def correct(self, offer: Offer) -> None:
        """Add work to a request that was offered before; the new offer has only the additional work."""
        self._offered.append(offer)

    def objection(self, price_s: float, pace_s: float, can_wait: bool) -> Cause | None:
        """Return why a request is not worth its cost at present; None if it is."""
        if price_s > self.limit_s or (self.overloaded and can_wait):
            return Cause.PRICE
        return Cause.PACE if pace_s < self.pace_s else None

    def update(self, now_s: float, usable_share: float, cost_tangent: CostTangent) -> bool:
        """Update the limits at intervals. Return True after an update. `usable_share`: usable share of the time."""
        if now_s < self._next_s or self._first_s is None:
            return False
        self._next_s = now_s + self._every_s
        self._adapt_fill()
        offered = self._offered
        while offered and offered[0].at_s < now_s - self._window_s:
            offered.popleft()
        self._works = sorted([offer.work_s for offer in offered])
        span_s = min(self._window_s, max(now_s - self._first_s, self._window_s / 6))
        self.limit_s, self.pace_s, self.gain = inf, 0.0, 1.0
        urgent = [offer for offer in offered if not offer.can_wait]
        still_arriving = urgent and now_s - urgent[-1].at_s <= MAX_QUIET_GAPS * span_s / len(urgent)
        paces = self._paces(offered)
        time, expert_s = self._time_share(paces[0], usable_share, cost_tangent)
        self.load = sum([offer.work_at(expert_s) for offer in urgent]) / span_s if still_arriving else 0.0
        self.fastest_s = paces[0] if paces[0] < inf else 0.0
        self.overloaded = sum([offer.work_at(expert_s) for offer in offered]) > time * span_s
        if not self.overloaded:
            return True
        cheapest_first = sorted(urgent, key=lambda offer: offer.price_s)
        best, fastest = 0.0, 0
        for pace_s in self._paces(urgent):
            time, expert_s = self._time_share(pace_s, usable_share, cost_tangent)
            served, limit_s = _served(cheapest_first, pace_s, time * span_s, expert_s)
            if not best:  # the fastest pace
                best, self.limit_s, fastest = served * self._clear, limit_s, served
                if limit_s == inf:
                    break  # all requests fit
            elif served > best:
                best, self.limit_s, self.pace_s = served, limit_s, pace_s
        self.gain = best / max(1, fastest) if self.pace_s else 1.0
        return True

    def decided(self, *, refused: bool) -> None:
        """Count a request that was worth its cost and has started, or was rejected after all."""
        self._decided += 1
        self._refused += refused

    def _adapt_fill(self) -> None:
        """Lower the fill if too many requests that were worth their cost are rejected. The machine then serves less
        than their work suggests, because of urgent prompts or a full cache.
        """
        if self._decided:
            step = -FILL_STEP_SHARE if self._refused > MAX_REJECTED_SHARE * self._decided else FILL_STEP_SHARE
            self._fill = min(self._most, max(MIN_FILL_SHARE, self._fill + step))
            self._decided *= DECAY_SHARE
            self._refused *= DECAY_SHARE

    def _time_share(self, pace_s: float, usable_share: float, cost_tangent: CostTangent) -> tuple[float, float]:
        """Return the share of the time for requests with a step every `pace_s`, and the experts' cost per row."""
        constant_s, expert_s = cost_tangent(usable_share * pace_s)
        return self._fill * (usable_share - min(MAX_CONSTANT_SHARE, constant_s / pace_s)), expert_s

    def _paces(self, offered: Sequence[Offer]) -> list[float]:
        """Return the paces that requests need, the fastest first; some of them if there are many."""
        ordered = sorted([offer.pace_s for offer in offered if offer.pace_s < inf])
        paces = sorted(set(ordered))
        if len(paces) <= self._levels:
            return paces or [inf]
        return sorted({ordered[i * (len(ordered) - 1) // (self._levels - 1)] for i in range(self._levels)})


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
