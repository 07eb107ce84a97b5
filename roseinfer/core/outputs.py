"""Output of the engine per request and step, how requests end, and statistics."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import chain, zip_longest
from typing import Annotated, Any, NamedTuple, TypeVar, get_type_hints

from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.slo import Rejection, Why


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"  # before the first token: the objectives are out of reach
    TIMEOUT = "timeout"  # the time to live is over


COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # the model, or the request itself, ended the output


class RequestTimes(NamedTuple):
    """Seconds on the monotonic clock of the process that reports them; 0.0 = has not happened.

    The clock of an engine on another host is a different one.
    """

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float


class FirstToken(NamedTuple):
    """Times and waits of a sample until its first token, sent with that token.

    `cached_tokens`: prompt tokens found in the prefix cache. `why`: state at the first token.
    """

    cached_tokens: int
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    why: Why | None = None


class End(NamedTuple):
    """End of a request. `stop_token`: token id that ended it, if any; it is the last one of the output.

    `rejection` gives the reason if `reason` is `REJECTED`. `why`: what the request waited for, and how it ran.
    `vector`: result of a prompt-only request, float32 in little-endian order.
    """

    reason: FinishReason
    times: RequestTimes
    stop_token: int | None = None
    error: str | None = None
    preemptions: int = 0
    rejection: Rejection | None = None
    why: Why | None = None
    vector: bytes | None = None


class DraftRun(NamedTuple):
    """Consecutive drafts of one row that a proposer guessed. `length`: how many."""

    proposer: str
    length: int


class SequenceOutput(NamedTuple):
    """New tokens of one request, its end, or both. `started` is set in the first output with a token.

    A step adds one token to most requests, and several where drafts were right. `logprobs` has an entry for each token
    if the request asked for any. `drafts`: all drafts that the step verified for the request, in order. All tokens but
    the last one count as right drafts, see `accepted_of`.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    started: FirstToken | None = None
    end: End | None = None
    drafts: tuple[DraftRun, ...] = ()


OutputFields = tuple[
    str,
    tuple[int, ...],
    tuple[TokenLogprobs, ...] | None,
    tuple[TokenLogprobs, ...] | None,
    FirstToken | None,
    End | None,
    tuple[DraftRun, ...],
]
# Make an output from all of its fields. The named tuple's own __new__ would double the cost, and one is made for each
# running request and step. A wrong number of fields fails only when a client decodes it, so a test counts them.
new_output: Callable[[OutputFields], SequenceOutput] = partial(tuple.__new__, SequenceOutput)


class DraftTally(NamedTuple):
    """Drafts that were verified, and those of them that became output."""

    drafted: int = 0
    accepted: int = 0


def accepted_of(drafts: Iterable[DraftRun], kept: int) -> Iterator[tuple[str, DraftTally]]:
    """Yield what became of each run of drafts of a row, `kept` tokens of which are output (at least 1)."""
    right = kept - 1
    for proposer, length in drafts:
        accepted = min(right, length)
        right -= accepted
        yield proposer, DraftTally(length, accepted)


# Roles of figures. A counter only grows, also when its engine is restarted; counters and gauges add up over engines.
Counter = Annotated[int, "counter"]
SecondsCounter = Annotated[float, "counter"]
Gauge = Annotated[int, "gauge"]
SecondsGauge = Annotated[float, "gauge"]


class PolicyStats(NamedTuple):
    """Figures of a policy with objectives, as of its newest plan. None: no such figure at present.

    `utilisation` (U): share of the machine's time that objectives need; 1 = full. It covers decoding requests, with the
    constant cost of steps at the tightest pace, and prompts at their recent rate. `speed` (rho): step times over those
    of the fitted cost model; above 1 = slower. `margin`: share by which TPOT deadlines are brought forward.
    `step_budget_s` (tau): seconds that the most urgent request leaves for a step; None if no token has a deadline.
    `virtual_batch_size`: rows of a mean step that just meets every TPOT objective. `demoted`: requests served last
    because their objective is lost. `predicted_step_s`: duration of the newest completed step as the cost model
    predicted it before learning from it; 0 = none.
    """

    utilisation: float | None = None
    speed: float | None = None
    margin: float | None = None
    step_budget_s: float | None = None
    virtual_batch_size: float | None = None
    demoted: int | None = None
    predicted_step_s: float = 0.0


