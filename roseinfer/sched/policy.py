"""Policy: the interface of scheduling policies. A policy decides, and the scheduler does the work.

In each step the scheduler calls `policy.begin(view)` and asks the returned decision in this order (* = optional, see
the protocols below):

1. `rejections`: which waiting requests to reject.
2. `token_budget`*: how many tokens the step may have.
3. `preemptions`*: which running requests to preempt.
4. `select`: which running requests compute. `chunk`: how many tokens of a prompt. `victim`: which running request to
   preempt when KV blocks run out.
5. Unless a request was preempted: `order` and `admit`, which waiting requests start. `chunk`: their first tokens.
6. `wait_causes`* and `default_cause`*: what the waiting requests wait for.
7. `draft_room`*, if drafts are verified: what they may take of the step.

A policy may be unfair or slow, but it cannot stop the engine. The scheduler plans without it in three cases:

* The policy schedules nothing, nothing is in flight and no request runs: the first request that could start does.
* The policy schedules nothing and nothing is in flight for `MAX_IDLE_TURNS` turns: all running requests continue.
* Requests preempt each other and none gets a token (`sched/liveness.py`): `preemptions` is not asked and no request
  starts. All running requests continue, the oldest first, and the youngest are preempted, until one gets a token.

Each case counts in `policy_stalls`.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from functools import cache
from math import inf
from typing import NamedTuple, Protocol, runtime_checkable

from roseinfer.core.outputs import FinishReason, PolicyStats
from roseinfer.core.plan import StepPlan
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast, Rejection


# --- events: what `Policy.observe` receives, after the fact ---------------------------------------------------------
class Queued(NamedTuple):
    """A request joined the queue: it is new, or was preempted."""

    request: Request


class Admitted(NamedTuple):
    request_id: str
    now_s: float
    cached_tokens: int


class StepDone(NamedTuple):
    """A step was committed.

    `duration_s` includes the host's work unless another step hid it, and excludes copies from and to host memory that
    ran before the rows. It is 0 if the copies took as long as the rows, because it says nothing about the rows then.
    """

    plan: StepPlan
    now_s: float
    duration_s: float


class Ended(NamedTuple):
    request_id: str
    now_s: float
    reason: FinishReason
    num_outputs: int


Event = Queued | Admitted | StepDone | Ended


# --- decisions --------------------------------------------------------------------------------------------------
class Verdict(Enum):
    ADMIT = "admit"
    SKIP = "skip"  # not this request now, but try the next one
    STOP = "stop"  # no further request in this step


class RejectedRequest(NamedTuple):
    """A waiting request to reject, together with the waiting samples of the same request."""

    request: Request
    rejection: Rejection


def no_load_s(request: Request) -> float:
    """Return 0: without host memory nothing is loaded."""
    return 0.0


class WindowView(NamedTuple):
    """Window group at the start of a step: tokens of its window, and KV blocks that new requests may take."""

    window: int
    free_blocks: int


class View(NamedTuple):
    """Scheduler's state at the start of a step. Its lists are snapshots: no decision changes them.

    `free_seats`: seats that requests may take, each with a slot for its recurrent state if the model has one.
    `free_blocks`: KV blocks that new requests may take. `num_waiting`: all waiting requests. `waiting()`: those that
    could start, in the order of the queue, listed once a step on demand. A request cannot start while submitted steps
    name it. The samples of one request form one entry, of which `waiting` shows only the lead: sample 0, later the
    first of its siblings. `can_start(request)`: True if it is in `waiting()`. `members(lead)`: the lead, then the
    samples that could start with it. `uncached(request)`: tokens that a waiting request would compute before its next
    output token. `load_s(request)`: seconds until what it needs is loaded: its LoRA adapter, for which it cannot start,
    and its prefix from host memory; 0 if nothing is. `seat_cause`: cause of a wait for one of `free_seats`. `windows`:
    the window groups, where a request holds no more than its window. `sitting_out`: running requests that do not
    compute in this step, whatever the policy selects, because another LoRA adapter is in their slot.
    """

    now_s: float
    step: int
    free_seats: int
    free_blocks: int
    block_size: int
    token_budget: int
    max_model_len: int
    running: Sequence[Request]
    num_waiting: int
    waiting: Callable[[], Sequence[Request]]
    members: Callable[[Request], Sequence[Request]]
    uncached: Callable[[Request], int]
    can_start: Callable[[Request], bool]
    load_s: Callable[[Request], float] = no_load_s
    seat_cause: Cause = Cause.SEATS
    windows: tuple[WindowView, ...] = ()
    sitting_out: Collection[Request] = ()


def rejectable(request: Request) -> bool:
    """True if a waiting request may be rejected: it never ran, and shares no prompt with a request that did."""
    return not request.has_run and request.fork_of is None and request.num_outputs == 0


class Decision(Protocol):
    """A policy's answers for one step.

    Invalid answers (a request that is unknown, has ended or is named twice) are ignored and counted as `policy_faults`.
    """

    def rejections(self) -> Iterable[RejectedRequest]:
        """Return the waiting requests to reject; each must be `rejectable`."""
        ...

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        """Return the running requests that may compute in this step, the most important first."""
        ...

    def chunk(self, request: Request, room: int) -> int:
        """Return how many of the next `room` (>= 1) prompt tokens to compute; 0 = none in this step."""
        ...

    def victim(self, running: Sequence[Request]) -> Request | None:
        """Return the request to preempt; with None the request that lacks blocks waits instead."""
        ...

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Return some of `View.waiting()`, in the order in which to try them."""
        ...

    def admit(self, request: Request) -> Verdict:
        """Decide whether a request starts now.

        Asked for each request that `order` names. After its start it is asked for the samples that could start with
        it, until one does not start.
        """
        ...


