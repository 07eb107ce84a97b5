"""One HTTP request after validation (all that the answer needs, nothing left to decide), what is noted of it while it
runs, and how its objectives were kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.guide import GuideSpec
from roseinfer.core.outputs import COMPLETE, FinishReason, RequestTimes
from roseinfer.core.request import NO_META, RequestMeta
from roseinfer.core.sampling import SamplingParams
from roseinfer.core.slo import Slo, Why
from roseinfer.engine.api import Route, SequenceChunk
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.slo_classes import NO_CLASS
from roseinfer.text.output import CallEnd, OutputParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is what `echo` gives back: the prompt as written, or decoded from the ids; empty without `echo`.

    `meta` is the job's, with a length of its own if that was predicted. `guide`: what constrains its outputs.
    `parser` makes what reads one of them; None: they are text.
    """

    ids: list[int]
    params: SamplingParams
    meta: RequestMeta = NO_META
    text: str = ""
    guide: GuideSpec | None = None
    parser: Callable[[], OutputParser] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChoices:
    """How a stream is cut. `interval`: tokens per chunk at least."""

    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """`prompts` x `n` choices; choice i is sample i % n of prompt i // n. `api`: what logs call the kind of
    answer; `id`: the answer's own.

    `logprobs` and `prompt_logprobs` are the numbers of alternatives asked for (None = none); `stream` is None for a
    whole answer. `created` is in Unix seconds.

    `meta`: what it brings for the engine. `first_token_by_s`: on the same clock, when it ends unless it has a token.
    `report_slo`: whether the usage says how its objectives were kept, `report_why`: and why. `lengths_predicted`:
    whether the lengths of its prompts are our own predictor's. `about`: what its format repeats of the request in the
    answer; `call_names`: the model's name of a function -> what its format makes of it.
    `tool_parser`: the name of what reads tool calls in it. `keep`: called with the answer as a whole, in one piece or
    when its stream has ended; None if nobody stores it.
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
    keep: Callable[[dict[str, Any]], None] | None = None

    @property
    def promised(self) -> bool:
        """Whether it has an objective."""
        return self.slo is not None and not self.slo.empty

    @property
    def slo(self) -> Slo | None:
        """None: it was promised nothing."""
        return self.meta.slo

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Visit(NamedTuple):
    """What is known of a request before anybody has read it. `path`: of the API; `model`: what is served."""

    request_id: str
    path: str
    model: str


# --- what is noted of it while it runs, for usage, metrics and the log ------------------------------------------------
@dataclass(slots=True)
class SampleRecord:
    """One choice. `first_s`, `last_s`: when its first and its newest token came, 0 before the first. `calls`: complete
    tool calls, `parse_failures`: what began as one and was none. `why`: what its engine has said of it last.
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

    def note_events(self, chunk: SequenceChunk) -> None:
        self.reasoning_tokens, self.parse_failures = chunk.reasoning_tokens, chunk.parse_failures
        self.calls += sum(type(event) is CallEnd and event.complete for event in chunk.events or ())

    def note_end(self, chunk: SequenceChunk) -> None:
        """`chunk` is its last."""
        self.finish_reason = chunk.finish_reason
        self.times = chunk.times
        self.preemptions = chunk.preemptions


