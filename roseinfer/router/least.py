"""Routing policy "least": the engine with the fewest requests."""

from collections.abc import Sequence
from random import Random

from roseinfer.router.base import RoutingRequest
from roseinfer.router.view import EngineView


class LeastLoaded:
    """Minimise 4 * waiting + running, as vLLM's data-parallel balancer; break ties at random."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[EngineView], now_s: float) -> tuple[EngineView, str]:
        loads = [4 * waiting + running for waiting, running in [each.load for each in candidates]]
        least = min(loads)
        return self._rng.choice([c for c, load in zip(candidates, loads, strict=True) if load == least]), "load"
