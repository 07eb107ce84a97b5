"""Tokenizer of a model: text to token ids and back, and how its decoder works."""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from functools import cache, cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers

from roseinfer.core.errors import InvalidRequestError, TokenizerFailedError, UnsupportedModelError
from roseinfer.gguf.files import is_gguf, open_gguf
from roseinfer.text.gguf_tokenizer import read_tokenizer
from roseinfer.text.tokenizer_files import (
    MAX_VOCABULARY_TOKENS,
    TOKENIZER,
    check_backend,
    read_backend,
    read_chat_template,
    read_tokenizer_config,
    special_tokens,
    template_source,
)


class Tokenizer:
    """tokenizer.json through the `tokenizers` library, with the facts of tokenizer_config.json.

    Every method is thread safe. Encoding and decoding release the GIL, as the library does only in its batch calls. Ids
    outside the vocabulary (a model's padding rows) decode to nothing.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], chat_template: str | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.config = config  # tokenizer_config.json, unchanged
        self.special_tokens = special_tokens(config)
        _mark_special(backend, self.special_tokens)
        self.kind = decoder_kind(backend)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCABULARY_TOKENS:
            largest = f"token id {self.vocab_size - 1} is not supported"
            raise UnsupportedModelError(f"tokenizer.json: {largest} (at most {MAX_VOCABULARY_TOKENS - 1})")
        self.fallback_bytes = fallback_bytes(vocab) if self.kind is DecoderKind.BYTE_FALLBACK else {}
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.chat_template = chat_template
        self._bytes: dict[int, bytes] = {}
        self._anchor = None if self.kind is DecoderKind.BYTE_LEVEL else self._find_anchor()

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str | Path | None = None) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja, or the GGUF file at `folder`.

        The latter two may be missing. `chat_template`: source or file of a template that replaces the model's. Raise
        `UnsupportedModelError` if a tokenizer is missing or invalid, `ConfigError` if `chat_template` cannot be read.
        """
        if is_gguf(folder):
            backend, config, template = read_tokenizer(open_gguf(folder))
            check_backend(backend, folder)
            given = None if chat_template is None else template_source(chat_template)
            return cls(backend, config, given or template)
        path = folder / TOKENIZER
        if not path.is_file():
            raise UnsupportedModelError(f"{folder}: no tokenizer.json (other tokenizer formats are not supported)")
        config = read_tokenizer_config(folder)
        return cls(read_backend(path), config, read_chat_template(folder, config, chat_template))

    def encode(self, text: str, add_special_tokens: bool = True, keep_last: int | None = None) -> list[int]:
        """Encode trusted text, in which special tokens are recognised; see `text/chat.py` for users' text.

        add_special_tokens: add what the tokenizer's post-processor adds (BOS for many models). keep_last: return only
        the last ids (>= 1), plus what the post-processor puts before the text. Raise `InvalidRequestError` if `text`
        contains lone surrogates, which no encoding supports, and `TokenizerFailedError`.
        """
        return encode(self.backend, text, add_special_tokens, keep_last)

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Return token ids of `word`, alone and after a space, unless it begins with one.

        Spellings that end in another one are left out. Other ways to split the text into tokens are not tried.
        """
        texts = [word] if word[:1].isspace() else [word, f" {word}"]
        found = {tuple(self.encode(text, add_special_tokens=False)) for text in texts if word} - {()}
        return sorted(ids for ids in found if not any(len(own) < len(ids) and ids[-len(own) :] == own for own in found))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode ids. Raise `InvalidRequestError` for an id that is no unsigned 32-bit integer,
        `TokenizerFailedError`.
        """
        try:
            return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(f"token ids must be unsigned 32-bit integers: {error}", "tokens") from error
        except BaseException as error:
            if is_panic(error):
                raise _failed(error) from None
            raise

    def token_str(self, id: int) -> str:
        r"""Return a token as logprobs show it: its text, or `bytes:\xe2\x82` if it is not a complete text."""
        raw = self.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def token_bytes(self, id: int) -> bytes:
        """Return what the token adds within a text: special tokens as written, unknown ids b''."""
        known = self._bytes.get(id)
        if known is None:
            known = self._bytes[id] = self._token_bytes(id)
        return known

    @cached_property
    def max_token_bytes(self) -> int:
        """Upper bound of the bytes of one token's text, found by a scan of the vocabulary."""
        return max((len(self.token_bytes(token)) for token in range(self.vocab_size)), default=1)

    def _token_bytes(self, id: int) -> bytes:
        token = self.backend.id_to_token(id)
        if token is None:
            return b""
        if self.kind is DecoderKind.BYTE_LEVEL:
            return byte_level_bytes(token)
        if id in self.fallback_bytes:
            return bytes([self.fallback_bytes[id]])
        before = [] if self._anchor is None else [self._anchor]
        skipped = len(self.decode(before, skip_special_tokens=False))
        return self.decode([*before, id], skip_special_tokens=False)[skipped:].encode()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def _find_anchor(self) -> int | None:
        """Return a token of plain text. A token decoded after it keeps the space that it would lose at the start."""
        for id in range(self.vocab_size):
            ordinary = id not in self.special_ids and id not in self.fallback_bytes
            if ordinary and self.decode([id]).strip("\ufffd ").isalnum():
                return id
        return None


