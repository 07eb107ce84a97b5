"""Drafts of the runner's head: asked for in a plan, returned with the step's result, proposed for the next plan."""

from typing import NamedTuple

from roseinfer.core.plan import HeadDrafts, Row
from roseinfer.core.request import Request
from roseinfer.sched.drafting.proposer import Proposal

NAME = "eagle3"


class _Made(NamedTuple):
    """Drafts that follow the first `known` tokens of a request."""

    known: int
    drafts: HeadDrafts


class HeadProposer:
    """`Proposer` of what the head has drafted in the last step. `max_drafts`: at most so many for a request."""

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._made: dict[str, _Made] = {}

    def wanted(self, request: Request, row: Row) -> int:
        """Return how many tokens to draft after a planned row, of which at least one token will be output."""
        known = len(request.tokens) + max(1, request.pending)
        # The next row samples a token in any case. Drafts are computed after all of this row's tokens.
        return max(0, min(self._max_drafts, request.max_len - known - 1, request.max_len - row.start - row.count))

    def made(self, request: Request, drafts: HeadDrafts) -> None:
        """Keep drafts that follow the request's tokens."""
        self._made[request.request_id] = _Made(len(request.tokens), drafts)

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        made = self._made.get(request.request_id)
        if made is None or made.known != len(request.tokens):
            return None
        token_ids, chances = made.drafts
        done = len(after)
        if token_ids[:done] != after or len(token_ids) == done:
            return None
        return Proposal(NAME, token_ids[done : done + limit], chances[done : done + limit])

    def ended(self, request: Request) -> None:
        self._made.pop(request.request_id, None)
