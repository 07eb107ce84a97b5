"""Which running requests compute in a step: decoding ones in turn, and how they share a step with prompts."""

from collections.abc import Iterable, Sequence

from roseinfer.core.request import Request
from roseinfer.sched.policy import View
from roseinfer.sched.prefill import PrefillBudget, PrefillOptions


class Rotation:
    """At most `max_batch_size` requests decode in one step, those that waited longest first.

    Without `decode_first` prompts get a step's tokens before decoding requests do; one request decodes all the same,
    so that those that hold KV blocks always come to an end.
    """

    def __init__(self, options: PrefillOptions) -> None:
        self._max_batch_size = options.max_batch_size
        self._decode_first = options.decode_first
        self._last_turn: dict[str, int] = {}
        self._turns = 0

    def forget(self, request_id: str) -> None:
        self._last_turn.pop(request_id, None)

    def select(self, running: Sequence[Request], view: View, budget: PrefillBudget) -> Iterable[Request]:
        limit = self._max_batch_size
        if self._decode_first and (limit is None or len(running) <= limit):
            return running
        decoding = [request for request in running if decodes(request)]
        prompts = [request for request in running if request.remaining and not decodes(request)]
        if limit is not None and len(decoding) > limit:
            decoding.sort(key=lambda request: self._last_turn.get(request.request_id, -1))
            decoding = decoding[:limit]
        if not self._decode_first:
            wanted = budget.expected(sum(request.remaining for request in prompts))
            decoding = decoding[: max(1, view.token_budget - wanted)]
        if limit is not None:
            self._note_turns(decoding)
        return decoding + prompts

    def _note_turns(self, decoding: list[Request]) -> None:
        for request in decoding:
            self._turns += 1
            self._last_turn[request.request_id] = self._turns


def decodes(request: Request) -> bool:
    """Whether its next row is one token behind its prompt."""
    return request.remaining == 1 and request.planned >= request.prompt_len
