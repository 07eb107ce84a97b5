"""Routing policy "round-robin"."""

from collections.abc import Sequence
from random import Random

from roseinfer.router.base import RoutingRequest
from roseinfer.router.view import EngineView


class RoundRobin:
    """Take engines in turn. Each process starts at a random engine."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._last: int | None = None

    def choose(self, request: RoutingRequest, candidates: Sequence[EngineView], now_s: float) -> tuple[EngineView, str]:
        last = self._last
        if last is None:
            chosen = self._rng.choice(candidates)
        else:
            later = [candidate for candidate in candidates if candidate.engine > last]
            chosen = min(later or candidates, key=lambda candidate: candidate.engine)
        self._last = chosen.engine
        return chosen, "turn"
