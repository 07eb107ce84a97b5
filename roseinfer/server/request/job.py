"""One HTTP request after validation, its progress, and the outcome of its objectives."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.outputs import COMPLETE, DraftTally, FinishReason, RequestTimes
from roseinfer.core.request import NO_META, Prompt, RequestMeta
from roseinfer.core.slo import NO_CLASS, Slo, Why
from roseinfer.engine.api import Route, SequenceChunk
from roseinfer.server.http.errors import CLIENT_CLOSED_REQUEST, ApiError, as_api_error
from roseinfer.text.output import CallEnd, OutputParser

# Inputs of prompt-only requests that count as one prompt in the server's queue.
PLACE_INPUT_COUNT = 16
# Proposer of drafts from the text that a client predicted.
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoices:
    """Options of a stream. `interval`: minimum tokens per chunk."""

    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A validated request with `prompts` x `n` choices; choice i is sample i % n of prompt i // n.

    `api`: its name, for records; `id`: the answer's id; `created`: Unix seconds.
    `logprobs`, `prompt_logprobs`: number of alternatives, None = off. `stream`: None for a whole answer.
    `first_token_by_s`: the request times out if it has no token by then; same clock as `arrival_s`.
    `report_slo`, `report_why`: add objectives and their explanation to `usage`.
    `parser`: makes a parser of one output; None = plain text. `echo_texts`: the prompts' texts if `echo` is set.
    `lengths_predicted`: the prompts' lengths come from the server's predictor, not the client.
    `about`: request fields that the answer repeats. `call_names`: function name of the model -> name in the API.
    `tool_parser`: name of the tool call format. `store_answer`: called with the complete answer; None = not stored.
    """

    api: str
    id: str
    request_id: str
    model: str
    created: int
    arrival_s: float
    prompts: tuple[Prompt, ...]
    meta: RequestMeta = NO_META
    n: int = 1
    parser: Callable[[], OutputParser] | None = None
    echo_texts: tuple[str, ...] = ()
    stream: StreamChoices | None = None
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    warnings: tuple[str, ...] = ()
    first_token_by_s: float | None = None
    report_slo: bool = False
    report_why: bool = False
    tool_parser: str = "none"
    lengths_predicted: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    call_names: Mapping[str, Any] = field(default_factory=dict)
    store_answer: Callable[[dict[str, Any]], None] | None = None

    @property
    def has_objectives(self) -> bool:
        return self.meta.slo is not None and not self.meta.slo.empty

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def places(self) -> int:
        """Number of prompts that it counts as in the server's queue. Inputs without outputs are done within a step."""
        inputs = len(self.prompts)
        return inputs if self.prompts[0].pooling is None else math.ceil(inputs / PLACE_INPUT_COUNT)


class UnreadRequest(NamedTuple):
    """Request whose body has not been read. `path`: its route; `model`: the server's first model name."""

    request_id: str
    path: str
    model: str


# --- progress: for usage, metrics and the log -------------------------------------------------------------------------
@dataclass(slots=True)
class SampleRecord:
    """Progress of one choice. `first_s`, `last_s`: times of its first and newest token, 0 before the first.

    `calls`: complete tool calls; `parse_failures`: malformed ones. `why`: the engine's newest report on its waits;
    `first_why`: the report that came with its first token, or with its end before that. `drafts`: by proposer,
    None if there were none.
    """

    tokens: int = 0
    reasoning_tokens: int = 0
    calls: int = 0
    parse_failures: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    finish_reason: FinishReason | None = None
    times: RequestTimes | None = None
    preemptions: int = 0
    why: Why | None = None
    first_why: Why | None = None
    drafts: Mapping[str, DraftTally] | None = None

    def note_events(self, chunk: SequenceChunk) -> None:
        self.reasoning_tokens, self.parse_failures = chunk.reasoning_tokens, chunk.parse_failures
        self.calls += sum(type(event) is CallEnd and event.complete for event in chunk.events or ())


@dataclass(slots=True)
class PromptRun:
    """Progress of one prompt. `first_s`: time of its first token, None before. `route`: see `Submission`."""

    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    samples: list[SampleRecord]
    cached_tokens: int = 0
    first_s: float | None = None
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request. `reasoning_tokens`: None if no parser separates reasoning.

    `slo`: measured latencies; None if not requested or not final. `prediction`: drafts from the client's prediction;
    None without one.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    slo: dict[str, Any] | None = None
    prediction: DraftTally | None = None

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        if self.prediction is not None:
            drafted, accepted = self.prediction
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
            fields["completion_tokens_details"] = fields.get("completion_tokens_details", {}) | details
        return fields if self.slo is None else fields | {"slo": self.slo}


@dataclass(slots=True)
class JobProgress:
    """Progress of all prompts of one job, in order. `parsed`: a parser reads the outputs. `predicted`: the client sent
    a prediction of the output.
    """

    runs: list[PromptRun] = field(default_factory=list)
    parsed: bool = False
    predicted: bool = False

    @property
    def begun(self) -> bool:
        """True once a prompt has its first token."""
        return any(run.first_s is not None for run in self.runs)

    def usage(self) -> Usage:
        """Count each prompt once, and the output tokens of all choices."""
        prompt = completion = cached = reasoning = 0
        for run in self.runs:
            prompt += run.prompt_tokens
            cached += run.cached_tokens
            for sample in run.samples:
                completion += sample.tokens
                reasoning += sample.reasoning_tokens
        prediction = self.drafts((PREDICTION,)) if self.predicted else None
        return Usage(prompt, completion, cached, reasoning if self.parsed else None, prediction=prediction)

    def drafts(self, proposers: Collection[str] | None = None) -> DraftTally:
        """Count the drafts of all choices, or those of some `proposers`."""
        drafted = accepted = 0
        for sample in (sample for run in self.runs for sample in run.samples):
            for proposer, tally in (sample.drafts or {}).items():
                if proposers is None or proposer in proposers:
                    drafted += tally.drafted
                    accepted += tally.accepted
        return DraftTally(drafted, accepted)


