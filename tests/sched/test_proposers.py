"""Proposers without weights: what they guess, where their guesses stem from, and what they keep."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.drafting.proposers.ngram import NgramProposer
from roseinfer.sched.drafting.proposers.own_tokens import MAX_CATCH_UP_TOKENS, OwnTokens
from roseinfer.sched.drafting.proposers.places import MAX_PLACES_COUNT, NgramPlaces
from tests.helpers.cases import examples

TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=80)


def request(tokens: Sequence[int], name: str = "a:0", salt: str = "", prompt_len: int | None = None) -> Request:
    """Return a request whose known tokens are these; the first `prompt_len` are its prompt, by default all."""
    count = len(tokens) if prompt_len is None else prompt_len
    made = Request(name, Prompt(list(tokens[:count]), SequenceParams(max_tokens=100), RequestMeta(cache_salt=salt)))
    made.tokens += tokens[count:]
    return made


def ngram(min_match: int = 2, max_match: int = 16) -> NgramProposer:
    return NgramProposer(OwnTokens(), min_match, max_match)


# --- places -----------------------------------------------------------------------------------------------------
@examples(100)
@given(tokens=TOKENS, cuts=st.lists(st.integers(0, 80), max_size=5), order=st.sampled_from((2, 4)))
def test_an_index_that_grew_finds_what_one_from_scratch_finds(tokens: list[int], cuts: list[int], order: int) -> None:
    grown, fresh = NgramPlaces(order), NgramPlaces(order)
    for cut in sorted(cuts):
        grown.extend(tokens[:cut], len(tokens[:cut]))
    grown.extend(tokens, len(tokens))
    fresh.extend(tokens, len(tokens))
    found = fresh.find(tokens, tokens)
    assert grown.find(tokens, tokens) == found
    wanted = tokens[-order:]
    ends = range(len(tokens) - 1, order - 1, -1)
    assert found == [end for end in ends if tokens[end - order : end] == wanted][:MAX_PLACES_COUNT]


# --- n-grams ----------------------------------------------------------------------------------------------------
def test_the_text_continues_as_after_its_longest_match() -> None:
    text = [1, 2, 3, 4, 50, 51, 52, 9, 3, 4, 60, 61, 62, 1, 2, 3, 4]
    found = ngram().propose(request(text), 3)
    assert found is not None and found.token_ids == (50, 51, 52)
    assert found.proposer == "ngram" and found.chances == (0.8, 0.8, 0.8)


def test_the_latest_of_equal_matches_wins() -> None:
    text = [1, 2, 50, 9, 1, 2, 60, 8, 1, 2]
    found = ngram().propose(request(text), 2)
    assert found is not None and found.token_ids == (60, 8) and found.chances == (0.5, 0.65)


@pytest.mark.parametrize(("least", "found"), [(2, True), (3, True), (4, False)])
def test_a_match_may_have_to_be_longer(least: int, found: bool) -> None:
    text = [1, 2, 3, 50, 9, 1, 2, 3]
    assert (ngram(least).propose(request(text), 2) is not None) is found


def test_beyond_the_longest_match_that_counts_the_latest_wins() -> None:
    text = [7, 1, 2, 50, 9, 8, 1, 2, 60, 7, 1, 2]
    for most, token in ((2, 60), (3, 50)):
        found = ngram(2, most).propose(request(text), 1)
        assert found is not None and found.token_ids == (token,)


def test_a_repetition_goes_on() -> None:
    found = ngram().propose(request([5, 1, 2, 3, 1, 2, 3]), 8)
    assert found is not None and found.token_ids == (1, 2, 3, 1, 2, 3, 1, 2)


def test_guesses_follow_those_that_are_made_already() -> None:
    text = [1, 2, 3, 4, 50, 51, 9, 1]
    found = ngram().propose(request(text), 4, after=(2, 3))
    assert found is not None and found.token_ids == (4, 50, 51, 9)
    assert found.chances == (0.65, 0.8, 0.8, 0.8)


def test_a_long_prompt_is_indexed_over_several_calls() -> None:
    text = [1, 2, 3, 4, *range(10, 10 + 2 * MAX_CATCH_UP_TOKENS), 99, 1, 2, 3, 4]
    proposer, asked = ngram(), request(text)
    first = proposer.propose(asked, 1)
    assert first is not None and first.token_ids == (10,)
    asked.tokens += [10, 99, 1]
    for _ in range(3):
        found = proposer.propose(asked, 1)
    assert found is not None and found.token_ids == (2,)


def test_without_a_match_nothing_is_guessed() -> None:
    for text in ([1], [1, 2], [1, 2, 3, 4, 5]):
        assert ngram().propose(request(text), 4) is None


# --- all of them ------------------------------------------------------------------------------------------------
def grow(proposers: Sequence[NgramProposer], name: str, text: list[int]) -> None:
    """Ask for guesses at each length of a text, and check them."""
    asked = request(text[:1], name)
    for end in range(1, len(text) + 1):
        asked.tokens[:] = text[:end]
        for proposer in proposers:
            for after in ((), (3,), (1, 2, 3)):
                found = proposer.propose(asked, 3, after)
                assert found is None or 1 <= len(found.token_ids) <= 3
                assert found is None or set(found.token_ids) <= {*text, *after}
                assert found is None or len(found.chances) == len(found.token_ids)
                assert found is None or all(0 < chance <= 1 for chance in found.chances)


@examples(50)
@given(texts=st.lists(TOKENS, min_size=1, max_size=3))
def test_guesses_are_known_tokens_and_no_more_than_asked_for(texts: list[list[int]]) -> None:
    proposers = [ngram()]
    for number, text in enumerate(texts):
        grow(proposers, f"{number}:0", text)
        for proposer in proposers:
            proposer.ended(request(text, f"{number}:0"))