class GuideStats(NamedTuple):
    """Statistics of output constraints, as of the newest step.

    `compiled`, `cached`, `refused`: grammars compiled for a request, found in the cache, or unusable. `rows`: rows
    sampled for requests with a constraint; `dormant_rows` of them without a mask, as no constraint applied yet.
    `too_slow`: requests ended because their constraint took too much time. `grammars`: compiled grammars in the cache.
    `waiting`: requests whose grammars are being compiled. `mask_s`: seconds that the host spent on masks in the newest
    turn.
    """

    compiled: Counter = 0
    cached: Counter = 0
    refused: Counter = 0
    rows: Counter = 0
    dormant_rows: Counter = 0
    too_slow: Counter = 0
    grammars: Gauge = 0
    waiting: Gauge = 0
    mask_s: SecondsGauge = 0.0


class OffloadStats(NamedTuple):
    """Statistics of K/V in host memory, as of the newest step.

    `queries`: tokens beyond the KV cache's hit of requests that started or were to be loaded. `hits`: those of them
    that were loaded. `loaded`, `stored`: blocks. `loads_s`, `stores_s`: seconds these copies took. `waiting`: requests
    that wait for their load, or for a seat after it.
    """

    blocks_used: Gauge = 0
    blocks_total: Gauge = 0
    waiting: Gauge = 0
    queries: Counter = 0
    hits: Counter = 0
    loaded: Counter = 0
    stored: Counter = 0
    loads_s: SecondsCounter = 0.0
    stores_s: SecondsCounter = 0.0


class StateStats(NamedTuple):
    """Statistics of recurrent states, as of the newest step.

    `slots_used`: slots of sequences that have a seat. `snapshots`: those that a prefix can find. `taken`: snapshots so
    far; `skipped`: those for which no slot was free, or none with a snapshot of less worth. `host_used`, `host_total`:
    slots in host memory; `loaded`, `stored`: snapshots copied from and to them.
    """

    slots_used: Gauge = 0
    slots_total: Gauge = 0
    snapshots: Gauge = 0
    taken: Counter = 0
    skipped: Counter = 0
    host_used: Gauge = 0
    host_total: Gauge = 0
    loaded: Counter = 0
    stored: Counter = 0


class AdapterStats(NamedTuple):
    """Statistics of LoRA adapters, as of the newest step.

    `slots_used`: slots that requests with a seat use. `host_bytes`: size of the adapters in host memory. `waiting`:
    requests that wait for their adapter. `loads`: copies to slots; `evictions`: those that replaced another adapter.
    `reads`: folders read, in `reads_s` seconds; `failures`: those that could not be used.
    """

    slots_used: Gauge = 0
    slots_total: Gauge = 0
    host_bytes: Gauge = 0
    waiting: Gauge = 0
    loads: Counter = 0
    evictions: Counter = 0
    reads: Counter = 0
    failures: Counter = 0
    reads_s: SecondsCounter = 0.0


class DraftStats(NamedTuple):
    """Drafts of one proposer so far. `drafted` and `accepted` count by position in the row; 0 is the first draft.

    `steps`: rows that verified drafts, the first of which is this proposer's. Over all proposers, output tokens of
    these rows = `steps` + the sum of `accepted`.
    """

    proposer: str
    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