# --- outcome of objectives ----------------------------------------------------------------------------------------
OBJECTIVES = ("ttft", "tpot", "e2e")


class Outcome(StrEnum):
    MET = "met"  # finished in time, or without objectives
    MISSED_TTFT = "missed_ttft"
    MISSED_TPOT = "missed_tpot"
    MISSED_E2E = "missed_e2e"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    FAILED = "failed"
    ABORTED = "aborted"  # the client left


class Latencies(NamedTuple):
    """Seconds from arrival to the first token, per token after it, and from arrival to the last token."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def worst_latencies(runs: Sequence[PromptRun]) -> Latencies | None:
    """Return the worst of each latency over all samples; None if a sample has no token."""
    samples = [(run, sample) for run in runs for sample in run.samples]
    if not samples or any(not sample.first_s for _, sample in samples):
        return None
    seen = [(each.first_s - run.arrival_s, tpot_s(each), each.last_s - run.arrival_s) for run, each in samples]
    return Latencies(*map(max, zip(*seen, strict=True)))


def tpot_s(sample: SampleRecord) -> float:
    """Return seconds per token after the first; 0 for a single token."""
    return (sample.last_s - sample.first_s) / (sample.tokens - 1) if sample.tokens > 1 else 0.0


def slack_s(slo: Slo, seen: Latencies) -> dict[str, float]:
    """Return objective minus latency for each objective; negative = late."""
    targets = (slo.ttft_s, slo.tpot_s, slo.e2e_s)
    pairs = zip(OBJECTIVES, targets, seen, strict=True)
    return {name: limit - value for name, limit, value in pairs if limit is not None}


def outcome(slo: Slo | None, run: PromptRun) -> Outcome:
    """Return the outcome of a prompt whose samples all ended."""
    reasons = {sample.finish_reason for sample in run.samples}
    if FinishReason.TIMEOUT in reasons:
        return Outcome.TIMEOUT
    seen = worst_latencies([run])
    if seen is None or not reasons.issubset(COMPLETE):
        return Outcome.FAILED
    late = slo.missed(*seen) if slo else []
    return Outcome(f"missed_{late[0]}") if late else Outcome.MET


class RequestEnd(NamedTuple):
    """End of an HTTP request. The defaults are those of a request whose samples all finished.

    `outcome`: worst outcome of its prompts; None = still open, or the request was invalid. `finish`: finish reason of
    its unfinished samples; `reason`: details. `status`: HTTP status of an answer that had not begun. `cause`: the error
    that ended it early.
    """

    outcome: Outcome | None = None
    finish: str = ""
    reason: str = ""
    status: int = 200
    cause: BaseException | None = None


# Status -> outcome, finish reason, and details of errors without a code.
_BY_STATUS = {
    429: (Outcome.REJECTED, "rejected", "limit"),
    504: (Outcome.TIMEOUT, FinishReason.TIMEOUT, "limit"),
    CLIENT_CLOSED_REQUEST: (Outcome.ABORTED, FinishReason.ABORT, "client"),
}


def request_end(cause: BaseException | None) -> RequestEnd:
    """Return how a request ended that `cause` ended early; None = nothing did."""
    if cause is None:
        return RequestEnd()
    if isinstance(cause, ClientDisconnect):
        return RequestEnd(Outcome.ABORTED, FinishReason.ABORT, "disconnect", CLIENT_CLOSED_REQUEST, cause)
    if not isinstance(cause, Exception):  # its task was cancelled
        return RequestEnd(Outcome.FAILED, FinishReason.ABORT, "shutdown", CLIENT_CLOSED_REQUEST, cause)
    status = as_api_error(cause).status
    if isinstance(cause, InvalidRequestError):
        return RequestEnd(None, "rejected", cause.code or "invalid", status, cause)
    code = cause.code if isinstance(cause, ApiError) else None
    if code == "draining":
        return RequestEnd(Outcome.FAILED, FinishReason.ABORT, "shutdown", status, cause)
    if isinstance(cause, ApiError) and status in _BY_STATUS:
        outcome, finish, reason = _BY_STATUS[status]
        return RequestEnd(outcome, finish, code or reason, status, cause)
    reason = code or f"{type(cause).__name__}: {cause}"[:500]
    return RequestEnd(Outcome.FAILED, FinishReason.ERROR, reason, status, cause)


def slo_class_name(job: Job) -> str:
    return NO_CLASS if job.meta.slo is None else job.meta.slo.class_name


def slo_usage(job: Job, runs: Sequence[PromptRun]) -> dict[str, Any]:
    """Return `usage.slo`: worst latencies of all choices; `met` is None without objectives."""
    seen = worst_latencies(runs)
    return {
        "ttft_ms": None if seen is None else round(seen.ttft_s * 1000, 3),
        "tpot_ms": None if seen is None else round(seen.tpot_s * 1000, 3),
        "met": all(outcome(job.meta.slo, run) is Outcome.MET for run in runs) if job.has_objectives else None,
    }
