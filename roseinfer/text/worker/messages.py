"""Messages between a server and its text workers: frames (`processes.frames`) of msgpack."""

from array import array
from typing import Any

import msgspec

from roseinfer.core.pooling import PairFormat


class Boot(msgspec.Struct):
    """Input of a text host: tokenizer.json, tokenizer_config.json, the chat template."""

    tokenizer: str
    config: dict[str, Any]
    chat_template: str | None


class Loaded(msgspec.Struct, tag=True):
    """The tokenizer is loaded. The chat template is compiled next, under limits of its own."""


class TextFacts(msgspec.Struct, tag=True, frozen=True):
    """Facts from a host that is ready. `max_token_bytes`: see `Tokenizer`.

    `variables`: those of the chat template that a request may set, None without a template.
    """

    variables: frozenset[str] | None
    max_token_bytes: int


class Unusable(msgspec.Struct, tag=True):
    """The chat template or the tokenizer cannot be used."""

    reason: str


Start = Loaded | TextFacts | Unusable


class EncodeTexts(msgspec.Struct, tag=True):
    """Texts to tokenise, or ids whose text is needed.

    `keep_last`: see `Tokenizer.encode`; `keep_first`: the same for the start of a text, whose end is cut; at most one
    of them is set. `context`: tokens that a prompt may have, None = any number.
    """

    prompts: list[str | list[int]]
    add_special_tokens: bool
    with_text: bool = False
    keep_last: int | None = None
    context: int | None = None
    keep_first: int | None = None


class EncodePairs(msgspec.Struct, tag=True):
    """Queries and documents, each pair one prompt. `form`, `instruction`, `limit`: see `PairEncoder`.

    `first`: position of the first pair in the request, for errors.
    """

    pairs: list[tuple[str, str]]
    form: PairFormat
    instruction: str | None = None
    limit: int | None = None
    first: int = 0


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


Job = EncodeTexts | EncodePairs | EncodeChat | ListTokens | DecodeIds


class TextOrder(msgspec.Struct):
    """`cpu_s`: processor time after which the system ends the worker."""

    job: Job
    cpu_s: float


class TextIds(msgspec.Struct, tag=True):
    """Token ids of each prompt, as 32-bit integers in native byte order, and its text if that was requested.

    `second_from`: of pairs, see `PairIds`. `generation_prompt_len`: see `Prompt`.
    """

    ids: list[bytes]
    texts: list[str]
    second_from: list[int] = msgspec.field(default_factory=list)
    generation_prompt_len: int = 0

    def lists(self) -> list[list[int]]:
        return [array("I", packed).tolist() for packed in self.ids]


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
    """The tokenizer failed, or there is a bug."""

    reason: str


class TooMuch(msgspec.Struct, tag=True):
    """The job exceeds its memory limit."""


class AliasesNeeded(msgspec.Struct, tag=True):
    """The host must build the tokenizer's aliases first. Then another worker can do the job."""


Result = TextIds | Listed | Decoded
Answer = Result | TextJobRefused | TextJobFailed | TooMuch | AliasesNeeded