@cache
def implements(kind: type[Decision], protocol: type) -> bool:
    """True if decisions of this type implement one of the protocols below. Cached: the check takes microseconds."""
    return issubclass(kind, protocol)


@runtime_checkable
class Budgeting(Protocol):
    """A decision that sets the token budget of the step."""

    def token_budget(self) -> int:
        """Return the tokens of all rows together; `StepLimits` bounds it."""
        ...


@runtime_checkable
class Preempting(Protocol):
    """A decision that preempts running requests in favour of waiting ones."""

    def preemptions(self) -> Iterable[Request]:
        """Return running requests to preempt before anything is planned; `select` must not name them.

        No request starts in a step with a preemption.
        """
        ...


@runtime_checkable
class Explaining(Protocol):
    """A decision that names what the requests that it does not start wait for.

    For other decisions the scheduler reports what it sees: that seats, blocks or prompt tokens have run out.
    """

    def wait_causes(self) -> Iterable[tuple[Request, Cause]]:
        """Return waiting requests whose cause has changed, each with its new cause.

        Asked after admission, in each step with waiting requests. A request keeps the cause that was last named; one
        that was never named waits for `default_cause`. The cause of sample 0 holds for the samples that wait for it.
        Causes of requests that do not wait, or wait for the prompt of their sample 0, are ignored.
        """
        ...

    def default_cause(self) -> Cause:
        """Return the cause of all requests that were never named: in most policies, what the first of them lacks.

        Not asked in a step with a preemption, or if a request that the policy admitted could not start: all wait for
        that then.
        """
        ...


class DraftRoom(NamedTuple):
    """Limits on the drafts of a step.

    `seconds`: by which they may lengthen it. `first`: ids of requests that need several tokens per step to meet their
    objectives, or are late, so that they get drafts before others. `planned`: the policy counts on drafts.
    """

    seconds: float = inf
    first: Collection[str] = ()
    planned: bool = False


NO_LIMITS = DraftRoom()


@runtime_checkable
class LimitingDrafts(Protocol):
    """A decision that limits drafts."""

    def draft_room(self) -> DraftRoom: ...


class FallbackDecision:
    """Decision without a policy: all requests continue and start in order while there is room.

    The youngest running request is preempted first.
    """

    def rejections(self) -> Iterable[RejectedRequest]:
        return ()

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        return running

    def chunk(self, request: Request, room: int) -> int:
        return room

    def victim(self, running: Sequence[Request]) -> Request | None:
        return running[-1] if running else None

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        return waiting

    def admit(self, request: Request) -> Verdict:
        return Verdict.ADMIT


class Policy(Protocol):
    def begin(self, view: View) -> Decision: ...

    def observe(self, event: Event) -> None: ...


@runtime_checkable
class Reporting(Protocol):
    """A policy that reports figures."""

    def stats(self) -> PolicyStats:
        """Return the policy's figures. Called after every step, so it must be cheap."""
        ...


@runtime_checkable
class Forecasting(Protocol):
    """A policy that predicts first token and pace of a request."""

    def forecast(self, request: Request) -> Forecast:
        """Return what the policy predicted when it first considered the request, if it has.

        Asked once, before the policy is notified that the request starts or ends without a start.
        """
        ...


@runtime_checkable
class Promising(Protocol):
    """A policy that knows which objectives the engine could still meet."""

    def promise(self, counts: Promise, block_size: int, uncached: Callable[[Request], int]) -> Promise:
        """Return `counts` completed with what the policy knows. `block_size`, `uncached`: as in `View`.

        Called after each plan while the step runs, so it must be cheap.
        """
        ...
