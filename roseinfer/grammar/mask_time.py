"""Measure how long masks of a grammar take, by drawing the beginnings of a few outputs."""

import random
from array import array
from collections.abc import Iterator
from time import thread_time

from roseinfer.grammar.library import Grammar, GrammarTokens, Matcher, MatcherError

OUTPUTS_COUNT = 2
MAX_OUTPUT_TOKENS = 12
# Processor time for drawing the outputs of one grammar. Measuring them again takes at most as long.
MAX_WALK_S = 0.1


def mask_time_s(grammar: Grammar, tokens: GrammarTokens) -> float:
    """Return the processor time of a mask, with that of taking a token: the mean of the slower output.

    The drawn tokens are always the same. Each output is followed twice and the second time counts: a grammar caches the
    states that outputs reach, so that later outputs reach them faster.
    """
    worst_s = 0.0
    until_s = thread_time() + MAX_WALK_S
    for seed in range(OUTPUTS_COUNT):
        drawn = list(_draw(grammar, tokens, random.Random(seed), until_s))
        if drawn:
            worst_s = max(worst_s, _time_again(grammar, tokens, drawn))
    return worst_s


def _draw(grammar: Grammar, tokens: GrammarTokens, rng: random.Random, until_s: float) -> Iterator[int]:
    """Yield the tokens of an output, without the one that ends it."""
    matcher = grammar.matcher()
    mask = _Mask(tokens)
    for _ in range(MAX_OUTPUT_TOKENS):
        try:
            token = mask.draw(matcher, rng)
            if token is None:
                return
            yield token
            matcher.consume((token,))
        except MatcherError:  # beyond the limits of a mask, which ends the output
            return
        if matcher.halted or thread_time() > until_s:
            return


def _time_again(grammar: Grammar, tokens: GrammarTokens, drawn: list[int]) -> float:
    matcher = grammar.matcher()
    mask = _Mask(tokens)
    began_s = thread_time()
    for done, token in enumerate(drawn):
        try:
            matcher.consume((token,))
            if not matcher.halted:
                matcher.fill(mask.words)
        except MatcherError:
            return (thread_time() - began_s) / (done + 1)
    return (thread_time() - began_s) / len(drawn)


class _Mask:
    """A row of `TokenMasks` to draw tokens from."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self._eos_ids = tokens.eos_ids
        self.words = memoryview(array("I", bytes(4 * -(-tokens.vocab_size // 32))))

    def draw(self, matcher: Matcher, rng: random.Random) -> int | None:
        """Return a token that may come next and does not end the output, None if there is none.

        The draw is uneven: the first allowed token after a random byte of the mask.
        """
        matcher.fill(self.words)
        for token in self._eos_ids:
            self.words[token // 32] &= ~(1 << token % 32)
        mask = self.words.tobytes()
        start = rng.randrange(len(mask))
        mask = mask[start:] + mask[:start]
        at = len(mask) - len(mask.lstrip(b"\0"))
        if at == len(mask):
            return None
        byte = mask[at]
        bit = rng.choice([bit for bit in range(8) if byte >> bit & 1])
        return (start + at) % len(mask) * 8 + bit
