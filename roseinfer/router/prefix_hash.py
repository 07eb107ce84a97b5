"""The engine that the beginning of the prompt hashes to."""

from collections.abc import Sequence
from random import Random

from roseinfer.router.base import Ask, Candidate

PREFIX_TOKENS = 1024


class PrefixHash:
    """Rendezvous hashing of the key of the first 1,024 tokens, or of the last full block of a shorter prompt: when an
    engine comes or goes, only what went there moves. Prompts of less than a block go anywhere.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, ask: Ask, candidates: Sequence[Candidate], now_s: float) -> tuple[Candidate, str]:
        if not ask.keys:
            return self._rng.choice(candidates), "random"
        # A block's key covers all that comes before it.
        key = ask.keys[min(len(ask.keys), max(1, PREFIX_TOKENS // ask.block_size)) - 1]
        return max(candidates, key=lambda candidate: _mix(key, candidate.engine)), "hash"


def _mix(key: int, engine: int) -> int:
    """A weight of 64 bits that differs by engine: the finaliser of SplitMix64 (Steele et al., 2014)."""
    value = (key ^ ((engine + 1) * 0x9E3779B97F4A7C15)) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
