"""What a scheduling policy is: a small object that decides; the scheduler does the work.

Each step the scheduler calls `policy.begin(view)` and asks the decision it gets, in this order: `select` which running
requests compute, `chunk` how many tokens of a prompt, `victim` who yields when KV blocks run out, then `order` and
`admit` who of the waiting starts.
"""

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from roseinfer.core.events import Event
from roseinfer.core.outputs import PolicyStats
from roseinfer.core.request import Request
from roseinfer.core.slo import Rejection


class Verdict(Enum):
    ADMIT = "admit"
    SKIP = "skip"  # not this one now; look at the next
    STOP = "stop"  # nobody else this step


class View(NamedTuple):
    """The scheduler's state at the start of a step, to read only.

    `free_blocks`: KV blocks that new requests may take. `uncached(request)`: how many tokens a waiting request would
    compute until it has its next one. `can_start(request)`: whether a waiting request could start; a policy must not
    bet on one that submitted steps still name, or on a fork whose parent computes the prompt.
    """

    now_s: float
    step: int
    free_seats: int
    free_blocks: int
    block_size: int
    token_budget: int
    max_model_len: int
    running: Collection[Request]
    waiting: Collection[Request]
    uncached: Callable[[Request], int]
    can_start: Callable[[Request], bool]


def rejectable(request: Request) -> bool:
    """Whether a waiting request may be turned away: it never ran, and does not share the prompt of one that did."""
    return request.preemptions == 0 and request.fork_of is None and request.num_outputs == 0


class Decision(Protocol):
    """A policy's answers for one step."""

    def select(self, running: Collection[Request]) -> Iterable[Request]:
        """The running requests that may compute this step, the most important first."""
        ...

    def chunk(self, request: Request, room: int) -> int:
        """How many of the next `room` (>= 1) prompt tokens to compute; 0 = none this step."""
        ...

    def victim(self, running: Collection[Request]) -> Request | None:
        """Who gives up its KV blocks; None = nobody, the one that lacks blocks waits."""
        ...

    def order(self, waiting: Iterable[Request]) -> Iterable[Request]:
        """The waiting requests that could start, in the order in which to look at them."""
        ...

    def admit(self, request: Request) -> Verdict | Rejection:
        """Whether it starts now. A `Rejection` ends it: only for one of which no token was computed (`rejectable`)."""
        ...


class Policy(Protocol):
    def begin(self, view: View) -> Decision: ...

    def observe(self, event: Event) -> None: ...


@runtime_checkable
class Reporting(Protocol):
    """A policy that has figures to show."""

    def stats(self) -> PolicyStats:
        """Called after every step: it reads what the step has computed anyway."""
        ...
