"""Interface of the engine: one request in, a stream of chunks out. The server depends on this file alone."""

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import DraftTally, FinishReason, RequestTimes, SchedulerStats
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.core.runner import RunnerFacts
from roseinfer.core.slo import Rejection, Why
from roseinfer.core.step_cost import StepCost
from roseinfer.core.traits import PolicyTraits
from roseinfer.text.output import Event, OutputParser


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Prompt with `n` samples. Sample i draws with seed + i.

    The prompt has passed `prepare`. Stop strings are matched in the client; everything else runs in the engine.
    `parser`: makes a parser of one sample's output, see `SequenceChunk.events`; None = plain text.
    """

    request_id: str
    prompt: Prompt
    n: int = 1
    parser: Callable[[], OutputParser] | None = None


@dataclass(slots=True)
class SequenceChunk:
    """New output of sample `index`. It covers several steps if the reader was slow.

    `text` may be empty: for a partial character, or a possible start of a stop string. `finish_reason` is set on the
    last chunk of the sample. `stop_reason` is then the stop string or stop token id that ended it, None for EOS.
    `logprobs`: one entry per token of `token_ids`, if requested. `prompt_logprobs`: sent once, in the first chunk of
    sample 0; one entry per prompt token, the first of them None. `num_output_tokens` counts from the start. `times` and
    `preemptions` are set on the last chunk; `rejection` if the request was rejected. `why` is set with the first token
    and with an end that the engine reports.

    With a parser, `events` holds the whole output, and `text` only the content of its `Text` events. Stop strings are
    matched in the content alone. `reasoning_tokens` counts from the start. `parse_failures`: malformed calls, set on
    the last chunk.

    `vector`: result of a prompt-only request, in its only chunk: float32 in little-endian order.

    `drafts`: counts from the start by proposer, after a step that verified drafts; None without.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    times: RequestTimes | None = None
    rejection: Rejection | None = None
    why: Why | None = None
    events: list[Event] | None = None
    reasoning_tokens: int = 0
    parse_failures: int = 0
    vector: bytes | None = None
    drafts: Mapping[str, DraftTally] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Description of an engine, fixed once it is up.

    `facts`: what building its runner found; their `startup_s` has the whole start as `engine`. `kv_cache`: format of K
    and V. `seed`: seeds the requests that name none. `ranks`: processes that share the model. `calibrated`: costs of
    its cost file; None without. `adapters`: LoRA adapters given at the start; `Engine.adapters` has the present ones.
    `adapters_change`: clients may load and drop adapters. `files`: another text for other files of the model, by their
    sizes and times; empty if unknown.
    """

    model: str
    facts: RunnerFacts
    max_num_seqs: int
    kv_cache: str
    policy: PolicyTraits
    seed: int = 0
    ranks: int = 1
    calibrated: StepCost | None = None
    adapters: tuple[Adapter, ...] = ()
    adapters_change: bool = False
    files: str = ""


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Health of an engine. `heartbeat_age_s`: seconds since its newest heartbeat. `final`: it is dead and will not be
    restarted.

    Of several engines, `alive` is true if one of them runs, `final` if all are final; the age is the smallest one.
    """

    alive: bool
    heartbeat_age_s: float
    error: str | None = None
    final: bool = False


class EngineState(StrEnum):
    """State of an engine. `QUIET`: its heartbeat is overdue, so it gets no requests until the next one. `DRAINING`: it
    finishes its requests and accepts no more.
    """

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    QUIET = "quiet"
    DEAD = "dead"

    @property
    def is_up(self) -> bool:
        """True if the engine process is running and has started."""
        return self in (EngineState.READY, EngineState.DRAINING, EngineState.QUIET)


@dataclass(frozen=True, slots=True)
class PortStats:
    """Statistics of an engine's port for other hosts. `clients`: connected processes; `refused`: rejected connections
    so far.
    """

    clients: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Report on one engine of an `Engine`. `engine`: its number.

    `restarts`: restarts that the reporter knows of; `deaths`: those after a crash or a hang. The counters of `stats`
    continue over restarts. `info`: description of the newest start. `port_stats`: None if other hosts cannot reach it.
    `promise`: the newest one; None without.
    """

    engine: int
    state: EngineState
    health: EngineHealth
    stats: SchedulerStats
    restarts: int = 0
    deaths: int = 0
    info: EngineInfo | None = None
    port_stats: PortStats | None = None
    promise: Promise | None = None


@dataclass(slots=True)
class Route:
    """Path of one request over several engines so far. `engine`: the newest one; `reason`: that of the router's
    `Placement`. `retries`: engines that rejected it. `placed_again`, `resumes`: how often it left a dead, quiet,
    draining or full engine, without and with output.
    """

    engine: int
    reason: str
    retries: int = 0
    placed_again: int = 0
    resumes: int = 0


class RoutingObserver(Protocol):
    """Observer of placements on several engines. `cause`: why a request leaves an engine: `death`, `quiet`, `drain` or
    `queue` (it waited there too long).
    No method may raise.
    """

    def placed(self, engine: int, reason: str) -> None:
        """Count a new request; `reason` is that of the router's `Placement`."""
        ...

    def retried(self, engine: int) -> None:
        """Count a rejected request that goes to an engine which can still meet its objectives."""
        ...

    def placed_again(self, engine: int, cause: str) -> None:
        """Count a request without output that leaves the engine."""
        ...

    def resumed(self, engine: int, cause: str) -> None:
        """Count a request with output that leaves the engine and continues on another."""
        ...

    def breaker(self, engine: int, open: bool) -> None:
        """Note that the circuit breaker of the engine opened or closed."""
        ...

    def engine_added(self, engine: int) -> None:
        """Add an engine. Called for existing engines first; numbers are never reused."""
        ...

    def engine_removed(self, engine: int) -> None:
        """Remove an engine for good."""
        ...


