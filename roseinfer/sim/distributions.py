"""Random draws of a workload: arrival processes, in seconds from the start of a run, and lengths in tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import NormalDist
from typing import Protocol

from roseinfer.core.errors import ConfigError


class ArrivalProcess(Protocol):
    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        """Return `count` times in order, at a mean of `rate` a second."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps with a coefficient of variation of `cv`; with 1 this is a Poisson process."""

    cv: float = 1.0

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        shape = 1 / self.cv**2
        now, found = 0.0, []
        for _ in range(count):
            now += rng.gammavariate(shape, 1 / (shape * rate))
            found.append(now)
        return found


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson arrivals for `on_s` seconds, then none for `off_s`, repeatedly. The rate while on keeps the mean."""

    on_s: float
    off_s: float

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        busy = rate * (self.on_s + self.off_s) / self.on_s
        return [at_s + self.off_s * (at_s // self.on_s) for at_s in Gamma().times(busy, count, rng)]


@dataclass(frozen=True, slots=True)
class Steps:
    """Poisson arrivals at `factors` times the mean rate, each for an equal part of a run; the last one continues.

    Factors are scaled to a mean of 1.
    """

    factors: tuple[float, ...]

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        """Draw a Poisson process of rate 1 and rescale its time to the rate."""
        total_s, parts = count / rate, len(self.factors)
        rates = [rate * factor * parts / sum(self.factors) for factor in self.factors]
        starts = [i * total_s / parts for i in range(parts)]
        passed = [0.0]
        for wanted in rates[:-1]:
            passed.append(passed[-1] + wanted * total_s / parts)
        found, part = [], 0
        for unit in Gamma().times(1.0, count, rng):
            while part + 1 < parts and unit >= passed[part + 1]:
                part += 1
            found.append(starts[part] + (unit - passed[part]) / rates[part])
        return found


@dataclass(frozen=True, slots=True)
class Replayed:
    """Times of a trace, in order: a random section, with its time scaled to the rate."""

    recorded_s: Sequence[float]

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        """Draw a section of the trace. Raise `ConfigError` if it has too few arrivals, or all at one time."""
        if count > len(self.recorded_s):
            raise ConfigError(f"trace: {count} arrivals are needed, and it has only {len(self.recorded_s)}")
        first = rng.randrange(len(self.recorded_s) - count + 1)
        stretch = self.recorded_s[first : first + count]
        lasts_s = stretch[-1] - stretch[0]
        if lasts_s <= 0:
            raise ConfigError("trace: all arrivals are at one time, so they cannot be scaled to a rate")
        scale = count / rate / lasts_s
        return [scale * (at_s - stretch[0]) for at_s in stretch]


# --- lengths ---------------------------------------------------------------------------------------------------------
class LengthDistribution(Protocol):
    def draw(self, rng: random.Random) -> int:
        """A length of at least one token."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    value: int

    def draw(self, rng: random.Random) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform lengths from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal lengths, drawn again until within `low` and `high`. `sigma`: standard deviation of the logarithm."""

    median: float
    sigma: float
    low: int = 1
    high: float = inf

    def likely(self) -> float:
        """Return the share of draws within the bounds."""
        if not self.sigma:
            return float(self.low <= round(self.median) <= self.high)
        law = NormalDist(log(self.median), self.sigma)
        above = 1.0 if self.high == inf else law.cdf(log(self.high + 0.5))
        return above - law.cdf(log(self.low - 0.5))

    def draw(self, rng: random.Random) -> int:
        while True:
            length = round(rng.lognormvariate(log(self.median), self.sigma))
            if self.low <= length <= self.high:
                return length


@dataclass(frozen=True, slots=True)
class Pareto:
    """P(length > x) = (least / x)^alpha from `least` on; drawn again until it is at most `high`."""

    least: float
    alpha: float
    high: float = inf

    def likely(self) -> float:
        """The share of what is drawn that is within the bounds."""
        return max(0.0, 1 - (self.least / (self.high + 0.5)) ** self.alpha)

    def draw(self, rng: random.Random) -> int:
        while True:
            length = round(self.least * rng.paretovariate(self.alpha))
            if length <= self.high:
                return length


@dataclass(frozen=True, slots=True)
class Bimodal:
    """Uniform within `high` with probability `share_high`, else within `low`; each (shortest, longest)."""

    low: tuple[int, int]
    high: tuple[int, int]
    share_high: float

    def draw(self, rng: random.Random) -> int:
        return rng.randint(*(self.high if rng.random() < self.share_high else self.low))


@dataclass(frozen=True, slots=True)
class Empirical:
    """One of the lengths seen, each as likely as any other: a column of a trace."""

    values: Sequence[int]

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.values)
