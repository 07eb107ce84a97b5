"""What the engine says of a request after a step, and how requests end."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.slo import Rejection
from roseinfer.core.why import Why


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"  # before its first token: its objectives are out of reach
    TIMEOUT = "timeout"  # its time to live is over


COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # the model, or the request itself, ended the output


class RequestTimes(NamedTuple):
    """Seconds on the monotonic clock of whoever has them, which is not that of an engine elsewhere; 0.0 = never
    happened.
    """

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float


class Started(NamedTuple):
    """Comes with the first token. `cached_tokens`: prompt tokens found in the prefix cache. `why`: as of then."""

    cached_tokens: int
    arrival_s: float
    scheduled_s: float
    first_token_s: float
    why: Why | None = None


class End(NamedTuple):
    """How a request ended. `stop_token` is the token id that ended it, if one did; it is the last of the output.

    `rejection` says why, if the reason is `REJECTED`. `why`: what it waited for, and how it ran.
    """

    reason: FinishReason
    times: RequestTimes
    stop_token: int | None = None
    error: str | None = None
    preemptions: int = 0
    rejection: Rejection | None = None
    why: Why | None = None


class RequestOutput(NamedTuple):
    """New tokens of one request, or its end, or both. `started` is set in the first output that holds a token.

    A step adds one token to most requests, several where drafts were right. `logprobs` has an entry for each of them if
    the request wants any.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    started: Started | None = None
    end: End | None = None


OutputFields = tuple[
    str,
    tuple[int, ...],
    tuple[TokenLogprobs, ...] | None,
    tuple[TokenLogprobs, ...] | None,
    Started | None,
    End | None,
]
# An output from all of its fields, without the named tuple's own __new__, which would double its cost: one is made for
# each running request and step. Its length is not looked at until a client decodes it, hence the count in the tests.
new_output: Callable[[OutputFields], RequestOutput] = partial(tuple.__new__, RequestOutput)


class PolicyStats(NamedTuple):
    """What a policy with objectives goes by, as of its newest plan. None: it has no such figure, or not now.

    `utilisation` (U): share of the machine's time that the objectives of those that decode ask for (the constant cost
    of steps at the pace of the tightest included), and prompts at their late rate; 1 = full. `speed` (rho): what steps
    take now over what the fitted cost model says without this correction; above 1 = slower. `margin`: share by which
    TPOT deadlines are brought forward. `step_budget_s` (tau): seconds that the most urgent request leaves a step; None
    if nobody is owed a token. `virtual_batch_size`: rows of a mean step in which every TPOT objective is just met.
    `demoted`: requests that are served last because their objective is lost. `predicted_step_s`: what the cost model
    said that the newest completed step would take, before it learnt from it; 0 = none.
    """

    utilisation: float | None = None
    speed: float | None = None
    margin: float | None = None
    step_budget_s: float | None = None
    virtual_batch_size: float | None = None
    demoted: int | None = None
    predicted_step_s: float = 0.0


class GuideStats(NamedTuple):
    """What constrains outputs, as of the newest step. Counters only grow, but for the last three.

    `compiled`, `cached`, `refused`: grammars that were compiled for a request, were there already, could not be used.
    `rows` were sampled for requests with a constraint, `dormant_rows` of them under none, as nothing constrains them
    yet. `too_slow`: requests ended because of the time that their constraint took. `grammars`: compiled ones that are
    kept. `waiting`: requests whose grammars are being compiled. `mask_s`: seconds that masks took the host in the
    engine's newest turn.
    """

    compiled: int = 0
    cached: int = 0
    refused: int = 0
    rows: int = 0
    dormant_rows: int = 0
    too_slow: int = 0
    grammars: int = 0
    waiting: int = 0
    mask_s: float = 0.0


class OffloadStats(NamedTuple):
    """K/V in host memory, as of the newest step. Counters only grow, but for the first three.

    `queries`: tokens of requests that started or were to be loaded, behind what the KV cache held of them; `hits`:
    those of them that were loaded. `loaded`, `stored`: blocks; `loads_s`, `stores_s`: seconds that these took.
    `waiting`: requests that wait for their load, or to start behind it.
    """

    blocks_used: int = 0
    blocks_total: int = 0
    waiting: int = 0
    queries: int = 0
    hits: int = 0
    loaded: int = 0
    stored: int = 0
    loads_s: float = 0.0
    stores_s: float = 0.0


class SchedulerStats(NamedTuple):
    """A snapshot after a step. Counters only grow.

    `step` steps were planned, `steps_done` of them are completed; `step_tokens`, `step_rows` and `step_duration_s` are
    those of the newest completed one. `policy`: None for policies without figures. `policy_stalls`: how often the
    policy let nobody do anything and the scheduler went on without it. `policy_faults`: answers of the policy that were
    ignored because they made no sense. `integrity_errors`: audits of the idle engine that found seats, queues or blocks
    to disagree. `guides`: None while nobody has asked for a constraint. `offload`: None without K/V in host memory.
    `requests`: how many have come.
    """

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
    steps_done: int = 0
    policy: PolicyStats | None = None
    policy_stalls: int = 0
    policy_faults: int = 0
    integrity_errors: int = 0
    guides: GuideStats | None = None
    step_rows: int = 0
    offload: OffloadStats | None = None
    requests: int = 0


_COUNTERS = (
    "step",
    "prefix_queries",
    "prefix_hits",
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "steps_done",
    "policy_stalls",
    "policy_faults",
    "integrity_errors",
    "requests",
)
_SUMMED = (
    *_COUNTERS,
    "running",
    "waiting",
    "blocks_used",
    "blocks_total",
    "step_tokens",
    "step_rows",
    "step_duration_s",
)
_GUIDE_COUNTERS = ("compiled", "cached", "refused", "rows", "dormant_rows", "too_slow")
_OFFLOAD_COUNTERS = ("queries", "hits", "loaded", "stored", "loads_s", "stores_s")


def added(parts: Sequence[SchedulerStats]) -> SchedulerStats:
    """The sum over several engines, without what says nothing as a sum: figures of policies."""
    if len(parts) == 1:
        return parts[0]
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    guides = [part.guides for part in parts if part.guides is not None]
    offloads = [part.offload for part in parts if part.offload is not None]
    return SchedulerStats(
        **sums,
        guides=GuideStats(*map(sum, zip(*guides, strict=True))) if guides else None,
        offload=OffloadStats(*map(sum, zip(*offloads, strict=True))) if offloads else None,
    )


def continued(before: SchedulerStats, now: SchedulerStats) -> SchedulerStats:
    """`now`, of an engine that was started again, with what it had counted by `before`: counters never go back."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    guides = _continued_guides(before.guides, now.guides)
    return now._replace(**sums, guides=guides, offload=_continued_offload(before.offload, now.offload))


def _continued_offload(before: OffloadStats | None, now: OffloadStats | None) -> OffloadStats | None:
    if before is None:
        return now
    now = now or OffloadStats()
    return now._replace(**{name: getattr(before, name) + getattr(now, name) for name in _OFFLOAD_COUNTERS})


def _continued_guides(before: GuideStats | None, now: GuideStats | None) -> GuideStats | None:
    if before is None:
        return now
    now = now or GuideStats()
    return now._replace(**{name: getattr(before, name) + getattr(now, name) for name in _GUIDE_COUNTERS})
