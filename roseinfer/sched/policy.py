"""What a scheduling policy is: a small object that decides; the scheduler does the work.

Each step the scheduler calls `policy.begin(view)` and asks the decision it gets, in this order: `rejections` who is
turned away, `select` which running requests compute, `chunk` how many tokens of a prompt, `victim` who yields when KV
blocks run out, then `order` and `admit` who of the waiting starts.

A policy may be unfair or slow, but it cannot stop the engine. If nothing is in flight and nobody runs, the first of
the queue that could start does, whatever the policy says; if somebody runs, all that run go on once the policy has held
them back for `HELD_BACK_TURNS` turns; and if those that run take each other's blocks without anybody's getting a token,
the oldest goes on until it has one (`sched/liveness.py`). All this is counted as `policy_stalls`.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cache
from typing import NamedTuple, Protocol, runtime_checkable

from roseinfer.core.outputs import PolicyStats
from roseinfer.core.promise import Promise
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause, Forecast, Rejection
from roseinfer.sched.events import Event


class Verdict(Enum):
    ADMIT = "admit"
    SKIP = "skip"  # not this one now; look at the next
    STOP = "stop"  # nobody else this step


class RejectedRequest(NamedTuple):
    """A waiting request that is turned away, with all samples of the same request that wait."""

    request: Request
    rejection: Rejection


def no_load_s(request: Request) -> float:
    """Nothing is loaded for a request."""
    return 0.0


class View(NamedTuple):
    """The scheduler's state at the start of a step. What it hands out are snapshots: no decision changes them.

    `free_blocks`: KV blocks that new requests may take. `num_waiting`: requests that wait, also those that could not
    start. `waiting()`: those that could, in the order of the queue, made once a step when first asked for. A request
    could not start while submitted steps still name it. The samples of one request wait as one entry, of which only
    the lead is shown: sample 0, then the first of those that wait for its prompt. `can_start(request)`: whether it is
    one of those in `waiting()`. `members(lead)`: the lead, then the samples that could start with it.
    `uncached(request)`: how many tokens a waiting request would compute until it has its next one. `load_s(request)`:
    how many seconds go by before it can, while the others come from host memory; 0 if none do.
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


def rejectable(request: Request) -> bool:
    """Whether a waiting request may be turned away: it never ran, and does not share the prompt of one that did."""
    return not request.has_run and request.fork_of is None and request.num_outputs == 0


class Decision(Protocol):
    """A policy's answers for one step. Answers that make no sense (a request that is unknown, has ended or is named
    twice) are ignored and counted as `policy_faults`.
    """

    def rejections(self) -> Iterable[RejectedRequest]:
        """Who of the waiting is turned away, whatever else the step does: only requests that are `rejectable`."""
        ...

    def select(self, running: Sequence[Request]) -> Iterable[Request]:
        """The running requests that may compute this step, the most important first."""
        ...

    def chunk(self, request: Request, room: int) -> int:
        """How many of the next `room` (>= 1) prompt tokens to compute; 0 = none this step."""
        ...

    def victim(self, running: Sequence[Request]) -> Request | None:
        """Who gives up its KV blocks; None = nobody, the one that lacks blocks waits."""
        ...

    def order(self, waiting: Sequence[Request]) -> Iterable[Request]:
        """Some of `View.waiting()`, in the order in which to look at them."""
        ...

    def admit(self, request: Request) -> Verdict:
        """Whether it starts now. Asked for each that `order` names, and after its start for the samples of the same
        request that could start with it, until one does not.
        """
        ...


@cache
def implements(kind: type[Decision], protocol: type) -> bool:
    """Whether decisions of this kind follow one of the protocols below. To look takes microseconds, and a step asks."""
    return issubclass(kind, protocol)


@runtime_checkable
class Budgeting(Protocol):
    """A decision that says how many tokens the step has."""

    def token_budget(self) -> int:
        """Of all rows together. More than `StepLimits` allows is not to be had."""
        ...


@runtime_checkable
class Preempting(Protocol):
    """A decision that makes room for requests that wait."""

    def preemptions(self) -> Iterable[Request]:
        """Running requests that give up their KV blocks and wait again, before anything is planned: none that compute
        in this step. Nobody starts in a step in which somebody yields.
        """
        ...


@runtime_checkable
class Explaining(Protocol):
    """A decision that says by name what those wait for whom it does not start. Of any other the scheduler says what it
    sees itself: that seats, blocks or prompt tokens have run out.
    """

    def wait_causes(self) -> Iterable[tuple[Request, Cause]]:
        """Waiting requests and what each now waits for, asked behind admission in every step in which somebody waits.
        It need name only those of whom it says something new: the others wait for what was last named or, if nothing
        was, for what `line` names. What it says of sample 0 holds for the samples that wait for that; what it says of
        requests that do not wait, or that wait for their sample 0 to compute the prompt, is ignored.
        """
        ...

    def default_cause(self) -> Cause:
        """What those wait for of whom it has said nothing: in most policies, whatever the first of the queue lacks. Not
        asked in a step in which the scheduler has no room for one whom the policy would have started, or in which
        somebody had to yield: the line waits for that.
        """
        ...


class FallbackDecision:
    """The decision of a scheduler without a policy: all go on and start, in order, as far as there is room; the
    youngest yields.
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
    """A policy that has figures to show."""

    def stats(self) -> PolicyStats:
        """Called after every step: it reads what the step has computed anyway."""
        ...


@runtime_checkable
class Forecasting(Protocol):
    """A policy that expects something of a request."""

    def forecast(self, request: Request) -> Forecast:
        """What it expected of a waiting request when it first looked at it, if it has. Asked once, before the policy
        hears that it starts, or that it has ended without a start.
        """
        ...


@runtime_checkable
class Promising(Protocol):
    """A policy that knows what the engine could still promise."""

    def promise(self, counts: Promise, block_size: int, uncached: Callable[[Request], int]) -> Promise:
        """`counts`, and what the policy knows beyond it. Called behind the plan of a step, while that runs: it reads
        what is known anyway. `block_size`, `uncached`: as in `View`.
        """
        ...
