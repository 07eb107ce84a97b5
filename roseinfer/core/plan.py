"""The one contract between scheduler and runner: a `StepPlan` goes in, a `StepResult` comes out.

Plans are plain data and a diff: a request is described in full once (`Admission`), later only by what changed (`Row`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from roseinfer.core.sampling import SamplingParams


class BlockCopy(NamedTuple):
    """Copy the first `tokens` slots of KV block `src` into `dst`, in every layer, before the forward pass.

    No block is both a source and a destination of the same step, and none is twice a destination.
    """

    src: int
    dst: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request takes a seat. Everything the runner must know of it, sent once (again after a preemption).

    `token_ids` are all known tokens (prompt, then outputs so far); the first `prompt_len` are the prompt.
    `blocks` is the block table so far (prefix hits); rows add to it. `stop_ids` are the token ids that end the
    request and so must not be sampled before `min_tokens`.
    """

    request_id: str
    seat: int
    token_ids: Sequence[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    blocks: tuple[int, ...]


class Row(NamedTuple):
    """Compute `count` tokens of a seated request, from position `start`.

    The inputs are read from the seat's token pool, so a sampled token that the host has not seen yet can be the next
    input. `logits` = how many trailing positions need logits: 0 while a prompt is being chunked, 1 to sample, `count`
    for prompt logprobs. `sample` says whether the last position's logits choose a token. K/V is written at positions
    >= `write_from` only. `new_blocks` replaces the block table from entry `table_from` on.
    """

    request_id: str
    seat: int
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls on a row
    logits: int
    sample: bool
    write_from: int
    table_from: int
    new_blocks: tuple[int, ...]


@dataclass(slots=True)
class StepPlan:
    """One engine step: `released` seats are forgotten, `admitted` seated, `copies` applied at once, `rows` computed."""

    step: int
    rows: list[Row]
    admitted: list[Admission] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    num_tokens: int = 0


class TokenLogprobs(NamedTuple):
    """Log probability of one chosen token and of the likeliest ones, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


class RowResult(NamedTuple):
    """What one row produced: 0 or 1 sampled tokens, or an error that ends this request alone.

    `prompt_logprobs` covers positions start+1 .. start+count of the prompt (as far as it reaches).
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@dataclass(slots=True)
class StepResult:
    """Results in the order of the plan's rows. `duration_s`: wall time of the step as the runner saw it."""

    step: int
    rows: list[RowResult]
    duration_s: float = 0.0
