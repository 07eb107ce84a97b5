"""Drafts: guesses of a request's next tokens, and which of them a step verifies."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from roseinfer.core.request import Request
from roseinfer.kv.manager import KvManager
from roseinfer.sched.plan_builder import PlanBuilder


class Drafter(Protocol):
    """Proposes tokens that a step verifies after the one that it computes anyway.

    Wrong drafts cost time only: the output is the same without drafts.
    """

    def propose(self, request: Request, limit: int) -> Sequence[int]:
        """Return up to `limit` (>= 1) guesses of the tokens from position `request.planned` on.

        `request.tokens` are known. With two steps in flight the token before the first guess may be unknown yet; then
        `request.planned` is len(request.tokens) + 1. Token ids must be in the vocabulary.
        """
        ...


def add_drafts(drafter: Drafter, builder: PlanBuilder, running: Iterable[Request], kv: KvManager, reserve: int) -> None:
    """Fill the token budget that a planned step has left with drafts. No request waits or is preempted for them.

    A request with a guide gets no drafts: its guide masks the next token only. `reserve`: KV blocks that drafts leave
    free.
    """
    for request in running:
        if builder.tokens_left <= 0:
            return
        # `pending` counts the token that the row samples in any case.
        limit = min(builder.tokens_left, request.max_len - len(request.tokens) - request.pending)
        if limit <= 0 or request.guided or not builder.decodes(request):
            continue
        drafts = tuple(drafter.propose(request, limit))
        assert len(drafts) <= limit, "a drafter proposes no more than it is asked for"
        _verify(builder, request, drafts, kv, reserve)


def _verify(builder: PlanBuilder, request: Request, drafts: tuple[int, ...], kv: KvManager, reserve: int) -> None:
    """Let the request's row verify as many drafts as fit into its blocks and spare ones."""
    growth, upto = None, request.planned + len(drafts)
    if upto > request.capacity:
        if kv.growth_cost(request.request_id, upto) + reserve <= kv.num_free:
            growth = kv.grow(request.request_id, upto)
            request.capacity = kv.capacity(request.request_id)
        drafts = drafts[: max(0, request.capacity - request.planned)]
    if drafts:
        builder.set_drafts(request, drafts, growth)
