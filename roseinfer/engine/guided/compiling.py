"""Requests whose guides are not ready: neither scheduler nor policy has heard of them, while their time runs."""

from dataclasses import dataclass

from roseinfer.core.outputs import End, FinishReason, RequestOutput, RequestTimes
from roseinfer.core.request import Request
from roseinfer.core.slo import Cause
from roseinfer.engine.guided.guides import PendingGuide
from roseinfer.engine.messages import Add
from roseinfer.sched.waits import why_unqueued


@dataclass(frozen=True, slots=True, eq=False)
class CompilingRequest:
    """A request and those of its sequences that have not ended. `since_s`: when it came."""

    new: Add
    requests: list[Request]
    pending: PendingGuide
    since_s: float

    def note_wait(self, request: Request, now_s: float) -> None:
        """It is held no longer."""
        request.waited = {**request.waited, Cause.GRAMMAR: max(0.0, now_s - self.since_s)}


def take_ready(held: list[CompilingRequest], now_s: float) -> list[CompilingRequest]:
    """Remove those that wait for nothing any more."""
    ready = [one for one in held if one.pending.ready]
    for one in ready:
        held.remove(one)
        for request in one.requests:
            one.note_wait(request, now_s)
    return ready


def holds(held: list[CompilingRequest], sequence_id: str) -> bool:
    return any(request.request_id == sequence_id for one in held for request in one.requests)


def abort(held: list[CompilingRequest], sequence_id: str, now_s: float) -> RequestOutput | None:
    """End a sequence. None: it is not here."""
    for one in held:
        for request in one.requests:
            if request.request_id == sequence_id:
                return _end(held, one, request, FinishReason.ABORT, now_s)
    return None


def expire(held: list[CompilingRequest], now_s: float) -> list[RequestOutput]:
    """End the sequences that have passed their deadline."""
    late = [(one, r) for one in held for r in one.requests if r.deadline_s is not None and r.deadline_s <= now_s]
    return [_end(held, one, request, FinishReason.TIMEOUT, now_s) for one, request in late]


def _end(
    held: list[CompilingRequest], one: CompilingRequest, request: Request, reason: FinishReason, now_s: float
) -> RequestOutput:
    one.requests.remove(request)
    if not one.requests:
        held.remove(one)
    one.note_wait(request, now_s)
    times = RequestTimes(request.arrival_s, 0.0, 0.0, now_s)
    return RequestOutput(request.request_id, end=End(reason, times, why=why_unqueued(request, now_s)))
