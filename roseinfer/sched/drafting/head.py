"""Drafts of the runner's head: asked for in a plan, returned with the step's result, proposed for the next plan."""

import logging
from math import isfinite
from typing import NamedTuple

from roseinfer.core.plan import HeadDrafts, Row
from roseinfer.core.request import Request
from roseinfer.sched.drafting.counts import ProposerCounts
from roseinfer.sched.drafting.proposer import Proposal

log = logging.getLogger(__name__)

EAGLE, MTP = NAMES = ("eagle3", "mtp")
# After so many first drafts, a head of which fewer are right is reported. One that reads the model's states a layer too
# early or too late has 10% right where it should have 45% (vllm-project/vllm#43671).
MIN_REVIEWED_COUNT = 1000
MIN_RIGHT_SHARE = 0.35


class _Made(NamedTuple):
    """Drafts that follow the first `known` tokens of a request."""

    known: int
    drafts: HeadDrafts


class HeadProposer:
    """`Proposer` of what the head has drafted in the last step. `max_drafts`: at most so many for a request.

    `name`: one of `NAMES`.
    """

    def __init__(self, max_drafts: int, name: str = EAGLE) -> None:
        self.name = name
        self._max_drafts = max_drafts
        self._made: dict[str, _Made] = {}
        self._reviewed = False

    def wanted(self, request: Request, row: Row) -> int:
        """Return how many tokens to draft after a planned row, of which at least one token will be output."""
        known = len(request.tokens) + max(1, request.pending)
        # The next row samples a token in any case. Drafts are computed after all of this row's tokens.
        return max(0, min(self._max_drafts, request.max_len - known - 1, request.max_len - row.start - row.count))

    def made(self, request: Request, drafts: HeadDrafts) -> None:
        """Keep drafts that follow the request's tokens, up to the first one whose chance is not finite."""
        count = next((i for i, chance in enumerate(drafts.chances) if not isfinite(chance)), len(drafts.chances))
        kept = HeadDrafts(drafts.token_ids[:count], drafts.chances[:count])
        self._made[request.request_id] = _Made(len(request.tokens), kept)

    def propose(self, request: Request, limit: int, after: tuple[int, ...] = ()) -> Proposal | None:
        made = self._made.get(request.request_id)
        if made is None or made.known != len(request.tokens):
            return None
        token_ids, chances = made.drafts
        done = len(after)
        if token_ids[:done] != after or len(token_ids) == done:
            return None
        return Proposal(self.name, token_ids[done : done + limit], chances[done : done + limit])

    def review(self, counts: ProposerCounts) -> None:
        """Warn once if the head seems to be read wrongly. `counts`: of its drafts so far."""
        if self._reviewed or not counts.drafted or counts.drafted[0] < MIN_REVIEWED_COUNT:
            return
        self._reviewed = True
        share = counts.accepted[0] / counts.drafted[0]
        if share < MIN_RIGHT_SHARE:
            hint = "; if it was trained for this model, its listed layers may have the other meaning (aux=inputs or "
            hint = f"{hint}aux=outputs)" if self.name == EAGLE else ""
            log.warning("only %.0f%% of the draft head's first guesses are right%s", 100 * share, hint)

    def ended(self, request: Request) -> None:
        self._made.pop(request.request_id, None)
