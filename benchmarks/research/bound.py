"""Upper bounds on good requests: a fluid relaxation of what a machine does, and weak duality.

**Work.** A step takes `step_s` and the work of its rows (`sched/cost/params.py`). A request of P prompt tokens and O
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

**A run** is cut into windows of equal length, each of which divides its time in that way. The prefill of a request is
done between its arrival and the time its first token is due, its decoding between its arrival and the time its last
token is due (the end of its TTFT plus O - 1 times its TPOT; `e2e_s`), no more of it in a window than steps of its row
alone could do. Its pace is held while it runs for certain: from when its first token is due at the latest to when its
last token is there at the earliest, on a machine that it has for itself. With `paced` it is taken to run no faster than
at the tightest pace of all. What is never due (decoding with a TTFT only, all of it with a TPOT only) gets done.

**Generous**: all arrivals and lengths are known; requests are divisible; KV blocks, seats and the tokens of a step are
unlimited; prompts are computed in one chunk, which has no context to read; best effort costs nothing; a request without
a TPOT needs no steps; order within a window does not matter, and neither do first tokens, beyond their prefill, nor
preemption.

With experts, a step is taken to read those of one row only, and what prompts and other rows need beyond that is free.

**Where it can be beaten**: a TPOT is a mean over the output. A run that is faster than its pace while little else is to
do, and slower later, holds the pace of every request and yet, for some time, no pace. Prompts that share a prefix on a
machine that caches them: every prompt counts in full. Chunks of a single prompt token, which cost what decoding a token
does. Noise and stalls below their mean, which a short run may have. And `paced`, wherever requests are run faster than
that for as long as there is time: it is for loads that are always there, as of a constant rate over capacity.

**Duality.** For any prices of work, p >= 0 a second in each window, and any ratios r_k >= 1 of the prices of decoding
at level k, the sum of what the time is worth (of each window, at the level at which it is worth most) and of what
requests are worth beyond the price of their work is no less than the maximum. So there is no solver: prices are
improved by subgradient steps for a bounded number of rounds, and each gives a bound: of ten small loads in the tests,
half within 1 point of the exact maximum, the worst 6 above it.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import exp, inf, pi, sqrt
from typing import Self

from benchmarks.research.demands import Demand, demand, levels, promised
from benchmarks.research.windows import Windows
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.workload import Arrival

_SAMPLE = 1000  # number of requests that represent a mix
_RATIOS = (0.0, 0.5, 1.0)
_WINDOWS, _ROUNDS = 160, 120
_GOLDEN = (sqrt(5) - 1) / 2


def mean_cost(machine: Machine) -> CostParams:
    """Return the mean cost of the machine's steps, noise included, at its initial speed."""
    return machine.cost.slower((1 + sqrt(2 / pi) * machine.noise) * machine.slowness(0.0))


def least_step_s(cost: CostParams) -> float:
    """Return the lower bound on the time of a step with at least one row."""
    return cost.step_s + cost.experts_s(1)


def up_share(machine: Machine) -> float:
    """Return the share of time without stalls."""
    stalls = machine.stalls
    return 1.0 - stalls.lasts_s / stalls.every_s if stalls is not None and stalls.every_s else 1.0


def static_bound(requests: Sequence[Arrival], machine: Machine, rate: float) -> float:
    """Return the share of requests with objectives that can be good if `rate` of such requests arrive per second for
    ever.

    `requests` are a sample of the mix, including those without objectives; their times do not count. The pace of a
    level is held while requests of it are present, which is not always at a low rate. A request that may wait for its
    first token longer than it runs holds no pace, as it may wait until others hold it, but its decoding is still done
    at its level. Raises `ValueError` if no request has objectives.
    """
    return SteadyMix(requests, machine).bound(rate)


def capacity(requests: Sequence[Arrival], machine: Machine, target: float = 0.99) -> float:
    """Return requests per second, with and without objectives, at which `static_bound` is `target` of its idle value.

    Raises `ValueError` if no request has objectives, or if none could be good.
    """
    mix = SteadyMix(requests, machine)
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


@dataclass(frozen=True)
class _Costs:
    """Costs of some requests, cheapest first, and the sums of the first of them."""

    costs: list[float]
    sums: list[float]

    @classmethod
    def of(cls, works: Sequence[tuple[float, float]], ratio: float) -> Self:
        """ratio: price of decoding, in prices of prefill."""
        costs = sorted(prefill_s + ratio * decode_s for prefill_s, decode_s in works)
        return cls(costs, [*accumulate(costs, initial=0.0)])

    def gain(self, price: float) -> float:
        """Return what those that are worth the price are worth beyond it."""
        count = bisect_left(self.costs, 1.0 / price) if price > 0.0 else len(self.costs)
        return count - price * self.sums[count]


