"""Drafts of a head on the scheduler's side: how many are asked for, which are proposed, when they are stale."""

import logging

import pytest

from roseinfer.core.plan import HeadDrafts, Row
from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.drafting.counts import ProposerCounts
from roseinfer.sched.drafting.head import HeadProposer
from roseinfer.sched.drafting.proposer import Proposal

DRAFTS = HeadDrafts((7, 8, 9), (0.9, 0.5, 0.2))


def request(max_tokens: int = 20) -> Request:
    return Request("a:0", Prompt([1, 2, 3], SequenceParams(max_tokens=max_tokens)))


def test_drafts_follow_the_tokens_that_they_were_made_after() -> None:
    head, made = HeadProposer(5), request()
    assert head.propose(made, 4) is None
    head.made(made, DRAFTS)
    assert head.propose(made, 4) == Proposal("eagle3", *DRAFTS)
    assert head.propose(made, 2) == Proposal("eagle3", (7, 8), (0.9, 0.5))
    assert head.propose(made, 4, after=(7,)) == Proposal("eagle3", (8, 9), (0.5, 0.2))
    assert head.propose(made, 4, after=(8,)) is None and head.propose(made, 4, after=DRAFTS.token_ids) is None
    made.tokens.append(7)
    assert head.propose(made, 4) is None, "they guess the token that is known by now"


def test_drafts_of_ended_requests_are_forgotten() -> None:
    head, made = HeadProposer(5), request()
    head.made(made, DRAFTS)
    head.ended(made)
    assert head.propose(made, 4) is None


@pytest.mark.parametrize(
    ("max_tokens", "start", "count", "drafts", "wanted"),
    [
        (20, 0, 3, (), 5),  # a prompt's last row
        (5, 0, 3, (), 3),  # of 8 tokens, 4 are known after it, and the next row samples one in any case
        (2, 0, 3, (), 0),
        (6, 2, 4, (5, 6, 7), 3),  # its drafts and these are computed within the context
        (1, 0, 3, (), 0),
    ],
)
def test_what_is_asked_for(max_tokens: int, start: int, count: int, drafts: tuple[int, ...], wanted: int) -> None:
    row = Row("a:0", 0, start, count, 1 + len(drafts), True, start, 0, (), drafts)
    assert HeadProposer(5).wanted(request(max_tokens), row) == wanted


@pytest.mark.parametrize(("right", "warned"), [(349, True), (350, False)])
def test_a_head_that_is_seldom_right_is_reported_once(
    right: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    head, counts = HeadProposer(5), ProposerCounts()
    with caplog.at_level(logging.WARNING):
        for number in range(1100):
            counts.add(2, int(number < right))
            head.review(counts)
    assert len(caplog.records) == warned
    assert not warned or "aux=" in caplog.text
