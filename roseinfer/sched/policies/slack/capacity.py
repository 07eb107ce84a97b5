"""What the machine can take in the long run: demand over some horizons, the margins for what one cannot see, and what a
place costs when not all can be served: how much work, and how fast a pace, is worth it.
"""

from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, log, sqrt
from typing import NamedTuple

from roseinfer.core.slo import Cause
from roseinfer.sched.cost.params import CostParams

HORIZONS = (4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)  # times the smallest TPOT objective
LONGEST_STEP = 8.0  # times the smallest TPOT objective
MOST_CONSTANT = 0.9  # of the time: what steps cost whatever they hold
SHORT = 2  # of these, where only prompts count: how soon one can be through
PRICED = (Cause.PRICE, Cause.PACE, Cause.TENANT)  # not worth their cost: what `SlackState.objection` says
REFUSED = 0.03  # of those that are worth their cost
LEAST_FILL, STEP = 0.7, 0.01
QUIET = 10.0  # times the mean time between two requests, after which they have ceased to come
KEPT = 0.9  # of what was learnt, at each update

# A pace in seconds -> what any step costs, and what the experts of a row cost; see `CostParams.line`.
Line = Callable[[float], tuple[float, float]]


class Demand:
    """What the requests that run need within some horizons: shares of the machine, of decoding and of prompts, and
    steps per second. `peak` is the largest sum of the shares.

    A request that is ahead of its token deadlines by `slack` needs nothing until then, and afterwards `weight` seconds
    of the machine per second: over a horizon h that is weight * max(0, h - slack). Nobody is assumed to leave: those
    that do are replaced, and a wrong guess of who leaves costs more than it gains. Steps are needed as often as the one
    asks for that needs most within h, where half of its slack counts: others that come need its pace too.

    `arriving`: the share that prompts have had lately, and will need again. That much counts for prompts at least; half
    of it on top of those that are known, since these are part of it.

    What a step costs whatever it holds depends, for a model with experts, on how many rows it has: `visits` are the
    rows that decode per second, in each horizon, empty for other models. Experts that a prompt needs beyond theirs are
    part of its work. It is most of the tightest pace, too, so slack counts as far as it exceeds a request's pace, in
    which that has to have a token anyway: else prompts would start into time that is not there.
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
        self._shares = shares[SHORT:]
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
        """experts: whether the model has some."""
        horizons_s = [smallest_s * horizon for horizon in HORIZONS]
        if experts:
            slacks = [min(slack, max(0.0, slack - pace_s)) for slack, pace_s in zip(slacks, paces_s, strict=True)]
        rows = list(zip(slacks, weights, paces_s, strict=True))
        decoding = [sum([(h - s) * w for s, w, _ in rows if s < h]) / h for h in horizons_s]
        least = 1 / (LONGEST_STEP * smallest_s)
        steps = [max([least, *[_paced(s, h) / pace_s for s, _, pace_s in rows]]) for h in horizons_s]
        visits = [sum([(h - s) / p for s, _, p in rows if s < h]) / h for h in horizons_s] if experts else []
        return cls(horizons_s, decoding, [0.0] * len(horizons_s), steps, visits, arriving)

    def with_one(self, weight: float, pace_s: float, work_s: float, due_s: float) -> "Demand":
        """With a request whose prompt takes `work_s` seconds within `due_s`, and that takes `weight` from now on, and a
        step every `pace_s` once its prompt can be through.

        The prompt counts as work / h from the horizon on that it is due in.
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

    def fits(self, limit: float, keep: float, cost: CostParams, weight: float = 0.0) -> bool:
        """Whether at most `limit` of what is there is needed in each horizon, with `weight` more: of the share `keep`
        of the time, what steps leave of it, which cost something whatever they hold.
        """
        if self._priced is not cost:
            self._price(cost)
        for share, constant in zip(self._needed, self._constant[SHORT:], strict=True):
            if share + weight > limit * (keep - constant):
                return False
        return True

    def taken_s(self, seconds: float, cost: CostParams) -> float:
        """What decoding and the constant part of steps take of the next `seconds`, by the nearest longer horizon."""
        if self._priced is not cost:
            self._price(cost)
        place = min(bisect_left(self._horizons_s, seconds), len(self._horizons_s) - 1)
        return seconds * (self._decoding[place] + self._experts[place] + self._constant[place])

    def _price(self, cost: CostParams) -> None:
        """The shares of the time that steps take whatever they hold, and rows for their experts, in each horizon: a row
        needs what one more would, and the rest of the experts that are read belongs to the step.
        """
        self._priced = cost
        self._constant = [min(MOST_CONSTANT, cost.step_s * rate) for rate in self._steps]
        self._experts = [0.0] * len(self._steps)
        for place, (visits, rate) in enumerate(zip(self._visits, self._steps, strict=False)):
            self._experts[place] = visits * cost.experts_s(1, visits / rate)
            self._constant[place] += rate * cost.experts_s(visits / rate) - self._experts[place]
        self._needed = [share + own for share, own in zip(self._shares, self._experts[SHORT:], strict=True)]


