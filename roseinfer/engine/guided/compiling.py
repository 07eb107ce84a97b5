"""Requests whose grammars are being compiled. Scheduler and policy do not know them yet, but their deadlines apply."""

from dataclasses import dataclass

from roseinfer.core.outputs import End, FinishReason, RequestTimes, SequenceOutput
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.engine.guided.guide import PendingGuide
from roseinfer.engine.messages import Add
from roseinfer.sched.waits import why_unqueued


@dataclass(frozen=True, slots=True, eq=False)
class CompilingRequest:
    """Request with its sequences that have not ended. `since_s`: when it arrived."""

    new: Add
    requests: list[Request]
    pending: PendingGuide
    since_s: float

    def note_wait(self, request: Request, now_s: float) -> None:
        """Record the wait for the grammar."""
        request.waited = {**request.waited, Cause.GRAMMAR: max(0.0, now_s - self.since_s)}


def take_ready(compiling: list[CompilingRequest], now_s: float) -> list[CompilingRequest]:
    """Remove and return the requests whose guides are ready."""
    ready = [one for one in compiling if one.pending.ready]
    for one in ready:
        compiling.remove(one)
        for request in one.requests:
            one.note_wait(request, now_s)
    return ready


def contains(compiling: list[CompilingRequest], sequence_id: str) -> bool:
    return any(request.request_id == sequence_id for one in compiling for request in one.requests)


def abort(compiling: list[CompilingRequest], sequence_id: str, now_s: float) -> SequenceOutput | None:
    """End a sequence. Return None if it is not one of these."""
    for one in compiling:
        for request in one.requests:
            if request.request_id == sequence_id:
                return _end(compiling, one, request, FinishReason.ABORT, now_s)
    return None


def expire(compiling: list[CompilingRequest], now_s: float) -> list[SequenceOutput]:
    """End the sequences whose deadline has passed."""
    late = [(one, r) for one in compiling for r in one.requests if r.deadline_s is not None and r.deadline_s <= now_s]
    return [_end(compiling, one, request, FinishReason.TIMEOUT, now_s) for one, request in late]


def _end(
    compiling: list[CompilingRequest], one: CompilingRequest, request: Request, reason: FinishReason, now_s: float
) -> SequenceOutput:
    one.requests.remove(request)
    if not one.requests:
        compiling.remove(one)
    one.note_wait(request, now_s)
    times = RequestTimes(request.arrival_s, 0.0, 0.0, now_s)
    return SequenceOutput(request.request_id, end=End(reason, times, why=why_unqueued(request, now_s)))
