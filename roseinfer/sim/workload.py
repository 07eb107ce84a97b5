"""Workloads: arrival times from a process or trace, lengths from distributions or the trace, objectives by class."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from math import log
from typing import Protocol

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sim.distributions import ArrivalProcess, Gamma, LengthDistribution

VOCAB_COUNT = 32_000
MAX_DRAWS = 10_000  # per request, until its lengths fit


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives. `predicted_len`: length predicted by a predictor, or by its client if `hinted`.

    `adapter`: the LoRA adapter that it names, if any.
    """

    at_s: float
    prompt_ids: Sequence[int]
    output_len: int
    slo: Slo | None = None
    predicted_len: int | None = None
    tenant: str = ""
    hinted: bool = False
    priority: int = 0
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Log-normal lengths of prompts and outputs, drawn again until both are within the bounds (tokens)."""

    prompt_median: float
    prompt_sigma: float
    output_median: float
    output_sigma: float
    prompt_min: int
    prompt_max: int
    context: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        while True:
            prompt = round(rng.lognormvariate(log(self.prompt_median), self.prompt_sigma))
            output = round(rng.lognormvariate(log(self.output_median), self.output_sigma))
            if self.prompt_min <= prompt <= self.prompt_max and output >= 1 and prompt + output <= self.context:
                return prompt, output


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniform lengths of prompts and outputs between the bounds (tokens)."""

    prompt_min: int
    prompt_max: int
    output_min: int
    output_max: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(self.prompt_min, self.prompt_max), rng.randint(self.output_min, self.output_max)


@dataclass(frozen=True, slots=True)
class RequestMix:
    """Mix of requests: lengths, classes and tenants, drawn uniformly or by weights.

    Without classes, requests have no objectives. `predictor_rmse`: error of predicted lengths in tokens; None = no
    predictions. `distinct`: no two prompts share a prefix; otherwise all do, for machines without a prefix cache.
    """

    lengths: LogNormalLengths | UniformLengths
    classes: tuple[Slo, ...] = ()
    weights: tuple[float, ...] = ()
    predictor_rmse: float | None = 195.0
    tenants: tuple[str, ...] = ("",)
    tenant_weights: tuple[float, ...] = ()
    distinct: bool = False

    def requests(self, times: Sequence[float], seed: int) -> list[Arrival]:
        """Return one request per time. Equal seeds give equal requests for any times."""
        rng = random.Random(f"mix {seed}")
        found = []
        for at_s in times:
            prompt, output = self.lengths.draw(rng)
            ids = [rng.randrange(3, VOCAB_COUNT) for _ in range(prompt)] if self.distinct else [1] * prompt
            found.append(self.promised(Arrival(at_s, ids, output), rng))
        return found

    def promised(self, arrival: Arrival, rng: random.Random) -> Arrival:
        """Return the arrival with objectives, a predicted length and a tenant."""
        slo, predicted = self.slo(rng), self.predict(arrival.output_len, rng)
        return replace(arrival, slo=slo, predicted_len=predicted, tenant=self.tenant(rng))

    def slo(self, rng: random.Random) -> Slo | None:
        return rng.choices(self.classes, self.weights or None)[0] if self.classes else None

    def tenant(self, rng: random.Random) -> str:
        if self.tenant_weights:
            return rng.choices(self.tenants, self.tenant_weights)[0]
        return rng.choice(self.tenants)

    def predict(self, output: int, rng: random.Random) -> int | None:
        """Predict a length; None without a predictor."""
        return None if self.predictor_rmse is None else predicted_len(output, self.predictor_rmse, rng)


def predicted_len(output: int, rmse: float, rng: random.Random) -> int:
    """Predict a length as SCORPIO does: with an error of N(0, rmse) tokens, less for short outputs; at least 8."""
    error = rng.gauss(0.0, rmse) * min(1.0, output / 300 + 0.3)
    return max(8, round(output + error))


def poisson(rate: float, count: int, seed: int) -> list[float]:
    return gamma(rate, count, seed, cv=1.0)


def gamma(rate: float, count: int, seed: int, cv: float) -> list[float]:
    """Draw arrival times with gamma-distributed gaps: `rate` a second, coefficient of variation `cv`."""
    return Gamma(cv).times(rate, count, random.Random(f"times {seed}"))


def bursts(rate: float, count: int, seed: int, *, factor: float = 4.0, period_s: float = 20.0) -> list[float]:
    """Draw Poisson arrivals that alternate between `factor` (>= 1) times the rate and a low rate that keeps the mean.

    Up to a factor of 2 both parts are half a period. Above it the low rate is 0, and the busy part is `period_s /
    factor` long.
    """
    rng = random.Random(f"times {seed}")
    high, low = factor * rate, max(0.0, 2.0 - factor) * rate
    busy_s = period_s / max(2.0, factor)
    now = 0.0
    times: list[float] = []
    while len(times) < count:
        now += rng.expovariate(max(high, low))
        wanted = high if now % period_s < busy_s else low
        if rng.random() < wanted / max(high, low):
            times.append(now)
    return times


