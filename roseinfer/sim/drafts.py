"""Drafts of simulated requests: guesses that are right as often as it was asked for."""

import zlib
from collections.abc import Sequence

from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal

PROPOSER = "simulated"
DEFAULT_DRAFTS_COUNT = 4
_MAX_BITS = 2**64 - 1


class SimulatedGuesses:
    """Proposer that always guesses the same token, as many as there are shares in `acceptance`."""

    def __init__(self, token: int, acceptance: Sequence[float]) -> None:
        self._guesses = (token,) * len(acceptance)

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        return Proposal(PROPOSER, self._guesses[:limit])

    def ended(self, request: Request) -> None:
        """Do nothing: no request is remembered."""


def right_guesses(name: str, start: int, drafts: int, acceptance: Sequence[float]) -> int:
    """Return how many of a row's first drafts are right, drawn from the request's name and the row's position."""
    key = zlib.crc32(name.encode())
    for position in range(drafts):
        if _draw(key, start, position) >= acceptance[position]:
            return position
    return drafts


def _draw(*key: int) -> float:
    """Return a number from 0 to 1 that depends on the key only. A checksum alone would be alike for similar keys."""
    bits = 0
    for part in key:  # the finaliser of SplitMix64, for each part
        bits = ((bits ^ part) + 0x9E3779B97F4A7C15) & _MAX_BITS
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MAX_BITS
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MAX_BITS
        bits ^= bits >> 31
    return bits / 2**64
