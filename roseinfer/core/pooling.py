"""Prompt-only requests: their result is a vector, read from hidden states, instead of output tokens.

To the scheduler such a request is one that generates no token: it ends with the last chunk of its prompt. The runner
returns the vector in that chunk's `RowResult`, and it travels to the client in the request's `End`.
"""

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.sampling import SequenceParams

FLOAT_BYTES = 4
# Sampling parameters of every prompt-only request.
NO_OUTPUT = SequenceParams(max_tokens=0, temperature=0.0)


class PoolingTask(StrEnum):
    """Meaning of the vector: an embedding, or a score of one number."""

    EMBED = "embed"
    SCORE = "score"


class PoolingMethod(StrEnum):
    """Hidden states that make the vector: those of the prompt's last token, the mean over all tokens in float32, or
    those of its first token.
    """

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"

    @property
    def needs_every_position(self) -> bool:
        """True if positions before the last one count, so that a cached prefix is of no use."""
        return self is not PoolingMethod.LAST


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Mark of a prompt-only request.

    `dimensions`: leading numbers of an embedding to keep, which are then normalised again; None = all.
    `second_text_from`: first token of the second text of a pair, for models that number the texts; 0 = one text.
    """

    dimensions: int | None = None
    second_text_from: int = 0


class PairFormat(StrEnum):
    """Form of a query and a document as one prompt.

    `TOKENIZER`: the tokenizer's own encoding of a pair, as cross-encoders expect. `QWEN3_RERANKER`: the conversation in
    which Qwen3-Reranker is asked for "yes" or "no".
    """

    TOKENIZER = "tokenizer"
    QWEN3_RERANKER = "qwen3-reranker"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingInfo:
    """Properties of an engine that serves prompt-only requests.

    `width`: numbers of a vector; 1 for a score. `dimensions`: smaller widths for which the model was trained, rising;
    empty = none. `any_dimension_from`: smallest such width if all from there on are possible, 0 = no. `prompts`: texts
    by name that go before an input, from the model's folder. `default_prompt`: name of the one to use if a request
    names none. `pairs`: how a query and a document become one prompt; None unless the task is `SCORE`.
    """

    task: PoolingTask
    method: PoolingMethod
    width: int
    dimensions: tuple[int, ...] = ()
    any_dimension_from: int = 0
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pairs: PairFormat | None = None

    def check(self, params: PoolingParams) -> None:
        """Raise `InvalidRequestError` for dimensions that the model does not have."""
        wanted = params.dimensions
        if wanted is None:
            return
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
            raise InvalidRequestError("dimensions must be a positive integer", "dimensions")
        if self.task is PoolingTask.SCORE:
            raise InvalidRequestError("dimensions is not supported: the model returns scores", "dimensions")
        if wanted > self.width:
            raise InvalidRequestError(f"dimensions is {wanted}, but embeddings have {self.width}", "dimensions")
        if wanted == self.width or wanted in self.dimensions or 0 < self.any_dimension_from <= wanted:
            return
        raise InvalidRequestError(f"dimensions {wanted} is not supported by this model{self._known()}", "dimensions")

    def _known(self) -> str:
        if self.any_dimension_from:
            return f" (expected {self.any_dimension_from} to {self.width})"
        if self.dimensions:
            return f" (expected one of {', '.join(map(str, self.dimensions))})"
        return ", which was not trained for shorter embeddings"


def floats(vector: bytes) -> "array[float]":
    """Return the numbers of a vector, which are little-endian float32."""
    return array("f", vector)
