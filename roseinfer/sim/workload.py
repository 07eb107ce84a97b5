"""Requests that arrive: times from a process or a trace, lengths from laws or the trace, objectives from classes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from math import log
from typing import Protocol

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sim.distributions import ArrivalProcess, Gamma, LengthDistribution

VOCAB = 32_000
MOST_DRAWS = 10_000  # of one request's lengths


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `predicted_len`: what a predictor says of its output, or, if it is `hinted`, its client; None =
    nothing.
    """

    at_s: float
    prompt_ids: Sequence[int]
    output_len: int
    slo: Slo | None = None
    predicted_len: int | None = None
    tenant: str = ""
    hinted: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Log-normal prompts and outputs, drawn again until both are within the bounds (tokens)."""

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
    """Prompts and outputs uniform between the bounds (tokens)."""

    prompt_min: int
    prompt_max: int
    output_min: int
    output_max: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(self.prompt_min, self.prompt_max), rng.randint(self.output_min, self.output_max)


@dataclass(frozen=True, slots=True)
class RequestMix:
    """What requests are like: lengths, classes and tenants drawn uniformly (or by weights).

    No classes: nothing is promised. `predictor_rmse`: error of the predicted lengths in tokens; None = there are none.
    `distinct`: no two prompts begin alike; else all do, for machines without a prefix cache.
    """

    lengths: LogNormalLengths | UniformLengths
    classes: tuple[Slo, ...] = ()
    weights: tuple[float, ...] = ()
    predictor_rmse: float | None = 195.0
    tenants: tuple[str, ...] = ("",)
    tenant_weights: tuple[float, ...] = ()
    distinct: bool = False

    def requests(self, times: Sequence[float], seed: int) -> list[Arrival]:
        """One request per time. Equal seeds give equal requests whatever the times."""
        rng = random.Random(f"mix {seed}")
        found = []
        for at_s in times:
            prompt, output = self.lengths.draw(rng)
            ids = [rng.randrange(3, VOCAB) for _ in range(prompt)] if self.distinct else [1] * prompt
            found.append(self.promised(Arrival(at_s, ids, output), rng))
        return found

    def promised(self, arrival: Arrival, rng: random.Random) -> Arrival:
        """With objectives, a predicted length, and a tenant."""
        slo, predicted = self.slo(rng), self.predict(arrival.output_len, rng)
        return replace(arrival, slo=slo, predicted_len=predicted, tenant=self.tenant(rng))

    def slo(self, rng: random.Random) -> Slo | None:
        return rng.choices(self.classes, self.weights or None)[0] if self.classes else None

    def tenant(self, rng: random.Random) -> str:
        if self.tenant_weights:
            return rng.choices(self.tenants, self.tenant_weights)[0]
        return rng.choice(self.tenants)

    def predict(self, output: int, rng: random.Random) -> int | None:
        """None without a predictor."""
        return None if self.predictor_rmse is None else predicted_len(output, self.predictor_rmse, rng)


def predicted_len(output: int, rmse: float, rng: random.Random) -> int:
    """SCORPIO's predictor as noise: N(0, rmse) tokens, less for short outputs, and never under 8 tokens."""
    error = rng.gauss(0.0, rmse) * min(1.0, output / 300 + 0.3)
    return max(8, round(output + error))


def poisson(rate: float, count: int, seed: int) -> list[float]:
    return gamma(rate, count, seed, cv=1.0)


def gamma(rate: float, count: int, seed: int, cv: float) -> list[float]:
    """Arrival times with gamma-distributed gaps: `rate` a second, coefficient of variation `cv`."""
    return Gamma(cv).times(rate, count, random.Random(f"times {seed}"))


