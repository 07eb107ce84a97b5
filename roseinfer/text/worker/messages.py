"""Messages between a server and its text workers. Frame: a length in 4 bytes, then msgpack."""

import socket
from typing import Any

import msgspec

HEADER_BYTES = 4


class Boot(msgspec.Struct):
    """Input of a text host: tokenizer.json, tokenizer_config.json, the chat template."""

    tokenizer: str
    config: dict[str, Any]
    chat_template: str | None


class Loaded(msgspec.Struct, tag=True):
    """The tokenizer is there; what follows is the chat template's time and memory."""


class TextHostReady(msgspec.Struct, tag=True):
    """`variables`: of the chat template, None without one. `max_token_bytes`: see `Tokenizer`."""

    variables: list[str] | None
    max_token_bytes: int


class Unusable(msgspec.Struct, tag=True):
    """The chat template or the tokenizer cannot be used."""

    reason: str


Start = Loaded | TextHostReady | Unusable


class EncodeTexts(msgspec.Struct, tag=True):
    """Texts, or ids whose text is wanted.

    `keep_last`: see `Tokenizer.encode`; `context`: tokens that a prompt may have, None = any number.
    """

    prompts: list[str | list[int]]
    add_special_tokens: bool
    with_text: bool = False
    keep_last: int | None = None
    context: int | None = None


class EncodeChat(msgspec.Struct, tag=True):
    """`kwargs`: variables of the chat template. `keep_last` and `context` as for texts."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    add_special_tokens: bool
    kwargs: dict[str, Any]
    keep_last: int | None = None
    context: int | None = None


class ListTokens(msgspec.Struct, tag=True):
    """The tokens of one prompt, written as JSON. A prompt may be somewhat longer than the `context`."""

    prompt: EncodeTexts | EncodeChat
    with_strings: bool
    context: int


class DecodeIds(msgspec.Struct, tag=True):
    ids: list[int]


Job = EncodeTexts | EncodeChat | ListTokens | DecodeIds


class TextOrder(msgspec.Struct):
    """`cpu_s`: processor time after which the system ends the worker."""

    job: Job
    cpu_s: float


class TextIds(msgspec.Struct, tag=True):
    """For each prompt its ids, as 32-bit integers of the machine's own order, and its text if that was wanted."""

    ids: list[bytes]
    texts: list[str]


class Listed(msgspec.Struct, tag=True):
    """`tokens` and `strings` are JSON arrays."""

    count: int
    tokens: bytes
    strings: bytes | None


class Decoded(msgspec.Struct, tag=True):
    text: str


class TextJobRefused(msgspec.Struct, tag=True):
    """Fields of `InvalidRequestError`. `too_long`: those that only `RequestTooLongError` has."""

    message: str
    param: str | None
    code: str | None
    too_long: tuple[int | None, int | None] | None = None


class TextJobFailed(msgspec.Struct, tag=True):
    """The tokenizer failed, or it is a bug of ours."""

    reason: str


class TooMuch(msgspec.Struct, tag=True):
    """The job needs more memory than it may take."""


class AliasesNeeded(msgspec.Struct, tag=True):
    """The host is to build the tokenizer's aliases first; then the job is for another worker."""


Result = TextIds | Listed | Decoded
Answer = Result | TextJobRefused | TextJobFailed | TooMuch | AliasesNeeded


# --- frames over a blocking socket ----------------------------------------------------------------------------------
def framed(message: bytes) -> bytes:
    return len(message).to_bytes(HEADER_BYTES, "little") + message


def read_frame(end: socket.socket) -> bytes:
    """Raises `EOFError` if the other side is gone."""
    return read_exactly(end, int.from_bytes(read_exactly(end, HEADER_BYTES), "little"))


def read_exactly(end: socket.socket, count: int) -> bytes:
    if not count:
        return b""
    data = end.recv(count)
    if len(data) == count:
        return data
    parts = bytearray(data)
    while data and len(parts) < count:
        data = end.recv(count - len(parts))
        parts += data
    if not data:
        raise EOFError
    return bytes(parts)
