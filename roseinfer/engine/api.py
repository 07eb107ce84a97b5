"""What a user of the engine sees: one request in, a stream of chunks out. The server depends on this file alone."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import FinishReason, RequestTimes, SchedulerStats
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.promise import Promise
from roseinfer.core.request import Prompt
from roseinfer.core.runner import RunnerFacts
from roseinfer.core.slo import Rejection, Why
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
    """What is new of sample `index`: several steps' worth if the reader was slow.

    `text` may be empty (a partial character, or text held back because it may begin a stop string). `finish_reason`
    is set on the last chunk of the sample; `stop_reason` is then the stop string or stop token id that ended it, None
    for EOS. `logprobs` is one entry per token of `token_ids` when asked for. `prompt_logprobs` comes once, in the
    first chunk of sample 0: one entry per prompt token, the first of them None. `num_output_tokens` counts from the
    start. `times`, `preemptions` are set on the last chunk, `rejection` on that of a request that was turned away.
    `why` comes with the first token, as of then, and with an end that the engine knows of.

    With a parser, `events` says all that there is to say, `text` only the content of the answer (that of its `Text`
    events); stop strings are matched in the content alone. `reasoning_tokens` counts from the start, and
    `parse_failures`, calls that turned out to be malformed, comes with the last chunk.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Description of an engine, fixed once it is up.

    `facts`: what building its runner found; their `startup_s` has the whole start as `engine`. `kv_cache`: format of K
    and V. `seed`: seeds the requests that name none. `prefix_caching`: prompts share cached prefixes. `ranks`:
    processes that share the model.
    """

    model: str
    facts: RunnerFacts
    block_size: int
    max_num_seqs: int
    kv_cache: str
    policy: PolicyTraits
    seed: int = 0
    prefix_caching: bool = True
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """`alive`: the engine runs. `heartbeat_age_s`: seconds since its loop last made a turn. `final`: it does not run
    and nobody starts it again.

    Of several engines: `alive` if one of them runs, with the age of the liveliest, `final` if all are.
    """

    alive: bool
    heartbeat_age_s: float
    error: str | None = None
    final: bool = False


class EngineState(StrEnum):
    """`QUIET`: its loop has not made a turn for too long; it gets no requests until it does. `DRAINING`: it ends what
    it has and takes no more.
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
    """Of the port of an engine that others reach from other hosts. `clients`: processes that follow it just now;
    `refused`: connections that were not let in, ever.
    """

    clients: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """How one of the engines behind an `Engine` does. `engine`: its number.

    `restarts`: how often it was started again, as far as the reporter knows, `deaths` of these because it had ended or
    hung. `stats` go on counting over restarts as far as the reporter has seen them. `info`: of the newest start.
    `port_stats`: None: no other host reaches it. `promise`: its newest, as a router is told; None: there is none.
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
    """The way of one request between several engines, as of now. `engine`: where it is, or was last; `reason`: what
    spoke for it, that of the router's `Placement`. `retries`: engines that refused it before another took it;
    `placed_again`, `resumes`: how often it left one without and with tokens, as that had died, was quiet or drained.
    """

    engine: int
    reason: str
    retries: int = 0
    placed_again: int = 0
    resumes: int = 0


class RoutingObserver(Protocol):
    """Is told of requests on their way to one of several engines. `cause`: why they leave one: `death`, `quiet`,
    `drain`. No method may raise.
    """

    def placed(self, engine: int, reason: str) -> None:
        """A new request goes there; `reason` is that of the router's `Placement`."""
        ...

    def retried(self, engine: int) -> None:
        """It refused a request, which goes to another that still can keep what was promised."""
        ...

    def placed_again(self, engine: int, cause: str) -> None:
        """A request without a token so far leaves it for another."""
        ...

    def resumed(self, engine: int, cause: str) -> None:
        """A request that has tokens leaves it, and goes on with another."""
        ...

    def breaker(self, engine: int, open: bool) -> None:
        """It gets no requests from here for a while, as it failed, or it does again."""
        ...

    def engine_added(self, engine: int) -> None:
        """There is an engine of this number, which no other has had. Told of those first that are there already."""
        ...

    def engine_removed(self, engine: int) -> None:
        """It is gone for good."""
        ...


class StepRecord(NamedTuple):
    """One engine step: the tokens it computed, its wall time in seconds as the runner saw it, and the time that the
    scheduling policy's cost model predicted (0 = it predicts none). `mask_s`: seconds that the masks of constrained
    outputs took the host (0 = there were none). `ended_s`: when it was done, on the monotonic clock of the machine.
    `rows`: sequences that it computed, `prompt_tokens`: how many of the tokens were prompts'. `budget_s`: how long it
    could take before the most urgent request was late, by what the policy knew when it planned it; None: none was
    urgent, or the policy goes by no such thing.
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
    """Takes what an engine says of one request, called from the event loop as it arrives.

    After a chunk with a `finish_reason` for each sample, or after `fail`, there are no more calls; after `cancel`
    there is at most a `fail`. Neither method may raise.
    """

    def put(self, chunk: SequenceChunk) -> None: ...

    def fail(self, error: RoseinferError) -> None:
        """`EngineDeadError` when the engine died, `EngineUnavailableError` if nothing had come of the request by then
        and others will be there, `RequestFailedError` when this request alone failed, `EngineClosedError` when it was
        cancelled or the engine closed, else the `InvalidRequestError` of a request that the engine refused.
        """
        ...


class Submission(Protocol):
    @property
    def route(self) -> Route | None:
        """The same object as long as the request lives, which tells how things are; None: there is one engine."""
        ...

    def cancel(self) -> None:
        """Abort all samples; safe to call at any time and more than once."""
        ...


class RequestStream(Submission, Protocol):
    """Iterate to the end, or `cancel()`: either way nothing of the request stays in the engine.

    Iteration raises the errors that `Sink.fail` would be given.
    """

    def __aiter__(self) -> AsyncIterator[SequenceChunk]: ...


class Engine(Protocol):
    """An engine as the server and the benchmarks use it (same event loop, one instance per server).

    `several`: whether requests are placed: there are several engines behind it, or there may come to be.
    """

    info: EngineInfo

    @property
    def several(self) -> bool: ...

    def submit(self, request: GenerateRequest, sink: Sink) -> Submission:
        """Start a request; returns at once. No model work happens here.

        Raises `RequestTooLongError` if it could never run, `InvalidRequestError` (bad token id, duplicate live
        request_id), `TooManyInflightError`, `EngineClosedError`, `EngineDeadError`, `EngineUnavailableError`.
        """
        ...

    def generate(self, request: GenerateRequest) -> RequestStream:
        """Like `submit`, for a reader that takes the chunks at its own pace: those it has not read are merged."""
        ...

    def health(self) -> EngineHealth: ...

    def stats(self) -> SchedulerStats:
        """The newest snapshot received from the engine."""
        ...

    def reports(self) -> list[EngineReport]:
        """One for each engine there is, in the order of their numbers."""
        ...

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """Have `listener` called for every step, in order, within half a second. Who shares an engine that somebody
        else owns is told of none.
        """
        ...

    def on_routing(self, observer: RoutingObserver) -> None:
        """Have `observer` told what becomes of requests between engines. An engine alone has nothing to tell."""
        ...

    async def close(self) -> None:
        """End every open stream with `EngineClosedError`, stop the engine and wait for it."""
        ...
