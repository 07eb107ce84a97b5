"""Drafts of the runner's head on the scheduler's side."""

from math import inf, nan

import pytest

from roseinfer.core.plan import HeadDrafts
from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.drafting.head import HeadProposer


@pytest.mark.parametrize("broken", [nan, inf])
def test_guesses_end_before_a_chance_that_is_not_finite(broken: float) -> None:
    request = Request("a:0", Prompt([1, 2], SequenceParams(max_tokens=9)))
    head = HeadProposer(4)
    head.made(request, HeadDrafts((5, 6, 7), (0.5, broken, 0.5)))
    proposal = head.propose(request, 4)
    assert proposal is not None and (proposal.token_ids, proposal.chances) == ((5,), (0.5,))
    head.made(request, HeadDrafts((5,), (broken,)))
    assert head.propose(request, 4) is None
