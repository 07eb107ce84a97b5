"""The engine with the fewest requests, those that wait counting four times."""

from collections.abc import Sequence
from random import Random

from roseinfer.router.base import Ask, Candidate

WAITING = 4  # times as much as one that runs, as vLLM's data-parallel balancer has it


class Least:
    """Least of 4 * waiting + running; the same at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, ask: Ask, candidates: Sequence[Candidate], now_s: float) -> tuple[Candidate, str]:
        loads = [WAITING * waiting + running for waiting, running in [candidate.load for candidate in candidates]]
        least = min(loads)
        return self._rng.choice([c for c, load in zip(candidates, loads, strict=True) if load == least]), "load"
