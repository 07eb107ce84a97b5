"""Arrival processes: when requests arrive, at a mean rate, in seconds from the start of a run."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from roseinfer.core.errors import ConfigError


class ArrivalProcess(Protocol):
    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        """`count` times in order, `rate` of them a second in the long run (for processes that have one)."""
        ...


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma-distributed gaps with a coefficient of variation of `cv`; at 1 they are exponential: Poisson arrivals."""

    cv: float = 1.0

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        shape = 1 / self.cv**2
        now, found = 0.0, []
        for _ in range(count):
            now += rng.gammavariate(shape, 1 / (shape * rate))
            found.append(now)
        return found


def poisson() -> Gamma:
    """Arrivals that know nothing of each other."""
    return Gamma(1.0)


@dataclass(frozen=True, slots=True)
class OnOff:
    """Poisson arrivals for `on_s` seconds, none for `off_s`, and so on. While on, their rate is what keeps the mean."""

    on_s: float
    off_s: float

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        busy = rate * (self.on_s + self.off_s) / self.on_s
        return [at_s + self.off_s * (at_s // self.on_s) for at_s in Gamma().times(busy, count, rng)]


@dataclass(frozen=True, slots=True)
class Steps:
    """Poisson arrivals at `factors` times the mean rate, each for an equal part of a run; the last one stays.

    Factors whose mean is not 1 are scaled so that it is.
    """

    factors: tuple[float, ...]

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        """A Poisson process of rate 1, its time bent so that the rate comes out (time rescaling)."""
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
    """Times of a trace, in order: a stretch from a random place of it, its time scaled to the rate."""

    recorded_s: Sequence[float]

    def times(self, rate: float, count: int, rng: random.Random) -> list[float]:
        """Raises `ConfigError` if the trace holds fewer, or they are all at once."""
        if count > len(self.recorded_s):
            raise ConfigError(f"trace: {len(self.recorded_s)} arrivals are fewer than the {count} asked for")
        first = rng.randrange(len(self.recorded_s) - count + 1)
        stretch = self.recorded_s[first : first + count]
        lasts_s = stretch[-1] - stretch[0]
        if lasts_s <= 0:
            raise ConfigError("trace: its arrivals are all at one time, which no rate fits")
        scale = count / rate / lasts_s
        return [scale * (at_s - stretch[0]) for at_s in stretch]
