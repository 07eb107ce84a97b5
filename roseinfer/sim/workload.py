"""Requests that arrive: times from a process or a trace, lengths from a law or the trace, objectives from classes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from roseinfer.core.slo import Slo

VOCAB = 32_000


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


@dataclass(frozen=True, slots=True)
class LengthLaw:
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
class UniformLaw:
    """Prompts and outputs uniform between the bounds (tokens)."""

    prompt_min: int
    prompt_max: int
    output_min: int
    output_max: int

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return rng.randint(self.prompt_min, self.prompt_max), rng.randint(self.output_min, self.output_max)


@dataclass(frozen=True, slots=True)
class Mix:
    """What requests are like: lengths, classes and tenants drawn uniformly (or by weights).

    No classes: nothing is promised. `predictor_rmse`: error of the predicted lengths in tokens; None = there are none.
    `distinct`: no two prompts begin alike; else all do, for machines without a prefix cache.
    """

    lengths: LengthLaw | UniformLaw
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
        """SCORPIO's predictor as noise: N(0, rmse), less for short outputs, and never under 8 tokens."""
        if self.predictor_rmse is None:
            return None
        error = rng.gauss(0.0, self.predictor_rmse) * min(1.0, output / 300 + 0.3)
        return max(8, round(output + error))


def poisson(rate: float, count: int, seed: int) -> list[float]:
    return gamma(rate, count, seed, cv=1.0)


def gamma(rate: float, count: int, seed: int, cv: float) -> list[float]:
    """Arrival times with gamma-distributed gaps: `rate` a second, coefficient of variation `cv`."""
    rng = random.Random(f"times {seed}")
    shape = 1 / cv**2
    now, times = 0.0, []
    for _ in range(count):
        now += rng.gammavariate(shape, 1 / (shape * rate))
        times.append(now)
    return times


def bursts(rate: float, count: int, seed: int, *, factor: float = 4.0, period_s: float = 20.0) -> list[float]:
    """Poisson arrivals that alternate between `factor` times the rate and what keeps the mean, half a period each."""
    rng = random.Random(f"times {seed}")
    high, low = min(factor, 2.0) * rate, max(0.0, 2.0 - factor) * rate
    now = 0.0
    times: list[float] = []
    while len(times) < count:
        now += rng.expovariate(max(high, low))
        wanted = high if now % period_s < period_s / 2 else low
        if rng.random() < wanted / max(high, low):
            times.append(now)
    return times
