"""A tokenizer small enough to read: one token per byte."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from roseinfer.text.tokenizer import Tokenizer

EOS_ID = 256


def byte_tokenizer() -> Tokenizer:
    """Ids 0-255 are the bytes, 256 is <eos>."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in letters]
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, {"eos_token": "<eos>"}, None)
