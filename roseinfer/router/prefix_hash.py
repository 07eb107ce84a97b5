"""Routing policy "prefix-hash": consistent hashing of the start of the prompt."""

from collections.abc import Sequence
from random import Random

from roseinfer.router.base import RoutingRequest
from roseinfer.router.view import EngineView

PREFIX_TOKENS = 1024


class PrefixHash:
    """Rendezvous hashing of the key of the first 1,024 tokens, or of the last full block of a shorter prompt.

    When an engine is added or removed, only its own requests move. A prompt without a full block goes to the engine of
    its LoRA adapter; without one, to any engine.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[EngineView], now_s: float) -> tuple[EngineView, str]:
        key = request.adapter
        if request.keys:
            # The key of a block covers all tokens before it, and the adapter.
            key = request.keys[min(len(request.keys), max(1, PREFIX_TOKENS // request.block_size)) - 1]
        if not key:
            return self._rng.choice(candidates), "random"
        return max(candidates, key=lambda candidate: _mix(key, candidate.engine)), "hash"


def _mix(key: int, engine: int) -> int:
    """Return a 64-bit weight that differs by engine: the finaliser of SplitMix64 (Steele et al., 2014)."""
    value = (key ^ ((engine + 1) * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
