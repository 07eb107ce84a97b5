"""Finished outputs to guess from: separate for each cache salt, of a bounded size together."""

from array import array
from collections.abc import Sequence

from roseinfer.sched.drafting.proposers.places import NgramPlaces

# Shorter matches say little about the outputs of other requests.
MATCH_TOKENS = 4
# The end of each output, which no match or guess may cross.
NO_TOKEN = -1
# Tokens of one output that are kept: to index more would delay the step in which it ends.
MAX_OUTPUT_TOKENS = 4096


class _Outputs:
    """Outputs one after the other, and the places in them."""

    __slots__ = ("places", "tokens")

    def __init__(self) -> None:
        self.tokens = array("i")
        self.places = NgramPlaces(MATCH_TOKENS)


class OutputRing:
    """Outputs of at most `capacity` tokens. They are kept in two halves; if both are full, the older one is dropped."""

    def __init__(self, capacity: int) -> None:
        self._half = capacity // 2
        self._older, self._newer = _Outputs(), _Outputs()

    @property
    def num_tokens(self) -> int:
        return len(self._older.tokens) + len(self._newer.tokens)

    def add(self, output: Sequence[int]) -> None:
        """Keep an output, without its first tokens if it is long."""
        output = output[-min(MAX_OUTPUT_TOKENS, self._half - 1) :]
        if len(self._newer.tokens) + len(output) + 1 > self._half:
            self._older, self._newer = self._newer, _Outputs()
        newer = self._newer
        newer.tokens.extend(output)
        newer.tokens.append(NO_TOKEN)
        newer.places.extend(newer.tokens, len(newer.tokens))

    def find(self, suffix: Sequence[int]) -> list[tuple[Sequence[int], int]]:
        """Return outputs and places in them after the last tokens of `suffix`, the newest ones first."""
        return [
            (outputs.tokens, place)
            for outputs in (self._newer, self._older)
            for place in outputs.places.find(outputs.tokens, suffix)
            if outputs.tokens[place] != NO_TOKEN
        ]


class Corpus:
    """Rings of outputs by cache salt, of at most `capacity` tokens together. Those used longest ago are dropped."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._rings: dict[str, OutputRing] = {}  # the least recently used one first
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, salt: str, output: Sequence[int]) -> None:
        """Keep an output of a request with this salt."""
        if len(output) <= MATCH_TOKENS or self._capacity <= 2 * MATCH_TOKENS:
            return
        ring = self._rings.pop(salt, None) or OutputRing(self._capacity)
        self._rings[salt] = ring
        self._num_tokens -= ring.num_tokens
        ring.add(output)
        self._num_tokens += ring.num_tokens
        while self._num_tokens > self._capacity:
            self._num_tokens -= self._rings.pop(next(iter(self._rings))).num_tokens

    def find(self, salt: str, suffix: Sequence[int]) -> list[tuple[Sequence[int], int]]:
        """Return outputs of requests with this salt, and places in them after the last tokens of `suffix`."""
        ring = self._rings.get(salt)
        return [] if ring is None else ring.find(suffix)