def bursts(rate: float, count: int, seed: int, *, factor: float = 4.0, period_s: float = 20.0) -> list[float]:
    """Poisson arrivals that alternate between `factor` (>= 1) times the rate and what keeps the mean.

    Half a period each up to twice the rate; beyond that nobody arrives in between, and the busy part is `period_s /
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


# --- traffic of several kinds -----------------------------------------------------------------------------------
class LengthHints(Protocol):
    """What is said of output lengths before they are known."""

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        """The same requests, with `predicted_len` and `hinted`, and the tenants of those who lie, if they have any."""
        ...


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """A `share` of a class's prompts begins with one of `number` texts of so many `tokens`: they are in front of the
    prompt, or a part of it, and a shorter prompt is all of it. The k-th of them is as likely as 1 / k^zipf. Classes
    that name the same `pool` share their texts; otherwise each has its own.
    """

    tokens: int
    share: float = 1.0
    number: int = 1
    zipf: float = 0.0
    in_front: bool = False
    pool: str = ""

    def draw(self, name: str, length: int, rng: random.Random) -> list[int]:
        """What a prompt of `length` tokens of the class `name` begins with, maybe nothing."""
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
    """Cumulative, of the ranks 1 to `number`."""
    return list(accumulate(1 / rank**exponent for rank in range(1, number + 1)))


def _marked(rng: random.Random, length: int) -> list[int]:
    """Tokens that differ from others by the first two, which is all that a chain of block hashes needs."""
    marks = [rng.randrange(3, VOCAB) for _ in range(min(2, length))]
    return marks + [1] * (length - len(marks))


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """Requests of one kind. `slo`: what they are promised, None = nothing. `share`: relative to the other classes.

    `process`: their own arrivals at their share of the rate; None: a random part of the workload's. `hints`: what is
    said of their outputs; None: as the workload has it. `prefixes`: what prompts share; None: nothing.
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
        """Tokens that prompts have beside those that are drawn."""
        return self.prefixes.tokens if self.prefixes is not None and self.prefixes.in_front else 0

    def draw(self, rng: random.Random, context: int | None) -> tuple[int, int]:
        """Tokens of a prompt, without what is in front of it, and of its output; drawn again until all fits into a
        context of so many tokens.

        Raises `ConfigError` if that does not come to an end.
        """
        for _ in range(MOST_DRAWS):
            prompt, output = max(1, self.prompts.draw(rng)), max(1, self.outputs.draw(rng))
            if context is None or self.in_front + prompt + output <= context:
                return prompt, output
        raise ConfigError(f"class {self.name}: hardly any request fits into the context of {context} tokens")


@dataclass(frozen=True, slots=True)
class Workload:
    """Traffic of several classes, `rate` requests a second in all (0: all at once).

    `context`: the machine's; longer requests are drawn again. `distinct`: prompts differ behind what they share, for
    machines with a prefix cache; else each is one token repeated.
    """

    classes: Sequence[TrafficClass]
    rate: float
    process: ArrivalProcess = field(default_factory=Gamma)
    hints: LengthHints | None = None
    context: int | None = None
    distinct: bool = False

    def requests(self, count: int, seed: int | str) -> list[Arrival]:
        """`count` of them (by rounding of shares one more or less), sorted by time; equal for equal seeds."""
        rng = random.Random(f"workload {seed}")
        placed = self._placed(count, rng)
        members = [(self._arrival(at_s, of, rng), of) for at_s, of in placed]
        arrivals: list[Arrival] = [arrival for arrival, _ in members]
        for hints, chosen in self._hinting([of for _, of in members]):
            for place, told in zip(chosen, hints.told([arrivals[i] for i in chosen], rng), strict=True):
                arrivals[place] = told
        return arrivals

    def _placed(self, count: int, rng: random.Random) -> list[tuple[float, TrafficClass]]:
        """When who arrives: classes with a process of their own, and the others as the workload's finds them."""
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
        """Hints, and the places of the requests that they are for."""
        found: dict[int, tuple[LengthHints, list[int]]] = {}
        for place, of in enumerate(classes):
            hints = of.hints or self.hints
            if hints is not None:
                found.setdefault(id(hints), (hints, []))[1].append(place)
        return list(found.values())