class StepRecord(NamedTuple):
    """Record of one engine step. `tokens`: tokens computed; `prompt_tokens` of them were prompts'. `rows`: sequences.

    `duration_s`: wall time that the runner measured. `predicted_s`: prediction of the policy's cost model, 0 = none.
    `mask_s`: host seconds for the masks of constrained outputs. `ended_s`: end of the step, on the machine's monotonic
    clock. `budget_s`: time until the most urgent request would be late, when the step was planned; None = no deadline.
    """

    tokens: int
    duration_s: float
    predicted_s: float = 0.0
    mask_s: float = 0.0
    ended_s: float = 0.0
    rows: int = 0
    prompt_tokens: int = 0
    budget_s: float | None = None


class Sink(Protocol):
    """Receiver of the output of one request, called from the event loop.

    There are no calls after a chunk with a `finish_reason` for each sample, or after `fail`. After `cancel` there is at
    most a `fail`. Neither method may raise.
    """

    def put(self, chunk: SequenceChunk) -> None: ...

    def fail(self, error: RoseinferError) -> None:
        """End the request with an error.

        `EngineDeadError`: the engine died. `EngineUnavailableError`: the same without output so far, where another
        engine is expected. `RequestFailedError`: only this request failed. `EngineClosedError`: it was cancelled or the
        engine closed. `InvalidRequestError`: the engine found it invalid.
        """
        ...


class Submission(Protocol):
    @property
    def route(self) -> Route | None:
        """Path of the request; updated in place while it lives. None with a single engine."""
        ...

    def cancel(self) -> None:
        """Abort all samples; safe to call at any time and more than once."""
        ...


class RequestStream(Submission, Protocol):
    """Stream of one request. Iterate to the end or `cancel()`; the engine then holds nothing of the request.

    Iteration raises the errors of `Sink.fail`.
    """

    def __aiter__(self) -> AsyncIterator[SequenceChunk]: ...


class Engine(Protocol):
    """Engine as the server uses it: one instance per process, on its event loop.

    `several`: True if a router places requests, because there are several engines or more may be added.
    """

    info: EngineInfo

    @property
    def several(self) -> bool: ...

    def submit(self, request: GenerateRequest, sink: Sink) -> Submission:
        """Start a request without waiting for it.

        Raise `RequestTooLongError` if it could never run, `InvalidRequestError` (bad token id, duplicate live
        request_id), `TooManyInflightError`, `EngineClosedError`, `EngineDeadError`, `EngineUnavailableError`.
        """
        ...

    def generate(self, request: GenerateRequest) -> RequestStream:
        """Start a request whose unread chunks are merged, so that a slow reader does not delay the engine."""
        ...

    def health(self) -> EngineHealth: ...

    def stats(self) -> SchedulerStats:
        """Return the newest snapshot received from the engine."""
        ...

    def reports(self) -> list[EngineReport]:
        """Return a report for each engine, ordered by number."""
        ...

    def adapters(self) -> Mapping[str, Adapter]:
        """Return the LoRA adapters that requests may use, by name. The mapping changes in place."""
        ...

    async def put_adapter(self, name: str, path: str) -> Adapter:
        """Load a LoRA adapter and give it a name, which it takes from any other content. Requests keep what they have.

        `path`: a folder that `--lora` gave, or one below `--lora-dir` of the engine, to which it may be relative. With
        several engines, all of them load it, and none of them changes unless all have found the same content. Other
        processes that use the engines know the name when this returns.

        Raise `InvalidRequestError` for an invalid name, a path that is not allowed, and a folder that cannot be used;
        `TooManyReadsError` while an engine reads the maximum of adapters;
        `EngineClosedError`, `EngineDeadError` or `EngineUnavailableError` if there is no engine to load it.
        """
        ...

    async def drop_adapter(self, name: str) -> Adapter:
        """Drop the name of an adapter and return what it stood for. Requests that use it are completed.

        Raise `InvalidRequestError` for an unknown name, and `EngineClosedError`.
        """
        ...

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """Call `listener` for every step, in order, within half a second. Clients that do not own the engine receive no
        step records.
        """
        ...

    def on_routing(self, observer: RoutingObserver) -> None:
        """Report placements to `observer`. A single engine reports nothing."""
        ...

    async def close(self) -> None:
        """End every open stream with `EngineClosedError`, then stop the engine and wait for it."""
        ...