@dataclass(frozen=True)
class _PricedWork:
    """Work by level, at some prices of decoding: of requests that hold their pace, and of those that wait."""

    ratios: Sequence[float]
    paced: list[_Costs]
    free: list[_Costs]


class SteadyMix:
    """Sample of requests, by level, for static bounds at any rate. `possible`: the bound on an idle machine."""

    def __init__(self, requests: Sequence[Arrival], machine: Machine) -> None:
        chosen = requests[:: -(-len(requests) // _SAMPLE)] if requests else []
        wanted = promised(chosen)
        if not wanted:
            raise ValueError("no request has objectives")
        self._cost = mean_cost(machine)
        self._step_s = least_step_s(self._cost)
        self._up = up_share(machine)
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

        self._priced_work = [self._work_at(self._ratios(lift)) for lift in _RATIOS]

    def bound(self, rate: float) -> float:
        per_s = rate * self._share  # requests with objectives
        return min(self.possible, *(self._priced(per_s, work) for work in self._priced_work))

    def _room(self, level: int) -> float:
        """Return seconds of work per second at that level."""
        return max(0.0, self._up - self._step_s / self._levels[level])

    def _ratios(self, lift: float) -> list[float]:
        """Return prices of decoding by level: equal at 0; at 1, a second is worth the same at every level."""
        full = [1.0 / max(self._room(level), 1e-9) for level in range(len(self._levels))]
        return [1.0 + lift * (value * self._up - 1.0) for value in full]

    def _work_at(self, ratios: Sequence[float]) -> _PricedWork:
        paced = [_Costs.of(works, ratio) for works, ratio in zip(self._work, ratios, strict=True)]
        free = [_Costs.of(works, ratio) for works, ratio in zip(self._waiting, ratios, strict=True)]
        return _PricedWork(ratios, paced, free)

    def _priced(self, per_s: float, work: _PricedWork) -> float:
        """Return the smallest bound over the price of work. It is convex in the price: golden section search."""
        there = self._there(per_s)
        low, high = 0.0, self._dearest
        a, b = high - _GOLDEN * high, _GOLDEN * high
        at_a, at_b = self._at(a, per_s, work, there), self._at(b, per_s, work, there)
        for _ in range(40):
            if at_a < at_b:
                high, b, at_b = b, a, at_a
                a = high - _GOLDEN * (high - low)
                at_a = self._at(a, per_s, work, there)
            else:
                low, a, at_a = a, b, at_b
                b = low + _GOLDEN * (high - low)
                at_b = self._at(b, per_s, work, there)
        return min(at_a, at_b)

    def _there(self, per_s: float) -> list[float]:
        """Return, by level, the share of time in which requests are present that hold its pace or a tighter one.

        1 - exp(-load), where the load is the mean number of such requests.
        """
        found, load = [], 0.0
        for held_s in self._held_s[:-1]:
            load += per_s * held_s / self._count
            found.append(1.0 - exp(-load))
        return found

    def _at(self, price: float, per_s: float, work: _PricedWork, there: Sequence[float]) -> float:
        worth = [price / per_s * ratio * self._room(level) for level, ratio in enumerate(work.ratios)]
        paced = [costs.gain(price) / self._count for costs in work.paced]
        free = sum(costs.gain(price) for costs in work.free)
        lost = [after - before for before, after in pairwise(worth)]
        return worth[-1] + paced[-1] + free / self._count + _most(paced[:-1], lost, there)


def _most(gains: Sequence[float], losses: Sequence[float], there: Sequence[float]) -> float:
    """Return the greatest sum of (gains / there - losses) * U over levels, with U from 0 to `there` and not falling.

    There is an optimal U whose values are 0 or some of `there`, which increases: a walk over the levels by that value.
    """
    values = [0.0, *there]
    best = [0.0] * len(values)  # of the levels so far, by the value of the last one
    for level, (gain, loss) in enumerate(zip(gains, losses, strict=True)):
        slope = (gain / there[level] if there[level] > 0.0 else 0.0) - loss
        upto = accumulate(best[: level + 2], max)
        best[: level + 2] = [before + slope * value for before, value in zip(upto, values, strict=False)]
    return max(best[: len(gains) + 1])


def fluid_bound(arrivals: Sequence[Arrival], machine: Machine, *, paced: bool = False) -> float:
    """Return the share of this run's requests with objectives that can be good, with everything known in advance.

    `paced`: no request gets tokens faster than the tightest pace. Raises `ValueError` if no request has objectives.
    """
    wanted = promised(arrivals)
    demands = [found for request in wanted if (found := demand(request, machine.cost)) is not None]
    return _good(demands, machine, paced) / _count(wanted)


def blind_bound(arrivals: Sequence[Arrival], machine: Machine, *, paced: bool = False, stops: bool = True) -> float:
    """Return `fluid_bound` with unknown output lengths: what policies reach without predictions, on average.

    Known are arrivals, prompts, objectives and, for each class (`Slo.class_name`), the distribution of output lengths.
    A request is started, and dropped once its output is longer than K: it is good with probability P(O <= K) and takes
    the work of min(O, K) tokens, on average. K is the best for each request, at the prices of the time in which a
    request of its true length would run. Without `stops` no started request is dropped: K is the longest length.

    Unlike `fluid_bound` this is an estimate: it assumes that failed attempts do their work at the same prices as
    successful ones, and a single run may have luckier lengths. Raises `ValueError` if no request has objectives.
    """
    wanted = promised(arrivals)
    outputs: dict[str, list[int]] = defaultdict(list)
    for request in wanted:
        outputs[_class(request)].append(request.output_len)
    tries = {name: limits(lengths)[0 if stops else -1 :] for name, lengths in outputs.items()}
    demands = []
    for request in wanted:
        found = demand(request, machine.cost)
        if found is not None:
            row_s = machine.cost.row_s + machine.cost.context_s * len(request.prompt_ids)
            each = tuple(
                (share, row_s * steps + machine.cost.context_s * context)
                for share, steps, context in tries[_class(request)]
            )
            demands.append(replace(found, tries=each))
    return min(_good(demands, machine, paced) / _count(wanted), fluid_bound(arrivals, machine, paced=paced))


def limits(lengths: Sequence[int]) -> list[tuple[float, float, float]]:
    """Return ways to stop outputs of these equally likely lengths, shortest limit first.

    Each is (share that ends before, mean number of steps after the first token, mean sum of output tokens that these
    attend to). Limits that a mixture of two others beats in share per step are left out.
    """
    counts = Counter(lengths)
    running, steps, context, done = len(lengths), 0.0, 0.0, 0
    hull = [(0.0, 0.0, 0.0)]
    before = 1
    for length in sorted(counts):
        steps += running * (length - before)
        context += running * (length * (length + 1) - before * (before + 1)) / 2
        before, running, done = length, running - counts[length], done + counts[length]
        point = (done / len(lengths), steps / len(lengths), context / len(lengths))
        while len(hull) > 1 and _bends_up(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _bends_up(a: tuple[float, ...], b: tuple[float, ...], c: tuple[float, ...]) -> bool:
    """Return True if b is no better than a mixture of a and c."""
    return (b[0] - a[0]) * (c[1] - b[1]) <= (c[0] - b[0]) * (b[1] - a[1])


def _class(request: Arrival) -> str:
    return request.slo.class_name if request.slo is not None else ""


def _count(wanted: Sequence[Arrival]) -> int:
    if not wanted:
        raise ValueError("no request has objectives")
    return len(wanted)


def _good(demands: Sequence[Demand], machine: Machine, paced: bool) -> float:
    if not demands:
        return 0.0
    paces = levels(each.pace_s for each in demands)
    fastest = {least_step_s(machine.cost)}
    if paced and paces[0] < inf:
        fastest.add(max(least_step_s(machine.cost), paces[0]))
    found = [Windows(demands, paces, room_of(machine), each, _WINDOWS).bound(_RATIOS, _ROUNDS) for each in fastest]
    return min(float(len(demands)), *found)


def room_of(machine: Machine) -> Callable[[float, float], float]:
    """Return seconds of work, by the machine's cost, that a second holds at some time and pace."""
    up = up_share(machine)
    noise = 1 + sqrt(2 / pi) * machine.noise
    step_s = least_step_s(machine.cost)

    def room(at_s: float, pace_s: float) -> float:
        return max(0.0, up / (noise * machine.slowness(at_s)) - step_s / pace_s)

    return room