def encode(
    backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool, keep_last: int | None = None
) -> list[int]:
    """Encode `text` as `Tokenizer.encode` does."""
    encoded = encode_batch(backend, [text], add_special_tokens)[0]
    ids: list[int] = encoded.ids
    if keep_last is None or len(ids) <= keep_last:
        return ids
    # Models trained with BOS work badly without it.
    added = sum(1 for _ in takewhile(bool, encoded.special_tokens_mask))
    return [*ids[:added], *ids[added - keep_last :]] if added < keep_last else ids[-keep_last:]


def encode_batch(
    backend: tokenizers.Tokenizer, texts: list[str], add_special_tokens: bool
) -> list[tokenizers.Encoding]:
    """Encode texts in one call, which the library spreads over the cores. Raise as `Tokenizer.encode`."""
    try:
        return backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except TypeError as error:
        raise InvalidRequestError("the text holds lone surrogates, which are not valid Unicode", "prompt") from error
    except BaseException as error:
        if is_panic(error):
            raise _failed(error) from None
        raise


def is_panic(error: BaseException) -> bool:
    """Return True if a Rust library panicked. Each library has its own class, which is no subclass of Exception."""
    return type(error).__name__ == "PanicException" and type(error).__module__ == "pyo3_runtime"


def _failed(panic: BaseException) -> TokenizerFailedError:
    reason = " ".join(str(panic).split())[:300]
    return TokenizerFailedError(f"the tokenizer failed: {reason}")


def _mark_special(backend: tokenizers.Tokenizer, named: dict[str, str]) -> None:
    """Mark the tokens that the config names as special, even if tokenizer.json does not."""
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = sorted({text for text in named.values() if text not in known})
    backend.add_special_tokens([text for text in missing if backend.token_to_id(text) is not None])


# --- decoders: three kinds, and what each needs so that tokens turn back into text exactly ---------------------
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(StrEnum):
    """Kinds of decoders.

    BYTE_LEVEL: a token is a string of bytes, the text is their UTF-8 (GPT-2, Llama 3, Qwen). BYTE_FALLBACK: a token is
    text, or one byte of a character outside the vocabulary (Llama 2, Mistral). TEXT: a token is text, perhaps joined by
    a rule such as WordPiece's.
    """

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    TEXT = "text"


def decoder_kind(backend: tokenizers.Tokenizer) -> DecoderKind:
    """Return the decoder's kind. Raise `UnsupportedModelError` for byte level combined with others,
    which change bytes.
    """
    if backend.decoder is None:
        return DecoderKind.TEXT
    spec = json.loads(backend.decoder.__getstate__())
    names = {part["type"] for part in spec.get("decoders", [spec])} - {"Fuse"}
    if names == {"ByteLevel"}:
        return DecoderKind.BYTE_LEVEL
    if "ByteLevel" in names:
        raise UnsupportedModelError(f"tokenizer.json: decoder ByteLevel together with {sorted(names - {'ByteLevel'})}")
    return DecoderKind.BYTE_FALLBACK if "ByteFallback" in names else DecoderKind.TEXT


def byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. A token with a character outside the byte alphabet is plain text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_bytes(vocab: dict[str, int]) -> dict[int, int]:
    """Return the value of each byte-fallback token (written <0x0A>) by id."""
    matches = ((id, BYTE_TOKEN.fullmatch(token)) for token, id in vocab.items())
    return {id: int(match[1], 16) for id, match in matches if match}


@cache
def byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in of each byte: itself if Latin-1 prints it, else the next code point from 256
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
