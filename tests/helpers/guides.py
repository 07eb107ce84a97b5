"""Guides whose rules are arithmetic, so that a test can say afterwards whether an output obeys."""

from collections.abc import Sequence

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec


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

    def fill(self, words: memoryview) -> bool:
        assert not self.complete and not any(words)
        if len(self.said) == self._fails_at:
            words[0] = 1
            raise RuntimeError("has no mask")
        if len(self.said) < self._dormant:
            return False
        for token in filter(self.allows, range(self._vocab_size)):
            words[token // 32] |= 1 << token % 32
        return True


class ArithmeticGuides:
    """A grammar "3,8,2" is an `Arithmetic` with these arguments. Keeps what it made."""

    def __init__(self, vocab_size: int = 50) -> None:
        self.made: list[Arithmetic] = []
        self._vocab_size = vocab_size

    def make(self, spec: GuideSpec) -> Arithmetic:
        rule = spec.grammar
        if rule == "broken":
            raise KeyError("no such thing")
        try:
            modulus, length, *rest = map(int, rule.split(","))
        except ValueError:
            raise InvalidRequestError(f"{rule!r} is no rule", "guide") from None
        dormant, fails_at, late = [*rest, *[0, -1, 0][len(rest) :]]
        self.made.append(Arithmetic(self._vocab_size, modulus, length, dormant, fails_at, bool(late)))
        return self.made[-1]


def obeys(tokens: Sequence[int], spec: str) -> bool:
    """Whether an output keeps the rule as far as it goes."""
    modulus, length, dormant, *_ = [*map(int, spec.split(",")), 0]
    sums = [sum(tokens[: i + 1]) % modulus for i in range(len(tokens))]
    return len(tokens) <= length and not any(sums[dormant:])
