"""GuideFactory whose rules are arithmetic, so that a test can say afterwards whether an output obeys."""

import math
from array import array
from collections.abc import Sequence
from copy import copy

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import GuideStats
from roseinfer.core.plan import TokenMasks
from roseinfer.engine.guided.guide import MaskSource
from roseinfer.engine.guided.mask_budget import HostClock


class ToldClock(HostClock):
    """Clock that the test moves. `stand_still` moves only the wall clock."""

    def __init__(self) -> None:
        self.now_s = self.ran_s = 0.0

    def wall_s(self) -> float:
        return self.now_s

    def cpu_s(self) -> float:
        return self.ran_s

    def run(self, seconds: float) -> None:
        self.now_s += seconds
        self.ran_s += seconds

    def stand_still(self, seconds: float) -> None:
        self.now_s += seconds


class Arithmetic:
    """Allows a token if token + the sum of those said is a multiple of `modulus`; complete after `length` tokens.

    Before its first `dormant` tokens every token is allowed. It raises when it has seen `fails_at` tokens, in `advance`
    or, if `late`, when asked for the mask behind them.
    """

    def __init__(
        self, vocab_size: int, modulus: int, length: int, dormant: int = 0, fails_at: int = -1, late: bool = False
    ) -> None:
        self.said: list[int] = []
        self._vocab_size = vocab_size
        self._modulus = modulus
        self._length = length
        self._dormant = dormant
        self._fails_at = fails_at
        self._late = late
        self.complete = False

    def advance(self, token_ids: Sequence[int]) -> bool:
        assert not self.complete, "nobody feeds a guide that has stopped"
        for token in token_ids:
            assert len(self.said) < self._dormant or self.allows(token), "a token that was not allowed"
            self.said.append(token)
            if len(self.said) == self._fails_at and not self._late:
                raise RuntimeError("cannot go on")
        self.complete = len(self.said) >= self._length
        return self.complete

    def allows(self, token: int) -> bool:
        return (token + sum(self.said)) % self._modulus == 0

    ignores_output = edits_mask = False

    def fork(self) -> "Arithmetic":
        fork = copy(self)
        fork.said = [*self.said]
        return fork

    def forced(self, limit: int) -> Sequence[int]:
        if self._modulus < self._vocab_size or len(self.said) < self._dormant:
            return ()
        only = [-sum(self.said) % self._modulus, *[0] * limit]
        return only[: min(limit, self._length - len(self.said))]

    def mask(self) -> memoryview | None:
        assert not self.complete
        if len(self.said) == self._fails_at:
            raise RuntimeError("has no mask")
        if len(self.said) < self._dormant:
            return None
        words = array("I", bytes(4 * TokenMasks.words_per_row(self._vocab_size)))
        for token in filter(self.allows, range(self._vocab_size)):
            words[token // 32] |= 1 << token % 32
        return memoryview(words)

    def finish_mask(self, words: memoryview) -> bool:
        raise AssertionError("there is no grammar that fills a mask")


class ArithmeticBlueprint:
    """GuideFactory at the start of an output. `ready`: as its test says."""

    def __init__(self, rule: str, guides: "ArithmeticGuides", ready: bool = True) -> None:
        self.ready = ready
        self._rule = rule
        self._guides = guides

    def make(self) -> Arithmetic:
        if self._rule == "broken":
            raise KeyError("no such thing")
        try:
            modulus, length, *rest = map(int, self._rule.split(","))
        except ValueError:
            raise InvalidRequestError(f"{self._rule!r} is no rule") from None
        dormant, fails_at, late = [*rest, *[0, -1, 0][len(rest) :]]
        made = Arithmetic(self._guides.vocab_size, modulus, length, dormant, fails_at, bool(late))
        self._guides.made.append(made)
        return made


class ArithmeticGuides:
    """A grammar "3,8,2" is an `Arithmetic` with these arguments. Keeps what it made."""

    def __init__(self, vocab_size: int = 50) -> None:
        self.made: list[Arithmetic] = []
        self.vocab_size = vocab_size

    def prepare(self, spec: GuideSpec) -> ArithmeticBlueprint:
        return ArithmeticBlueprint(spec.grammar, self)

    def fill(
        self, sources: Sequence[MaskSource], words: memoryview, until_s: float = math.inf, *, threads: bool = True
    ) -> int:
        raise AssertionError("there is no grammar that fills a mask")

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("nothing takes time")

    def stats(self) -> GuideStats:
        return GuideStats()

    def close(self) -> None: ...


def obeys(tokens: Sequence[int], spec: str) -> bool:
    """True if an output obeys the rule so far."""
    modulus, length, dormant, *_ = [*map(int, spec.split(",")), 0]
    sums = [sum(tokens[: i + 1]) % modulus for i in range(len(tokens))]
    return len(tokens) <= length and not any(sums[dormant:])
