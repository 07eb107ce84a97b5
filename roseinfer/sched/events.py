"""Events that a policy observes after the fact."""

from typing import NamedTuple

from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import StepPlan
from roseinfer.core.request import Request


class Queued(NamedTuple):
    """A request waits: it is new, or was preempted."""

    request: Request


class Admitted(NamedTuple):
    request_id: str
    now_s: float
    cached_tokens: int


class StepDone(NamedTuple):
    """`duration_s`: of the step with what the host did around it, unless that was hidden behind another step, and
    without the copies from and to host memory that its rows came behind. 0 if it says nothing of the rows, because
    copies beside them took as long.
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
