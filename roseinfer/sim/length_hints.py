"""What is said of output lengths before they are known: by a predictor (`hinted` False), or by clients (True)."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roseinfer.sim.workload import Arrival, predicted_len


@dataclass(frozen=True, slots=True)
class NoHints:
    """Nothing is said, whatever is said of other classes."""

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return list(arrivals)


@dataclass(frozen=True, slots=True)
class ExactHints:
    """A predictor that is never wrong."""

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [replace(arrival, predicted_len=arrival.output_len, hinted=False) for arrival in arrivals]


@dataclass(frozen=True, slots=True)
class NoisyHints:
    """A predictor that errs by `rmse` tokens, on short outputs by less."""

    rmse: float

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [
            replace(arrival, predicted_len=predicted_len(arrival.output_len, self.rmse, rng), hinted=False)
            for arrival in arrivals
        ]


@dataclass(frozen=True, slots=True)
class ScaledHints:
    """Every client says `factor` times what it will be."""

    factor: float

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [_hinted(arrival, self.factor * arrival.output_len) for arrival in arrivals]


@dataclass(frozen=True, slots=True)
class ShuffledHints:
    """Clients say how long the outputs of others are."""

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
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

    def told(self, arrivals: Sequence[Arrival], rng: random.Random) -> list[Arrival]:
        return [self._of(arrival, rng) for arrival in arrivals]

    def _of(self, arrival: Arrival, rng: random.Random) -> Arrival:
        if rng.random() >= self.share:
            return _hinted(arrival, predicted_len(arrival.output_len, self.rmse, rng))
        lie = _hinted(arrival, self.factor * arrival.output_len)
        return lie if self.tenant is None else replace(lie, tenant=self.tenant)


def _hinted(arrival: Arrival, length: float) -> Arrival:
    return replace(arrival, predicted_len=max(1, round(length)), hinted=True)
