"""How a tokenizer turns tokens back into text: the three kinds of decoder, and what each needs to stay exact."""

import json
import re
from enum import StrEnum
from functools import cache

import tokenizers

from roseinfer.core.errors import UnsupportedModelError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class DecoderKind(StrEnum):
    """BYTE_LEVEL: a token is a string of bytes, the text is their UTF-8 (GPT-2, Llama 3, Qwen).

    BYTE_FALLBACK: a token is text, or one byte of a character that the vocabulary lacks (Llama 2, Mistral).
    TEXT: a token is text, perhaps joined by a rule such as WordPiece's.
    """

    BYTE_LEVEL = "byte_level"
    BYTE_FALLBACK = "byte_fallback"
    TEXT = "text"


def decoder_kind(backend: tokenizers.Tokenizer) -> DecoderKind:
    """Raises `UnsupportedModelError` for a byte-level decoder among others: its bytes would not be the tokens' own."""
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
    """The bytes of a byte-level token. One that holds a character outside the byte alphabet is plain text."""
    alphabet = byte_alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


def fallback_bytes(vocab: dict[str, int]) -> dict[int, int]:
    """Id -> value of the byte-fallback tokens, written <0x0A>."""
    matches = ((id, BYTE_TOKEN.fullmatch(token)) for token, id in vocab.items())
    return {id: int(match[1], 16) for id, match in matches if match}


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: itself where Latin-1 prints it, else the next code point from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
