"""Guesses of a request's next tokens: where they come from, and which of them a step verifies."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from roseinfer.core.request import Request
from roseinfer.kv.manager import KvManager
from roseinfer.sched.plan_builder import PlanBuilder


class Drafter(Protocol):
    """Proposes tokens that a step may verify beside the one that it computes anyway.

    It can be wrong as often as it likes: the output is what it would be without drafts.
    """

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to `most` (>= 1) guesses of the tokens at positions `request.planned` and following.

        What is known is `request.tokens`. With two steps in flight the token before the first guess may be one that
        nobody has seen yet: then `request.planned` is len(request.tokens) + 1. Token ids must be in the vocabulary.
        """
        ...


def add_drafts(drafter: Drafter, step: PlanBuilder, running: Iterable[Request], kv: KvManager, reserve: int) -> None:
    """Fill with drafts what a planned step has left of its token budget: nobody waits, sits out or yields for them.

    A request with a guide gets none: a guide knows what may follow what was said, not what may follow a draft.
    `reserve`: KV blocks that drafts leave free.
    """
    for request in running:
        if step.tokens_left <= 0:
            return
        # `pending` counts the token that the row samples in any case.
        most = min(step.tokens_left, request.max_len - len(request.tokens) - request.pending)
        if most <= 0 or request.guided or not step.decodes(request):
            continue
        drafts = tuple(drafter.propose(request, most))
        assert len(drafts) <= most, "a drafter proposes no more than it is asked for"
        _verify(step, request, drafts, kv, reserve)


def _verify(step: PlanBuilder, request: Request, drafts: tuple[int, ...], kv: KvManager, reserve: int) -> None:
    """Let the request's row verify as many drafts as fit into its blocks and those that are to spare."""
    growth, upto = None, request.planned + len(drafts)
    if upto > request.capacity:
        if kv.growth_cost(request.request_id, upto) + reserve <= kv.num_free:
            growth = kv.grow(request.request_id, upto)
            request.capacity = kv.capacity(request.request_id)
        drafts = drafts[: max(0, request.capacity - request.planned)]
    if drafts:
        step.verify(request, drafts, growth)