def _paced(slack: float, horizon_s: float) -> float:
    """The share of the horizon in which a request needs its pace, if half of its slack counts."""
    if slack < horizon_s:
        return 1 - max(0.0, slack) / (2 * horizon_s)
    return horizon_s / (2 * slack)


class Margins:
    """The share of a TPOT objective by which token deadlines are brought forward, for each level of objectives (within
    some 10% of each other) its own: a few strict requests among many loose ones would not count otherwise.

    Up a little for each finished request that came near its limit, down very little for each other. In the steady state
    about one request in 21 comes near its limit.
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
            del self._values[next(iter(self._values))]  # the one not heard of for longest


def _level(tpot_s: float) -> int:
    return round(log(tpot_s) / log(1.1))


class Offer(NamedTuple):
    """A request that came. `price_s`: what counts against the limit, more than its work for a tenant that has had
    much. `pace_s`: the time between steps that it asks for, inf if any will do. `patient`: it may start at any time.
    `tokens`: so many are decoded, each for `expert_s` of its work, which depends on how full steps are.
    """

    at_s: float
    work_s: float
    price_s: float
    pace_s: float
    patient: bool = False
    tokens: float = 0.0
    expert_s: float = 0.0

    def work_at(self, expert_s: float) -> float:
        return self.work_s + self.tokens * (expert_s - self.expert_s)


class PriceLimit:
    """Which requests are worth their cost when not all can be served. `limit_s`: seconds of work per request, inf while
    everything fits. `pace_s`: the shortest time between steps that is worth its cost; 0 = any. `load`: seconds of work
    that were offered, per second, by requests that cannot wait, 0 once none come any more. `crowded`: not all that came
    can be served; those that can wait do. `gain`: how many times as many are served at the pace that is held as at the
    fastest. `fastest_s`: the shortest time between steps that any asked for.

    If those of the last `window_s` seconds ask for more than the machine can do, most are served well if the cheapest
    are, so the limit is the work at which those up to it fill the machine (`fill` times). A request above it is served
    only while there is room to spare.

    A step costs something whatever it holds, so a request that needs one every `pace_s` takes that over `pace_s` of the
    machine, were it the only one. Of the paces that were asked for, the one is held at which most requests are served;
    a slower one than the fastest only for a clear gain (`clear` times as many), since it refuses all that are faster.
    """

    def __init__(
        self, window_s: float = 30.0, fill: float = 1.0, every_s: float = 0.5, clear: float = 1.1, levels: int = 8
    ) -> None:
        self.limit_s = inf
        self.pace_s = 0.0
        self.load = 0.0
        self._decided = self._refused = 0.0
        self.crowded = False
        self.gain, self.fastest_s = 1.0, 0.0
        self.mean_s = 0.0  # work of the requests offered, recent ones counting most
        self._window_s = window_s
        self._fill = self._most = fill
        self._every_s = every_s
        self._clear = clear
        self._levels = levels
        self._offered: deque[Offer] = deque()
        self._works: list[float] = []  # of those, in order
        self._next_s = -inf
        self._first_s: float | None = None

    def offer(self, offer: Offer) -> None:
        self._offered.append(offer)
        self.mean_s += 0.01 * (offer.work_s - self.mean_s) if self.mean_s else offer.work_s
        if self._first_s is None:
            self._first_s = offer.at_s

    def price_s(self, work_s: float, fairness: float) -> float:
        """What so much work counts as: work^(1 - w) * other^w. With w = sqrt(fairness) equal steps cost about as much.

        `other` has the place among all requests of late that `work_s` has in its own third of them, by work. So at 1
        each third has the same chance, the cheapest of each first.
        """
        count = len(self._works)
        if not fairness or not count:
            return work_s
        place = 3 * min(bisect(self._works, work_s), count - 1) % count
        other_s, weight = self._works[place], sqrt(fairness)
        return work_s ** (1 - weight) * other_s**weight

    def correct(self, offer: Offer) -> None:
        """A request that was offered before is `work_s` more work than was said, and now has this price."""
        self._offered.append(offer)

    def objection(self, price_s: float, pace_s: float, patient: bool) -> Cause | None:
        """Why a request is not worth its cost at present; None if it is."""
        if price_s > self.limit_s or (self.crowded and patient):
            return Cause.PRICE
        return Cause.PACE if pace_s < self.pace_s else None

    def update(self, now_s: float, keep: float, line: Line) -> bool:
        """Set the limits anew, if it is time. `keep`: the share of the time that may be planned with."""
        if now_s < self._next_s or self._first_s is None:
            return False
        self._next_s = now_s + self._every_s
        self._learn()
        offered = self._offered
        while offered and offered[0].at_s < now_s - self._window_s:
            offered.popleft()
        self._works = sorted([offer.work_s for offer in offered])
        span_s = min(self._window_s, max(now_s - self._first_s, self._window_s / 6))
        self.limit_s, self.pace_s, self.gain = inf, 0.0, 1.0
        hasty = [offer for offer in offered if not offer.patient]
        they_come = hasty and now_s - hasty[-1].at_s <= QUIET * span_s / len(hasty)
        paces = self._paces(offered)
        time, expert_s = self._time(paces[0], keep, line)
        self.load = sum([offer.work_at(expert_s) for offer in hasty]) / span_s if they_come else 0.0
        self.fastest_s = paces[0] if paces[0] < inf else 0.0
        self.crowded = sum([offer.work_at(expert_s) for offer in offered]) > time * span_s
        if not self.crowded:
            return True
        cheapest_first = sorted(hasty, key=lambda offer: offer.price_s)
        best, fastest = 0.0, 0
        for pace_s in self._paces(hasty):
            time, expert_s = self._time(pace_s, keep, line)
            served, limit_s = _served(cheapest_first, pace_s, time * span_s, expert_s)
            if not best:  # the fastest
                best, self.limit_s, fastest = served * self._clear, limit_s, served
                if limit_s == inf:
                    break  # all fit
            elif served > best:
                best, self.limit_s, self.pace_s = served, limit_s, pace_s
        self.gain = best / max(1, fastest) if self.pace_s else 1.0
        return True

    def decided(self, *, refused: bool) -> None:
        """A request that was worth its cost has started, or was refused after all."""
        self._decided += 1
        self._refused += refused

    def _learn(self) -> None:
        """If too many are refused that were worth their cost, less can be done than the work tells (prompts that are
        due at once, a full cache), and the limits are set for less.
        """
        if self._decided:
            step = -STEP if self._refused > REFUSED * self._decided else STEP
            self._fill = min(self._most, max(LEAST_FILL, self._fill + step))
            self._decided *= KEPT
            self._refused *= KEPT

    def _time(self, pace_s: float, keep: float, line: Line) -> tuple[float, float]:
        """Of each second, what is there for requests if there is a step every `pace_s`, and what experts cost then."""
        constant_s, expert_s = line(keep * pace_s)
        return self._fill * (keep - min(MOST_CONSTANT, constant_s / pace_s)), expert_s

    def _paces(self, offered: Sequence[Offer]) -> list[float]:
        """The fastest first: those asked for, or some of them if these are many."""
        ordered = sorted([offer.pace_s for offer in offered if offer.pace_s < inf])
        paces = sorted(set(ordered))
        if len(paces) <= self._levels:
            return paces or [inf]
        return sorted({ordered[i * (len(ordered) - 1) // (self._levels - 1)] for i in range(self._levels)})


def _served(cheapest_first: Sequence[Offer], pace_s: float, left_s: float, expert_s: float) -> tuple[int, float]:
    """How many that can do with the pace fit, and the price of the first that does not."""
    served = 0
    for offer in cheapest_first:
        if offer.pace_s >= pace_s:
            left_s -= offer.work_at(expert_s)
            if left_s < 0:
                return served, offer.price_s
            served += 1
    return served, inf