@dataclass(slots=True)
class PromptRun:
    """One prompt and its samples. `first_s`: when its first token came, None before. `route`: see `Submission`."""

    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    samples: list[SampleRecord]
    cached_tokens: int = 0
    first_s: float | None = None
    route: Route | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """`reasoning_tokens`: those of the completion that the model thought with, None if thinking is not told apart.
    `slo`: how objectives were kept, None if nobody wants to know or if there is more to come.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    slo: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            fields["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return fields if self.slo is None else fields | {"slo": self.slo}


@dataclass(slots=True)
class Account:
    """All prompts of one HTTP request, in order. `parsed`: whether a parser reads what becomes of them."""

    runs: list[PromptRun] = field(default_factory=list)
    parsed: bool = False

    @property
    def begun(self) -> bool:
        """Whether some prompt has its first token."""
        return any(run.first_s is not None for run in self.runs)

    def usage(self) -> Usage:
        """Each prompt counts once, output tokens over all choices."""
        prompt = completion = cached = reasoning = 0
        for run in self.runs:
            prompt += run.prompt_tokens
            cached += run.cached_tokens
            for sample in run.samples:
                completion += sample.tokens
                reasoning += sample.reasoning_tokens
        return Usage(prompt, completion, cached, reasoning if self.parsed else None)


# --- how what was promised was kept, as the server saw it ---------------------------------------------------------
OBJECTIVES = ("ttft", "tpot", "e2e")


class Outcome(StrEnum):
    MET = "met"  # it finished, in time as far as it was promised anything
    MISSED_TTFT = "missed_ttft"
    MISSED_TPOT = "missed_tpot"
    MISSED_E2E = "missed_e2e"
    REJECTED = "rejected"
    TIMEOUT = "timeout"
    FAILED = "failed"
    ABORTED = "aborted"  # the client left


class Measured(NamedTuple):
    """Seconds from arrival at the server to the first token, per token after it, and to the last token."""

    ttft_s: float
    tpot_s: float
    e2e_s: float


def measured(runs: Sequence[PromptRun]) -> Measured | None:
    """The worst of all samples in each respect; None if one of them has no token."""
    samples = [(run, sample) for run in runs for sample in run.samples]
    if not samples or any(not sample.first_s for _, sample in samples):
        return None
    return Measured(
        max(sample.first_s - run.arrival_s for run, sample in samples),
        max(tpot_s(sample) for _, sample in samples),
        max(sample.last_s - run.arrival_s for run, sample in samples),
    )


def tpot_s(sample: SampleRecord) -> float:
    """Seconds per token after the first; 0 for a single token."""
    return (sample.last_s - sample.first_s) / (sample.tokens - 1) if sample.tokens > 1 else 0.0


def slack_s(slo: Slo, seen: Measured) -> dict[str, float]:
    """Objective less what was seen, for each objective that there is; negative = late."""
    promised = (slo.ttft_s, slo.tpot_s, slo.e2e_s)
    pairs = zip(OBJECTIVES, promised, seen, strict=True)
    return {name: limit - value for name, limit, value in pairs if limit is not None}


def outcome(slo: Slo | None, run: PromptRun) -> Outcome:
    """Of a prompt whose samples all came to an end of their own."""
    if any(sample.finish_reason is FinishReason.TIMEOUT for sample in run.samples):
        return Outcome.TIMEOUT
    seen = measured([run])
    if seen is None or any(sample.finish_reason not in COMPLETE for sample in run.samples):
        return Outcome.FAILED
    late = slo.missed(*seen) if slo else []
    return Outcome(f"missed_{late[0]}") if late else Outcome.MET


def cut_short(cause: BaseException) -> Outcome | None:
    """Of every prompt of a request that ended before its time; None if the request itself was wrong."""
    if isinstance(cause, InvalidRequestError):
        return None
    if isinstance(cause, ClientDisconnect):
        return Outcome.ABORTED
    if isinstance(cause, ApiError):
        return {429: Outcome.REJECTED, 504: Outcome.TIMEOUT, 499: Outcome.ABORTED}.get(cause.status, Outcome.FAILED)
    return Outcome.FAILED


def class_of(job: Job) -> str:
    return NO_CLASS if job.slo is None else job.slo.class_name


def usage_of(job: Job, runs: Sequence[PromptRun]) -> dict[str, Any]:
    """`usage.slo`: the worst of all choices; `met` is None if nothing was promised."""
    seen = measured(runs)
    return {
        "ttft_ms": None if seen is None else round(seen.ttft_s * 1000, 3),
        "tpot_ms": None if seen is None else round(seen.tpot_s * 1000, 3),
        "met": all(outcome(job.slo, run) is Outcome.MET for run in runs) if job.promised else None,
    }
