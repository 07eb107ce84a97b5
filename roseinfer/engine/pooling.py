"""Prompt-only requests through an `Engine`: one prompt in, one vector out."""

from typing import NamedTuple

from roseinfer.core.errors import RequestFailedError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.pooling import NO_OUTPUT, PoolingParams
from roseinfer.core.request import NO_META, Prompt, RequestMeta
from roseinfer.core.slo import Rejection
from roseinfer.engine.api import SequenceChunk


class PooledOutput(NamedTuple):
    """Result of a prompt-only request. `vector`: float32 in little-endian order; `core.pooling.floats` reads it.

    `cached_tokens`: prompt tokens that were found in the prefix cache.
    """

    vector: bytes
    prompt_tokens: int
    cached_tokens: int


class PromptRejectedError(RequestFailedError):
    """The scheduler rejected the request, because its objective is out of reach."""

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(f"the {rejection.reason} objective is out of reach")
        self.rejection = rejection


def pooling_prompt(ids: list[int], meta: RequestMeta = NO_META, pooling: PoolingParams | None = None) -> Prompt:
    """Return the prompt of a prompt-only request for the token ids `ids`."""
    return Prompt(ids, NO_OUTPUT, meta, pooling=pooling or PoolingParams())


def pooled(prompt: Prompt, chunk: SequenceChunk) -> PooledOutput:
    """Return the result of a prompt-only request from its only chunk.

    Raise `PromptRejectedError` if it was rejected, and `RequestFailedError` if it ended without a vector otherwise.
    """
    if chunk.vector is not None:
        return PooledOutput(chunk.vector, len(prompt.ids), chunk.cached_tokens)
    if chunk.rejection is not None:
        raise PromptRejectedError(chunk.rejection)
    reason = chunk.stop_reason if chunk.finish_reason is FinishReason.ERROR else chunk.finish_reason
    raise RequestFailedError(f"the request ended without a result: {reason}")
