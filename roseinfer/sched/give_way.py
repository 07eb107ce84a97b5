"""Decoding rows give way to a queue of prompts, while nobody has objectives: first tokens come sooner in a burst.

All work of a burst has to be done sooner or later. Each step that leaves decoding rows out brings the first token of
everybody in the queue forward by what they would have taken. How much that is says the cost model, and so it also says
how long they wait: until they take no more than a share of the time.
"""

from collections.abc import Iterable, Sequence

from roseinfer.core.request import Request
from roseinfer.sched.cost import CostModel
from roseinfer.sched.policy import View
from roseinfer.sched.prefill import PrefillBudget, PrefillOptions
from roseinfer.sched.rotation import Rotation, decodes


class GiveWay(Rotation):
    """A rotation in which decoding rows get at most a `share` of the time while more prompts wait than a step holds.

    They compute in one step, and then sit out until prompts have taken (1 - share) / share times what such a step takes
    for them. So two tokens are 1 / share times that apart, or as far as two full steps are, whichever is more. Rows
    that are cheap beside a full step of prompts never wait.
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
        if wanted < view.token_budget:
            return None
        p = self._cost.params
        rows_s = p.row_s * len(decoding) + p.context_s * sum(len(request.tokens) for request in decoding)
        prompts_s = self._prompts_s + p.step_s + p.token_s * wanted
        if rows_s <= self._share * (rows_s + prompts_s):
            return None
        self._prompts_s = prompts_s
        return filling
