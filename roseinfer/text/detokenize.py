"""Incremental and exact detokenisation: all emitted text together equals the decoding of all ids.

`tokenizers.decoders.DecodeStream` (0.22 to 0.23) is not exact enough. It emits the first bytes of a run of
byte-fallback tokens and then fails, or drops text, if a later byte makes the run invalid. It withholds everything while
the text ends in U+FFFD, and decodes an ever longer run with each token. Skipped special tokens accumulate in its
window. Knowing how the tokenizer decodes (`DecoderKind`) gives exactness at a constant cost per token.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from roseinfer.text.tokenizer import DecoderKind, Tokenizer

CONTEXT_TOKENS = 4


class TextStream(Protocol):
    def add(self, ids: list[int]) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Text of one sequence.

    It withholds only what later tokens can still change: the bytes of an unfinished character. With a byte-fallback
    tokenizer that is the current run of byte tokens, since one invalid byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._stream: TextStream = (
            ByteLevelStream(tokenizer) if tokenizer.kind is DecoderKind.BYTE_LEVEL else WindowStream(tokenizer)
        )

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these ids complete; '' while nothing is complete."""
        return self._stream.add([id for id in ids if id not in self._skipped])

    def flush(self) -> str:
        """Return the withheld text at the end of the sequence. An unfinished character becomes U+FFFD."""
        return self._stream.flush()


class ByteLevelStream:
    """Stream of tokens that are bytes: an incremental UTF-8 decoding, independent of earlier tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: list[int]) -> str:
        return self._utf8.decode(b"".join(map(self._tokenizer.token_bytes, ids)))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class WindowStream:
    """Stream of tokens whose spacing depends on preceding text: each is decoded after a few earlier tokens.

    The window begins after a token that is no byte-fallback token, so that runs of bytes are always decoded whole.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._run: list[int] = []

    def add(self, ids: list[int]) -> str:
        known = [id for id in ids if self._tokenizer.backend.id_to_token(id) is not None]
        end = len(known)
        while end and known[end - 1] in self._tokenizer.fallback_bytes:
            end -= 1
        if not end:
            self._run += known
            return ""
        settled, self._run = self._run + known[:end], known[end:]
        return self._decode(settled)

    def flush(self) -> str:
        settled, self._run = self._run, []
        return self._decode(settled)

    def _decode(self, settled: list[int]) -> str:
        if not settled:
            return ""
        text = self._tokenizer.decode(self._context + settled, skip_special_tokens=False)
        new = text[len(self._context_text) :]
        self._context = (self._context + settled)[-CONTEXT_TOKENS:]
        self._context_text = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return new
