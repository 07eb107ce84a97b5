"""What the engine says of a request after a step, and how requests end."""

from enum import StrEnum
from typing import NamedTuple

from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.slo import Rejection


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"  # before its first token: its objectives are out of reach
    TIMEOUT = "timeout"  # its time to live is over


COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # the model, or the request itself, ended the output


class RequestTimes(NamedTuple):
    """Seconds on the engine's monotonic clock; 0.0 = never happened."""

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float


class Started(NamedTuple):
    """Comes with the first token. `cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int
    arrival_s: float
    scheduled_s: float
    first_token_s: float


class End(NamedTuple):
    """How a request ended. `stop_token` is the token id that ended it, if one did; it is the last of the output.

    `rejection` says why, if the reason is `REJECTED`.
    """

    reason: FinishReason
    times: RequestTimes
    stop_token: int | None = None
    error: str | None = None
    preemptions: int = 0
    rejection: Rejection | None = None


class RequestOutput(NamedTuple):
    """New tokens of one request, or its end, or both. `started` is set in the first output that holds a token."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    started: Started | None = None
    end: End | None = None


class SchedulerStats(NamedTuple):
    """A snapshot after a step. Counters only grow."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: int = 0
    step_duration_s: float = 0.0
