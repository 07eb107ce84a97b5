"""How many requests could be good at most: a fluid relaxation of what a machine does, and weak duality.

**Work.** A step takes `step_s` and the work of its rows (`roseinfer.sched.cost`). A request of P prompt tokens and O
output tokens adds `token_s P + pair_s P (P + 1) / 2` seconds of prefill and, in each of O - 1 steps, `row_s + context_s
* context` of decoding. Noise counts with its mean, 1 + sqrt(2 / pi) * noise; the time of stalls is lost evenly.

**Pace.** While a request with a TPOT of s runs there has to be a step at least every s. A machine that holds a pace of
s does 1 - step_s / s seconds of work a second, since each step costs `step_s`. Time is divided among the *levels*: the
distinct TPOTs, and no pace at all, which costs nothing. `u_k` is the share of the time in which level k is held:

    sum u_k <= 1                                          (time)
    work done              <= sum over k of u_k (1 - step_s / s_k)                       (machine)
    decoding of levels <= l <= sum over k <= l of u_k (1 - step_s / s_k), for each l      (rows run at their pace)
    x_i                    <= sum over k <= l(i) of u_k   while request i runs           (pace)

x_i in [0, 1] is how much of request i is served, level 1 the tightest; the sum of the x is maximised. `static_bound`
asks this of a mix that arrives at a constant rate for ever, `capacity` for the rate at which a share can be served.

**Generous**: all arrivals and lengths are known; requests are divisible; KV blocks, seats and the tokens of a step are
unlimited; best effort costs nothing; a request without a TPOT needs no steps; prompts are computed at any time.

**Where it can be beaten**: a TPOT is a mean over the output. A run that is faster than its pace while little else is to
do, and slower later, holds the pace of every request and yet, for some time, no pace. Chunks of a single prompt token
are priced as they are in larger ones.

**Duality.** For any price of work, p >= 0 a second, and any ratios r_k >= 1 of the prices of decoding at level k, the
sum of what the time is worth (at the level at which it is worth most) and of what requests are worth beyond the price
of their work is no less than the maximum. So there is no solver: prices are improved, and each gives a bound.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, inf, log, pi, sqrt

from roseinfer.sched.cost import CostParams
from roseinfer.sim.machine import Machine
from roseinfer.sim.workload import Arrival

_MOST_LEVELS = 12
_LEVEL_RATIO = 1.15  # between levels where there would be more
_SAMPLE = 1000  # requests that a mix is judged by
_RATIOS = (0.0, 0.5, 1.0)
_GOLDEN = (sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request with objectives needs, in seconds of machine work and of time since its arrival.

    `steps`: behind the one of its first token. `pace_s`: mean time between them, at most. `first_s`, `end_s`: when its
    first and last token are due; inf = never.
    """

    at_s: float
    prefill_s: float
    decode_s: float
    steps: int
    pace_s: float
    first_s: float
    end_s: float

    @property
    def holds_s(self) -> float:
        """How long its pace has to be held, if no longer than it must."""
        return self.steps * self.pace_s if self.steps else 0.0


def demand(arrival: Arrival, cost: CostParams) -> Demand | None:
    """None if not even an idle machine kept the objectives."""
    slo, prompt, steps = arrival.slo, len(arrival.prompt_ids), arrival.output_len - 1
    assert slo is not None, "only requests with objectives demand something"
    prefill_s = cost.prefill_s(0, prompt)
    decode_s = steps * (cost.row_s + cost.context_s * (prompt + (steps + 1) / 2))
    first_s = slo.ttft_s if slo.ttft_s is not None else inf
    pace_s = slo.tpot_s if slo.tpot_s is not None and steps else inf
    end_s = first_s + pace_s * steps if steps else first_s
    alone_s = cost.step_s + prefill_s
    least_s = steps * cost.step_s + decode_s
    if slo.e2e_s is not None:
        end_s = min(end_s, slo.e2e_s)
        first_s = min(first_s, slo.e2e_s - least_s)
        pace_s = min(pace_s, (slo.e2e_s - alone_s) / steps) if steps else pace_s
    if first_s < alone_s or end_s < alone_s + least_s or (steps and steps * pace_s < least_s):
        return None
    return Demand(arrival.at_s, prefill_s, decode_s, steps, pace_s, first_s, end_s)


def promised(requests: Iterable[Arrival]) -> list[Arrival]:
    """Those with objectives."""
    return [request for request in requests if request.slo is not None and not request.slo.empty]


def mean_cost(machine: Machine) -> CostParams:
    """Of its steps, noise included, as fast as it is at the start."""
    return machine.cost.slower((1 + sqrt(2 / pi) * machine.noise) * machine.slowness(0.0))


def levels(paces: Iterable[float]) -> list[float]:
    """The distinct paces from the tightest on, the last one inf. Where there are many, few that are no tighter."""
    found = sorted({pace for pace in paces if pace < inf})
    if len(found) > _MOST_LEVELS:
        ratio = max(_LEVEL_RATIO, (found[-1] / found[0]) ** (1 / _MOST_LEVELS))
        count = round(log(found[-1] / found[0]) / log(ratio)) + 1
        found = [found[0] * ratio**i for i in range(1, count + 1)]
    return [*found, inf]


# --- for ever -----------------------------------------------------------------------------------------------------
def static_bound(requests: Sequence[Arrival], machine: Machine, rate: float) -> float:
    """Share of the requests with objectives that can be good if `rate` of such requests arrive a second for ever.

    `requests` are a sample of the mix, those without objectives included; their times do not count. The pace of a level
    is held while requests of it are there: at a low rate not always. A request that may wait for its first token longer
    than it runs holds no pace, as it may wait until others hold it, but its decoding is still done at its level. Raises
    `ValueError` if no request has objectives.
    """
    return Mix(requests, machine).bound(rate)


