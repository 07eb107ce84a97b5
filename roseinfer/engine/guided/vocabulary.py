"""A model's vocabulary as guides use it."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from roseinfer.core.plan import TokenMasks
from roseinfer.engine.guided.mask_bits import allow, allow_all, forbid
from roseinfer.grammar.library import GrammarTokens


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Vocabulary as guides use it. `size`: of the model's vocabulary. `future`: done before any grammar is compiled."""

    size: int
    future: Future[GrammarTokens]

    @property
    def tokens(self) -> GrammarTokens:
        return self.future.result()

    def only_ends(self, words: memoryview) -> bool:
        """True if a mask allows only end-of-output tokens."""
        ends = sum(1 << token for token in self.tokens.eos_ids)
        return not int.from_bytes(words.cast("B"), "little") & ~ends

    def allow_only(self, token_ids: Sequence[int]) -> memoryview:
        """Return a mask that allows only these tokens."""
        mask = memoryview(bytearray(4 * TokenMasks.words_per_row(self.size))).cast("I")
        allow(mask, token_ids)
        return mask

    def all_but(self, token_ids: Sequence[int]) -> memoryview:
        """Return a mask that forbids only these tokens."""
        mask = self.allow_only(())
        allow_all(mask)
        forbid(mask, token_ids)
        return mask
