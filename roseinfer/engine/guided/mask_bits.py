"""Bits of a mask: one row of `TokenMasks.words`."""

from collections.abc import Sequence

_ALL_BITS = 0xFFFFFFFF


def allows(words: memoryview, token_id: int) -> bool:
    return bool(words[token_id // 32] >> token_id % 32 & 1)


def allow(words: memoryview, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        words[token // 32] |= 1 << token % 32


def forbid(words: memoryview, token_ids: Sequence[int]) -> None:
    for token in token_ids:
        words[token // 32] &= _ALL_BITS ^ (1 << token % 32)


def allow_all(words: memoryview) -> None:
    words.cast("B")[:] = b"\xff" * words.nbytes