def capacity(requests: Sequence[Arrival], machine: Machine, target: float = 0.99) -> float:
    """Requests a second, with and without objectives, at which `static_bound` is `target` of what it is when idle.

    Raises `ValueError` if no request has objectives, or if none could be good.
    """
    mix = Mix(requests, machine)
    wanted = target * mix.possible
    if wanted <= 0:
        raise ValueError("no request could be good even on an idle machine")
    low, high = 0.0, 1.0
    while mix.bound(high) >= wanted:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if mix.bound(middle) >= wanted else (low, middle)
    return low


class Mix:
    """A sample of requests, by level, for static bounds at any rate. `possible`: the bound on an idle machine."""

    def __init__(self, requests: Sequence[Arrival], machine: Machine) -> None:
        chosen = requests[:: -(-len(requests) // _SAMPLE)] if requests else []
        wanted = promised(chosen)
        if not wanted:
            raise ValueError("no request has objectives")
        self._cost = mean_cost(machine)
        stalls = machine.stalls
        self._up = 1.0 - stalls.lasts_s / stalls.every_s if stalls is not None and stalls.every_s else 1.0
        demands = [found for request in wanted if (found := demand(request, self._cost)) is not None]
        self._count, self._share = len(wanted), len(wanted) / len(chosen)
        self.possible = len(demands) / len(wanted)
        self._levels = levels(each.pace_s for each in demands)
        self._work: list[list[tuple[float, float]]] = [[] for _ in self._levels]  # prefill, decoding; hold their pace
        self._waiting: list[list[tuple[float, float]]] = [[] for _ in self._levels]
        self._held_s = [0.0 for _ in self._levels]
        self._dearest = 1.0 / min([each.prefill_s + each.decode_s for each in demands], default=1.0)
        for each in demands:
            level = bisect_left(self._levels, each.pace_s)
            waits = each.pace_s == inf or each.first_s > each.holds_s
            (self._waiting if waits else self._work)[level].append((each.prefill_s, each.decode_s))
            self._held_s[level] += 0.0 if waits else each.holds_s

    def bound(self, rate: float) -> float:
        per_s = rate * self._share  # requests with objectives
        return min(self.possible, *(self._priced(per_s, self._ratios(lift)) for lift in _RATIOS))

    def _room(self, level: int) -> float:
        """Seconds of work in a second at that level."""
        return max(0.0, self._up - self._cost.step_s / self._levels[level])

    def _ratios(self, lift: float) -> list[float]:
        """Prices of decoding by level: the same for all at 0; at 1, a second is worth the same at every level."""
        full = [1.0 / max(self._room(level), 1e-9) for level in range(len(self._levels))]
        return [1.0 + lift * (value * self._up - 1.0) for value in full]

    def _priced(self, per_s: float, ratios: Sequence[float]) -> float:
        """The least bound over the price of work. Convex in it: golden section search."""
        there = self._there(per_s)
        low, high = 0.0, self._dearest
        a, b = high - _GOLDEN * high, _GOLDEN * high
        at_a, at_b = self._at(a, per_s, ratios, there), self._at(b, per_s, ratios, there)
        for _ in range(40):
            if at_a < at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = self._at(a, per_s, ratios, there)
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = self._at(b, per_s, ratios, there)
        return min(at_a, at_b)

    def _there(self, per_s: float) -> list[float]:
        """By level: the share of the time in which requests that hold its pace, or a tighter one, are there.

        1 - exp(-load), the load being how many of them are there on average.
        """
        found, load = [], 0.0
        for held_s in self._held_s[:-1]:
            load += per_s * held_s / self._count
            found.append(1.0 - exp(-load))
        return found

    def _at(self, price: float, per_s: float, ratios: Sequence[float], there: Sequence[float]) -> float:
        worth = [price / per_s * ratio * self._room(level) for level, ratio in enumerate(ratios)]
        paced = [_gain(works, price, ratio) / self._count for works, ratio in zip(self._work, ratios, strict=True)]
        free = sum(_gain(works, price, ratio) for works, ratio in zip(self._waiting, ratios, strict=True))
        lost = [after - before for before, after in pairwise(worth)]
        return worth[-1] + paced[-1] + free / self._count + _most(paced[:-1], lost, there)


def _most(gains: Sequence[float], losses: Sequence[float], there: Sequence[float]) -> float:
    """The greatest sum of (gains / there - losses) * U over levels, U of 0 to `there` and not falling.

    There is a best U whose values are 0 or some of `there`, which increases: a walk over the levels by that value.
    """
    values = [0.0, *there]
    best = [0.0] * len(values)  # of the levels so far, by the value of the last one
    for level, (gain, loss) in enumerate(zip(gains, losses, strict=True)):
        slope = (gain / there[level] if there[level] > 0.0 else 0.0) - loss
        upto = accumulate(best[: level + 2], max)
        best[: level + 2] = [before + slope * value for before, value in zip(upto, values, strict=False)]
    return max(best[: len(gains) + 1])


def _gain(works: Sequence[tuple[float, float]], price: float, ratio: float) -> float:
    """What these requests are worth beyond the price of their work."""
    gains = [1.0 - price * (prefill_s + ratio * decode_s) for prefill_s, decode_s in works]
    return sum([gain for gain in gains if gain > 0.0])
