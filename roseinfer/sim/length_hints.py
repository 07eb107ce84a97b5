"""Length hints: predictions of output lengths by a predictor (`hinted` False) or by clients (`hinted` True)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roseinfer.sim.workload import Arrival, predicted_len


@dataclass(frozen=True, slots=True)
class NoHints:
    """No hints, even if the workload has a default."""

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return list(arrivals)


@dataclass(frozen=True, slots=True)
class ExactHints:
    """Hints of a perfect predictor."""

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [replace(arrival, predicted_len=arrival.output_len, hinted=False) for arrival in arrivals]


@dataclass(frozen=True, slots=True)
class NoisyHints:
    """Hints of a predictor with an error of `rmse` tokens, less for short outputs."""

    rmse: float

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [
            replace(arrival, predicted_len=predicted_len(arrival.output_len, self.rmse, rng), hinted=False)
            for arrival in arrivals
        ]


@dataclass(frozen=True, slots=True)
class ScaledHints:
    """Hints of clients that are `factor` times the true length."""

    factor: float

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [_hinted(arrival, self.factor * arrival.output_len) for arrival in arrivals]


@dataclass(frozen=True, slots=True)
class ShuffledHints:
    """Hints of clients that are the true lengths of other requests."""

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        lengths = [arrival.output_len for arrival in arrivals]
        rng.shuffle(lengths)
        return [_hinted(arrival, length) for arrival, length in zip(arrivals, lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class MisleadingHints:
    """A `share` of the clients says `factor` times what it will be, to gain from it; the others what is probable, to
    `rmse` tokens. `tenant`: the liars', None: their class's.
    """

    share: float
    factor: float
    rmse: float
    tenant: str | None = None

    def apply(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [self._of(arrival, rng) for arrival in arrivals]

    def _of(self, arrival: Arrival, rng: random.Random) -> Arrival:
        if rng.random() >= self.share:
            return _hinted(arrival, predicted_len(arrival.output_len, self.rmse, rng))
        lie = _hinted(arrival, self.factor * arrival.output_len)
        return lie if self.tenant is None else replace(lie, tenant=self.tenant)


def _hinted(arrival: Arrival, length: float) -> Arrival:
    return replace(arrival, predicted_len=max(1, round(length)), hinted=True)
