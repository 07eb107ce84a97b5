"""Encoding of a long text in pieces, since the library needs some 300 bytes per token of each text."""

from array import array
from collections.abc import Iterator
from itertools import takewhile

import tokenizers

from roseinfer.text.tokenizer import encode

PIECE_CHARS = 2**17
# Text before and after a split point on which it is tested.
MARGIN_CHARS = 1024
# Distance from the end of a piece in which split points are sought.
REACH_CHARS = 4096
MAX_TRIED_CUTS = 8


def encode_long(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, keep_last: int | None, max_tokens: int | None
) -> "array[int]":
    """Return token ids as `tokenizer.encode`, but at most one piece beyond `max_tokens` (None = all).

    The text is split where a tokenizer that sees `MARGIN_CHARS` on both sides begins a token. Raise as
    `tokenizer.encode`.
    """
    if len(text) <= PIECE_CHARS:
        return array("I", encode(backend, text, add_special_tokens, keep_last))
    before, after = _added(backend) if add_special_tokens else ([], [])
    ids = array("I", before)
    for piece in pieces(backend, text):
        ids.extend(encode(backend, piece, add_special_tokens=False))
        if max_tokens is not None and len(ids) > max_tokens:
            return ids
    ids.extend(after)
    if keep_last is None or len(ids) <= keep_last:
        return ids
    kept = len(before) if len(before) < keep_last else 0  # models trained with BOS work badly without it
    return ids[:kept] + ids[len(ids) - keep_last + kept :]


def cut_end(backend: tokenizers.Tokenizer, ids: "array[int]", add_special_tokens: bool, keep: int) -> "array[int]":
    """Return the first `keep` ids of an encoded text, the last of which are what the post-processor adds at the end."""
    if len(ids) <= keep:
        return ids
    after = _added(backend)[1] if add_special_tokens else []
    return ids[: keep - len(after)] + array("I", after) if len(after) < keep else ids[:keep]


def pieces(backend: tokenizers.Tokenizer, text: str) -> Iterator[str]:
    """Yield `text` in pieces of about `PIECE_CHARS`, longer where no split point is found."""
    start, end = 0, PIECE_CHARS
    while end < len(text):
        cut = _cut(backend, text, max(start, end - REACH_CHARS), end)
        if cut is not None:
            yield text[start:cut]
            start = cut
        end = max(start, end) + PIECE_CHARS
    yield text[start:]


def _cut(backend: tokenizers.Tokenizer, text: str, low: int, high: int) -> int | None:
    """Return the last valid split point in [low, high) where a space or line break follows other text."""
    tried = 0
    for place in range(high - 1, low, -1):
        if text[place] in " \n" and not text[place - 1].isspace():
            if _parts(backend, text, place):
                return place
            tried += 1
            if tried == MAX_TRIED_CUTS:
                return None
    return None


def _parts(backend: tokenizers.Tokenizer, text: str, place: int) -> bool:
    before, after = text[max(0, place - MARGIN_CHARS) : place], text[place : place + MARGIN_CHARS]
    halves = encode(backend, before, add_special_tokens=False) + encode(backend, after, add_special_tokens=False)
    return halves == encode(backend, before + after, add_special_tokens=False)


def _added(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor adds before and after a text."""
    encoded = backend.encode_batch_fast(["a"], add_special_tokens=True)[0]
    mask = encoded.special_tokens_mask
    before = sum(1 for _ in takewhile(bool, mask))
    after = sum(1 for _ in takewhile(bool, reversed(mask[before:])))
    return encoded.ids[:before], encoded.ids[len(mask) - after :]
