"""Rotation: which running requests compute in a step, and how decoding requests and prompts share it."""

from collections.abc import Iterable, Sequence
from math import inf

from roseinfer.core.request import Request
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.policy import View
from roseinfer.sched.prefill import PrefillBudget, PrefillOptions


class DecodeRotation:
    """Rotation of decoding requests: at most `max_batch_size` in one step, those that waited longest first.

    Without `decode_first` prompts get a step's tokens before decoding requests do. One request still decodes, so that
    requests which hold KV blocks always end.
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


MAX_GAP_S = 0.25  # between two tokens of a row that waits for prompts, whatever its share


class BurstRotation(DecodeRotation):
    """Rotation for bursts: decoding rows get at most a `share` of the time while more prompts wait than a step holds.

    So first tokens come earlier. Each step without decoding rows brings all first tokens of the queue forward by the
    time that these rows would have taken, which the cost model predicts.

    Decoding rows compute in one step, and then wait until prompts have taken (1 - share) / share times the rows' own
    time. So two tokens are 1 / share times that time apart, or two full steps if that is more, but at most `MAX_GAP_S`.
    Rows that are cheap compared with a full step of prompts never wait.
    """

    def __init__(self, options: PrefillOptions, cost: CostModel, share: float) -> None:
        super().__init__(options)
        self._cost = cost
        self._share = share
        self._prompts_s = 0.0  # predicted time of the steps since the rows last computed

    def select(self, running: Sequence[Request], view: View, budget: PrefillBudget) -> Iterable[Request]:
        if self._share < 1 and view.num_waiting and not budget.closed:
            prompts = self._prompts_only(running, view, budget)
            if prompts is not None:
                return prompts
        self._prompts_s = 0.0
        return super().select(running, view, budget)

    def _prompts_only(self, running: Sequence[Request], view: View, budget: PrefillBudget) -> list[Request] | None:
        """Return the running requests with unfinished prompts if the step is for prompts alone, else None."""
        decoding = [request for request in running if decodes(request)]
        filling = [request for request in running if request.remaining and not decodes(request)]
        wanted = budget.expected(sum(request.remaining for request in filling))
        if wanted < view.token_budget or _lacks_blocks(running, view):
            return None
        p = self._cost.params
        rows_s = p.decode_s([len(request.tokens) for request in decoding])
        fixed_s = p.step_s + p.experts_s(inf)
        prompts_s = self._prompts_s + fixed_s + wanted * prompt_token_s(self._cost, filling, view)
        if rows_s <= self._share * (rows_s + prompts_s) or prompts_s > MAX_GAP_S:
            return None
        self._prompts_s = prompts_s
        return filling


def prompt_token_s(cost: CostModel, filling: Sequence[Request], view: View) -> float:
    """Return the seconds per prompt token in a step full of prompts, estimated from the next prompt.

    `filling`: running requests with unfinished prompts; if there are none, a waiting request can start.
    """
    request = filling[0] if filling else view.waiting()[0]
    left = request.remaining if filling else view.uncached(request)
    return cost.params.prefill_s(len(request.tokens) - left, left, inf) / left


def _lacks_blocks(running: Sequence[Request], view: View) -> bool:
    """True if a step of prompts could take the blocks that running requests need.

    Started prompts would then preempt each other, and new ones would take the blocks of a row's next token.
    """
    missing = (len(request.tokens) + request.pending - request.capacity for request in running)
    needed = sum(-(-tokens // view.block_size) for tokens in missing if tokens > 0)
    # Each prompt that starts needs one more block for its last, partly filled one.
    taken = view.token_budget // view.block_size + view.free_seats
    return needed > 0 and needed + taken > view.free_blocks


def decodes(request: Request) -> bool:
    """True if the next row of the request is one token after its prompt."""
    return request.remaining == 1 and request.planned >= request.prompt_len
