"""Routing policy "least": the engine with the fewest requests."""

from collections.abc import Sequence
from random import Random

from roseinfer.router.base import Candidate, RoutingRequest


class LeastLoaded:
    """Minimise 4 * waiting + running, as vLLM's data-parallel balancer; break ties at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate], now_s: float) -> tuple[Candidate, str]:
        loads = [4 * waiting + running for waiting, running in [each.load for each in candidates]]
        least = min(loads)
        return self._rng.choice([c for c, load in zip(candidates, loads, strict=True) if load == least]), "load"
