"""Which running requests compute in a step: decoding ones in turn, and how they share a step with prompts."""

from collections.abc import Iterable, Sequence
from math import inf

from roseinfer.core.request import Request
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.policy import View
from roseinfer.sched.prefill import PrefillBudget, PrefillOptions


class DecodeRotation:
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


LONGEST_WAIT_S = 0.25  # between two tokens of a row that gives way, whatever the share


class BurstRotation(DecodeRotation):
    """A rotation in which decoding rows get at most a `share` of the time while more prompts wait than a step holds: in
    a burst first tokens come sooner.

    All work of a burst has to be done sooner or later. Each step that leaves decoding rows out brings the first token
    of everybody in the queue forward by what they would have taken, which the cost model says.

    They compute in one step, and then sit out until prompts have taken (1 - share) / share times what such a step takes
    for them. So two tokens are 1 / share times that apart, or as far as two full steps are, whichever is more, but no
    more than `LONGEST_WAIT_S`. Rows that are cheap beside a full step of prompts never wait.
    """

    def __init__(self, options: PrefillOptions, cost: CostModel, share: float) -> None:
        super().__init__(options)
        self._cost = cost
        self._share = share
        self._prompts_s = 0.0  # that steps without the rows took since these computed last, as expected

    def select(self, running: Sequence[Request], view: View, budget: PrefillBudget) -> Iterable[Request]:
        if self._share < 1 and view.num_waiting and not budget.closed:
            prompts = self._instead(running, view, budget)
            if prompts is not None:
                return prompts
        self._prompts_s = 0.0
        return super().select(running, view, budget)

    def _instead(self, running: Sequence[Request], view: View, budget: PrefillBudget) -> list[Request] | None:
        """The running requests that still fill their prompts, if the step is for prompts alone."""
        decoding = [request for request in running if decodes(request)]
        filling = [request for request in running if request.remaining and not decodes(request)]
        wanted = budget.expected(sum(request.remaining for request in filling))
        if wanted < view.token_budget or _lacks_blocks(running, view):
            return None
        p = self._cost.params
        rows_s = p.row_s * len(decoding) + p.context_s * sum(len(request.tokens) for request in decoding)
        fixed_s = p.step_s + p.experts_s(inf)
        prompts_s = self._prompts_s + fixed_s + wanted * prompt_token_s(self._cost, filling, view)
        if rows_s <= self._share * (rows_s + prompts_s) or prompts_s > LONGEST_WAIT_S:
            return None
        self._prompts_s = prompts_s
        return filling


def prompt_token_s(cost: CostModel, filling: Sequence[Request], view: View) -> float:
    """What a token of a prompt takes in a step full of prompts: of the one whose turn it is, which stands for all.

    filling: requests that run and whose prompts are not computed yet; without one, somebody could start.
    """
    request = filling[0] if filling else view.waiting()[0]
    left = request.remaining if filling else view.uncached(request)
    return cost.params.prefill_s(len(request.tokens) - left, left, inf) / left


def _lacks_blocks(running: Sequence[Request], view: View) -> bool:
    """Whether those that run may not all find room beside a step of prompts.

    Prompts that started would take each other's blocks, and new ones those that a row needs for its next token.
    """
    missing = (len(request.tokens) + request.pending - request.capacity for request in running)
    owed = sum(-(-tokens // view.block_size) for tokens in missing if tokens > 0)
    # A prompt that starts takes a block for what is left over of its tokens.
    taken = view.token_budget // view.block_size + view.free_seats
    return owed > 0 and owed + taken > view.free_blocks


def decodes(request: Request) -> bool:
    """Whether its next row is one token behind its prompt."""
    return request.remaining == 1 and request.planned >= request.prompt_len