class SchedulerStats(NamedTuple):
    """Snapshot after a step.

    `step` steps were planned and `steps_done` of them completed. `step_tokens`, `step_rows` and `step_duration_s`
    describe the newest completed one. `policy`: None for policies without figures. `policy_stalls`: how often the
    policy let no request proceed, so that the scheduler overrode it. `policy_faults`: answers of the policy that were
    ignored as invalid. `integrity_errors`: audits of the idle engine that found inconsistent seats, queues or blocks.
    `guides`: None before the first request with a constraint. `offload`: None without K/V in host memory. `requests`:
    samples received. `drafts`: by proposer; empty before the first one. `states`: None for a model without recurrent
    states. `adapters`: None for an engine without slots for LoRA adapters.
    """

    step: Counter = 0
    running: Gauge = 0
    waiting: Gauge = 0
    blocks_used: Gauge = 0
    blocks_total: Gauge = 0
    prefix_queries: Counter = 0
    prefix_hits: Counter = 0
    preemptions: Counter = 0
    prompt_tokens: Counter = 0
    generation_tokens: Counter = 0
    step_tokens: Gauge = 0
    step_duration_s: SecondsGauge = 0.0
    steps_done: Counter = 0
    policy: PolicyStats | None = None
    policy_stalls: Counter = 0
    policy_faults: Counter = 0
    integrity_errors: Counter = 0
    guides: GuideStats | None = None
    step_rows: Gauge = 0
    offload: OffloadStats | None = None
    requests: Counter = 0
    drafts: tuple[DraftStats, ...] = ()
    states: StateStats | None = None
    adapters: AdapterStats | None = None


def _names(kind: type, *roles: str) -> tuple[str, ...]:
    """Return the fields of a named tuple whose annotation has one of these roles."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if getattr(hint, "__metadata__", ("",))[0] in roles)


# Fields of `SchedulerStats` that hold statistics of their own.
_NESTED = {"guides": GuideStats, "offload": OffloadStats, "states": StateStats, "adapters": AdapterStats}
_COUNTERS = {kind: _names(kind, "counter") for kind in (SchedulerStats, *_NESTED.values())}
_SUMMED = _names(SchedulerStats, "counter", "gauge")


def sum_stats(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """Return the sum over several engines. Fields that are no counters or gauges, such as `policy`, are dropped."""
    if len(parts) == 1:
        return parts[0]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    for name, kind in _NESTED.items():
        found = [nested for part in parts if (nested := getattr(part, name)) is not None]
        sums[name] = kind(*map(sum, zip(*found, strict=True))) if found else None
    return SchedulerStats(**sums, drafts=_sum_drafts(chain.from_iterable(part.drafts for part in parts)))


def carry_counters(before: SchedulerStats, now: SchedulerStats) -> SchedulerStats:
    """Return `now`, of a restarted engine, plus the counters of `before`, so that counters never decrease."""
    changed: dict[str, Any] = {}
    for name, kind in _NESTED.items():
        if (nested := getattr(before, name)) is not None:
            changed[name] = _add_counters(nested, getattr(now, name) or kind())
    if before.drafts:
        changed["drafts"] = _sum_drafts(before.drafts + now.drafts)
    return _add_counters(before, now)._replace(**changed)


def _sum_drafts(parts: Iterable[DraftStats]) -> tuple[DraftStats, ...]:
    """Return the sums by proposer."""
    sums: dict[str, DraftStats] = {}
    for part in parts:
        known = sums.get(part.proposer)
        sums[part.proposer] = part if known is None else _add_drafts(known, part)
    return tuple(sums.values())


def _add_drafts(one: DraftStats, other: DraftStats) -> DraftStats:
    drafted, accepted = (
        tuple(a + b for a, b in zip_longest(*counts, fillvalue=0))
        for counts in ((one.drafted, other.drafted), (one.accepted, other.accepted))
    )
    return DraftStats(one.proposer, one.steps + other.steps, drafted, accepted)


Stats = TypeVar("Stats", SchedulerStats, GuideStats, OffloadStats, StateStats, AdapterStats)


def _add_counters(before: Stats, now: Stats) -> Stats:
    return now._replace(**{name: getattr(before, name) + getattr(now, name) for name in _COUNTERS[type(now)]})
