"""Laws that lengths follow, in tokens: each draws one length at a time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log
from statistics import NormalDist
from typing import Protocol


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
    """Every length from `low` to `high`, both included, as likely as any other."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Drawn again until it is within `low` and `high`. `sigma`: standard deviation of the logarithm."""

    median: float
    sigma: float
    low: int = 1
    high: float = inf

    def likely(self) -> float:
        """The share of what is drawn that is within the bounds."""
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