# --- workloads of several classes -------------------------------------------------------------------------------
class LengthHints(Protocol):
    """Predictions of output lengths."""

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        """Return the same requests with `predicted_len` and `hinted`; misleading ones may change tenants."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Shared prefixes: a `share` of a class's prompts begins with one of `number` texts of `tokens` tokens.

    The text is in front of the prompt or a part of it; a shorter prompt is only the text's beginning. The probability
    of the k-th text is proportional to 1 / k^zipf. Classes with the same `pool` share their texts.
    """

    tokens: int
    share: float = 1.0
    number: int = 1
    zipf: float = 0.0
    in_front: bool = False
    pool: str = ""

    def draw(self, name: str, length: int, rng: random.Random) -> list[int]:
        """Return the shared beginning of a prompt of `length` tokens of the class `name`, maybe empty."""
        if rng.random() >= self.share:
            return []
        tokens = self.tokens if self.in_front else min(self.tokens, length)
        return _marked(random.Random(f"prefix {self.pool or name} {self._which(rng)}"), tokens)

    def _which(self, rng: random.Random) -> int:
        if not self.zipf:
            return rng.randrange(self.number)
        return rng.choices(range(self.number), cum_weights=zipf_weights(self.number, self.zipf))[0]


@cache
def zipf_weights(number: int, exponent: float) -> list[float]:
    """Return the cumulative weights of the ranks 1 to `number`."""
    return list(accumulate(1 / rank**exponent for rank in range(1, number + 1)))


def _marked(rng: random.Random, length: int) -> list[int]:
    """Return tokens that differ from others in the first two, which is enough for a chain of block hashes."""
    marks = [rng.randrange(3, VOCAB_COUNT) for _ in range(min(2, length))]
    return marks + [1] * (length - len(marks))


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Class of requests. `slo`: their objectives. `share`: relative to the other classes.

    `process`: arrivals of their own at their share of the rate; None: a random part of the workload's arrivals.
    `hints`: predictions of their lengths; None: those of the workload. `prefixes`: shared prefixes of prompts.
    """

    name: str
    prompts: LengthDistribution
    outputs: LengthDistribution
    slo: Slo | None = None
    share: float = 1.0
    process: ArrivalProcess | None = None
    tenant: str = ""
    priority: int = 0
    hints: LengthHints | None = None
    prefixes: SharedPrefixes | None = None

    @property
    def in_front(self) -> int:
        """Tokens of prompts in addition to the drawn ones."""
        return self.prefixes.tokens if self.prefixes is not None and self.prefixes.in_front else 0

    def draw(self, rng: random.Random, context: int | None) -> tuple[int, int]:
        """Draw the tokens of a prompt, without what is in front of it, and of its output, until both fit the context.

        Raise `ConfigError` if hardly any draw fits.
        """
        for _ in range(MAX_DRAWS):
            prompt, output = max(1, self.prompts.draw(rng)), max(1, self.outputs.draw(rng))
            if context is None or self.in_front + prompt + output <= context:
                return prompt, output
        raise ConfigError(f"class {self.name}: hardly any request fits into the context of {context} tokens")


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload of several classes with `rate` requests a second in all (0: all at once).

    `context`: the machine's; longer requests are drawn again. `distinct`: prompts differ after their shared prefix, for
    machines with a prefix cache; otherwise each prompt is one repeated token.
    """

    classes: Sequence[TrafficClass]
    rate: float
    process: ArrivalProcess = field(default_factory=Gamma)
    hints: LengthHints | None = None
    context: int | None = None
    distinct: bool = False

    def requests(self, count: int, seed: int | str) -> list[Arrival]:
        """Return `count` requests (one more or less by rounding of shares), sorted by time; equal for equal seeds."""
        rng = random.Random(f"workload {seed}")
        placed = self._placed(count, rng)
        members = [(self._arrival(at_s, of, rng), of) for at_s, of in placed]
        arrivals: list[Arrival] = [arrival for arrival, _ in members]
        for hints, chosen in self._hinting([of for _, of in members]):
            for place, hinted in zip(chosen, hints.apply([arrivals[i] for i in chosen], rng), strict=True):
                arrivals[place] = hinted
        return arrivals

    def _placed(self, count: int, rng: random.Random) -> list[tuple[float, TrafficClass]]:
        """Return arrival times with classes: of classes with their own process, and of the workload's process."""
        total = sum(of.share for of in self.classes)
        own = [of for of in self.classes if of.process is not None]
        common = [of for of in self.classes if of.process is None]
        placed = []
        for of in own:
            part = of.share / total
            placed += [(at_s, of) for at_s in self._times(of.process, part, count, rng)]
        if common:
            shares = [of.share for of in common]
            times = self._times(self.process, sum(shares) / total, count, rng)
            placed += [(at_s, rng.choices(common, shares)[0]) for at_s in times]
        return sorted(placed, key=lambda item: item[0])

    def _times(self, process: ArrivalProcess | None, part: float, count: int, rng: random.Random) -> list[float]:
        wanted = round(part * count)
        if not self.rate or process is None or not wanted:
            return [0.0] * wanted
        return process.times(part * self.rate, wanted, rng)

    def _arrival(self, at_s: float, of: TrafficClass, rng: random.Random) -> Arrival:
        prompt, output = of.draw(rng, self.context)
        ids = self._prompt(of, prompt, rng) if self.distinct else [1] * (prompt + of.in_front)
        return Arrival(at_s, ids, output, of.slo, tenant=of.tenant, priority=of.priority)

    def _prompt(self, of: TrafficClass, length: int, rng: random.Random) -> list[int]:
        if of.prefixes is None:
            return _marked(rng, length)
        shared = of.prefixes.draw(of.name, length, rng)
        return shared + _marked(rng, length if of.prefixes.in_front else length - len(shared))

    def _hinting(self, classes: Sequence[TrafficClass]) -> list[tuple[LengthHints, list[int]]]:
        """Return hints with the indices of the requests that they apply to."""
        found: dict[int, tuple[LengthHints, list[int]]] = {}
        for place, of in enumerate(classes):
            hints = of.hints or self.hints
            if hints is not None:
                found.setdefault(id(hints), (hints, []))[1].append(place)
        return list(found.values())
