"""Proposers without weights: what they guess, where their guesses stem from, and what they keep."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.config.speculation import RecordedValues, SuffixValues
from roseinfer.core.errors import ConfigError
from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.sched.drafting.proposer import Proposer
from roseinfer.sched.drafting.proposers.corpus import Corpus
from roseinfer.sched.drafting.proposers.index_budget import MAX_INDEXED_TOKENS, IndexBudget
from roseinfer.sched.drafting.proposers.ngram import NgramProposer
from roseinfer.sched.drafting.proposers.own_tokens import OwnTokens
from roseinfer.sched.drafting.proposers.places import MAX_PLACES_COUNT, NgramPlaces
from roseinfer.sched.drafting.proposers.prediction import PredictionProposer
from roseinfer.sched.drafting.proposers.recorded import OutputRecorder, RecordedProposer
from roseinfer.sched.drafting.proposers.suffix import SuffixProposer
from tests.helpers.cases import examples

TOKENS = st.lists(st.integers(0, 4), min_size=1, max_size=80)


def request(
    tokens: Sequence[int],
    name: str = "a:0",
    salt: str = "",
    prompt_len: int | None = None,
    prediction: Sequence[int] = (),
) -> Request:
    """Return a request whose known tokens are these; the first `prompt_len` are its prompt, by default all."""
    count = len(tokens) if prompt_len is None else prompt_len
    params, meta = SequenceParams(max_tokens=100), RequestMeta(cache_salt=salt)
    made = Request(name, Prompt(list(tokens[:count]), params, meta, prediction=tuple(prediction)))
    made.tokens += tokens[count:]
    return made


def ngram(min_match: int = 2, max_match: int = 16) -> NgramProposer:
    return NgramProposer(OwnTokens(IndexBudget()), min_match, max_match)


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
    assert found.proposer == "ngram" and found.chances == (0.65, 0.68, 0.72)


def test_the_latest_of_equal_matches_wins() -> None:
    text = [1, 2, 50, 9, 1, 2, 60, 8, 1, 2]
    found = ngram().propose(request(text), 2)
    assert found is not None and found.token_ids == (60, 8) and found.chances == (0.5, 0.55)


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
    assert found.chances == (0.55, 0.65, 0.68, 0.72)


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    text = [1, 2, 3, 4, *range(10, 10 + 2 * MAX_INDEXED_TOKENS), 99, 1, 2, 3, 4]
    budget, asked = IndexBudget(), request(text)
    proposer = NgramProposer(OwnTokens(budget))
    first = proposer.propose(asked, 1)
    assert first is not None and first.token_ids == (10,)
    asked.tokens += [10, 99, 1]
    for _ in range(6):
        budget.begin_step()
        found = proposer.propose(asked, 1)
    assert found is not None and found.token_ids == (2,)


def test_requests_share_the_tokens_that_a_step_indexes() -> None:
    text = [*range(10, 10 + MAX_INDEXED_TOKENS // 4), 1, 2, 3, 4, 5, 1, 2, 3, 4]
    budget, asked = IndexBudget(), [request(text, f"{i}:0") for i in range(8)]
    proposer = NgramProposer(OwnTokens(budget))
    guessed = []
    for _ in range(6):
        budget.begin_step()
        guessed.append(sum(proposer.propose(one, 1) is not None for one in asked))
    assert 1 <= guessed[0] <= 2 and guessed[-1] == len(asked)


def test_long_prompts_leave_new_tokens_of_other_requests_to_be_indexed() -> None:
    budget, chat = IndexBudget(), request([1, 2, 3], "chat:0")
    prompts = [request(range(100, 100 + 8 * MAX_INDEXED_TOKENS), f"{i}:0") for i in range(12)]
    proposer = NgramProposer(OwnTokens(budget))
    for token in (4, 5, 6, 7, 1, 4, 5):
        chat.tokens.append(token)
        budget.begin_step()
        for one in prompts:
            assert proposer.propose(one, 1) is None
        found = proposer.propose(chat, 2)
    assert found is not None and found.token_ids == (6, 7)


def test_without_a_match_nothing_is_guessed() -> None:
    for text in ([1], [1, 2], [1, 2, 3, 4, 5]):
        assert ngram().propose(request(text), 4) is None


# --- suffixes ---------------------------------------------------------------------------------------------------
def suffix(**values: float) -> SuffixProposer:
    return SuffixProposer(OwnTokens(IndexBudget()), SuffixValues(**values))


def test_the_most_frequent_continuation_is_guessed() -> None:
    text = [1, 2, 3, 4, 50, 8, 1, 2, 3, 4, 60, 8, 1, 2, 3, 4, 50, 9, 1, 2, 3, 4]
    found = suffix().propose(request(text), 2)
    assert found is not None and found.proposer == "suffix"
    assert found.token_ids == (50, 9)
    assert found.chances == pytest.approx(((1 + 0.65) / 3, 0.68 / 2))


def test_guesses_end_where_they_are_improbable() -> None:
    branches = [token for last in range(20, 30) for token in (1, 2, 3, 4, last, last + 100)]
    found = suffix(chance=0.5).propose(request([*branches, 1, 2, 3, 4]), 8)
    assert found is None
    found = suffix(chance=0.5).propose(request([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4]), 8)
    assert found is not None and len(found.token_ids) < 5


def test_a_longer_match_allows_more_guesses() -> None:
    text = [1, 2, 50, 51, 52, 53, 9, 1, 2]
    found = suffix(factor=1.0).propose(request(text), 8)
    assert found is not None and found.token_ids == (50, 51)


def test_finished_outputs_help_from_the_first_token_on() -> None:
    proposer = suffix()
    prompt = [7, 7, 1, 2, 3, 4]
    proposer.ended(request([*prompt, 60, 61, 62], "a:0", prompt_len=len(prompt)))
    found = proposer.propose(request([5, 6, 1, 2, 3, 4], "b:0"), 8)
    assert found is not None and found.token_ids == (60, 61, 62)


def test_guesses_do_not_cross_the_end_of_an_output() -> None:
    proposer = suffix()
    for name in ("a:0", "b:0"):
        proposer.ended(request([1, 2, 3, 4, 5], name, prompt_len=3))
    assert proposer.propose(request([9, 2, 3, 4, 5], "c:0"), 8) is None
    found = proposer.propose(request([9, 1, 2, 3, 4], "d:0"), 8)
    assert found is not None and found.token_ids == (5,)


def test_a_request_without_output_teaches_nothing() -> None:
    proposer = suffix()
    proposer.ended(request([1, 2, 3, 4, 5, 6, 7], "a:0"))
    assert proposer.propose(request([9, 1, 2, 3, 4], "b:0"), 8) is None


def test_without_a_corpus_other_requests_do_not_help() -> None:
    proposer = suffix(corpus=0)
    proposer.ended(request([1, 2, 3, 4, 5, 6, 7], "a:0", prompt_len=2))
    assert proposer.propose(request([9, 2, 3, 4, 5], "b:0"), 8) is None


@examples(100)
@given(
    outputs=st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=4)), max_size=30),
    capacity=st.sampled_from((16, 40, 400)),
)
def test_no_guess_stems_from_another_salt_and_memory_is_bounded(
    outputs: list[tuple[str, list[int]]], capacity: int
) -> None:
    """Each salt has token ids of its own, apart from the four that all texts share."""
    corpus = Corpus(capacity)
    for salt, output in outputs:
        base = 100 * (1 + ord(salt))
        corpus.add(salt, [1, 2, 3, 4, *(base + token for token in output)])
        assert corpus.num_tokens <= capacity
        for other in "abc":
            found = corpus.find(other, [1, 2, 3, 4])
            assert all(tokens[place] // 100 == 1 + ord(other) for tokens, place in found)


def test_the_oldest_outputs_are_dropped() -> None:
    corpus = Corpus(40)
    corpus.add("", [1, 2, 3, 4, 5])
    for token in range(8):
        assert bool(corpus.find("", [1, 2, 3, 4])) is (token < 6)
        corpus.add("", [9, 9, 9, 9, token])


def test_the_salt_that_was_used_last_stays() -> None:
    corpus = Corpus(40)
    for salt in ("a", "b", "a", "c"):
        corpus.add(salt, [1, 2, 3, 4, *range(5, 15)])
    assert [bool(corpus.find(salt, [1, 2, 3, 4])) for salt in "abc"] == [False, False, True]


# --- predictions ------------------------------------------------------------------------------------------------
def follow(prediction: Sequence[int], output: Sequence[int], limit: int = 4) -> list[tuple[int, ...]]:
    """Return the guesses before each token of an output."""
    budget = IndexBudget()
    proposer = PredictionProposer(budget)
    asked = request([9], prediction=prediction)
    guesses = []
    for token in output:
        budget.begin_step()
        found = proposer.propose(asked, limit)
        guesses.append(() if found is None else found.token_ids)
        asked.tokens.append(token)
    return guesses


def test_an_output_as_predicted_is_guessed_to_its_end() -> None:
    text = list(range(10, 20))
    assert follow(text, text) == [tuple(text[i : i + 4]) for i in range(10)]


@pytest.mark.parametrize(
    ("output", "known"),
    [
        ([10, 11, 12, 99, 14, 15, 16, 17], [0, 1, 2, 4, 5, 6, 7]),
        ([10, 11, 12, 98, 99, 13, 14, 15, 16], [0, 1, 2, 7, 8]),
        ([10, 11, 12, 16, 17, 18, 19], [0, 1, 2, 5, 6]),
        ([98, 99, 97, 10, 11, 12, 13], [5, 6]),
    ],
    ids=["replaced", "inserted", "left out", "preceded"],
)
def test_after_a_difference_the_text_is_found_again(output: list[int], known: list[int]) -> None:
    """`known`: positions of the output at which the next token is guessed right."""
    guesses = follow(range(10, 40), output)
    assert [i for i, token in enumerate(output) if guesses[i][:1] == (token,)] == known


def test_a_text_is_found_far_from_where_it_was_left() -> None:
    prediction = [*range(1000, 3000), *range(10, 30)]
    guesses = follow(prediction, [1000, 1001, *range(10, 20)])
    assert guesses[-1] == (19, 20, 21, 22)


def test_a_prediction_is_guessed_behind_tokens_that_are_forced() -> None:
    asked = request([9, 10, 11], prompt_len=1, prediction=range(10, 20))
    found = PredictionProposer(IndexBudget()).propose(asked, 3, after=(12, 13))
    assert found is not None and found.token_ids == (14, 15, 16) and found.proposer == "prediction"
    assert PredictionProposer(IndexBudget()).propose(asked, 3, after=(99, 98)) is None


def test_samples_share_the_predicted_tokens_that_a_step_indexes() -> None:
    prediction = [*range(1000, 1000 + 2 * MAX_INDEXED_TOKENS), *range(10, 30)]
    budget = IndexBudget()
    proposer = PredictionProposer(budget)
    samples = [request([9, 98, 99, 97, 10, 11, 12, 13], f"a:{i}", "", 1, prediction) for i in range(4)]
    guessed = []
    for _ in range(16):
        budget.begin_step()
        guessed.append(sum(proposer.propose(sample, 1) is not None for sample in samples))
        for sample in samples:
            sample.tokens.append(sample.tokens[-1] + 1)
    assert guessed[0] == 0 and guessed[-1] == len(samples)


class _CountedLookUps(tuple[int, ...]):
    """Prediction that counts how often a token is looked for in it."""

    count = 0

    def index(self, *args: Any) -> int:
        type(self).count += 1
        return super().index(*args)


@pytest.mark.parametrize("lost", [False, True], ids=["as predicted", "lost"])
def test_after_a_pause_only_the_last_tokens_are_followed(lost: bool) -> None:
    prediction = _CountedLookUps(range(10, 6000))
    asked = request([9], prediction=prediction)
    asked.prediction = prediction
    proposer = PredictionProposer(IndexBudget())
    proposer.propose(asked, 1)
    asked.tokens += [7] * 4096 if lost else prediction[:4096]
    _CountedLookUps.count = 0
    found = proposer.propose(asked, 2)
    assert (None if found is None else found.token_ids) == (None if lost else prediction[4096:4098])
    assert _CountedLookUps.count < 40


def test_without_a_prediction_nothing_is_guessed() -> None:
    assert follow((), [1, 2, 3]) == [(), (), ()]


# --- recorded outputs -------------------------------------------------------------------------------------------
def recorded(file: Path, **values: float) -> RecordedProposer:
    return RecordedProposer(RecordedValues(path=str(file), **values), 50)


def test_recorded_outputs_are_guessed_and_some_are_wrong(tmp_path: Path) -> None:
    file, output = tmp_path / "outputs.jsonl", [i % 50 for i in range(2000)]
    recorder = OutputRecorder(str(file))
    ended = request([7, 8, 9, *output], prompt_len=3)
    assert recorder.propose(ended, 8) is None
    recorder.ended(ended)
    recorder.ended(request([7, 8]))
    asked = request([7, 8, 9, 0], "b:0", prompt_len=3)
    found = recorded(file).propose(asked, 3, after=(1, 2))
    assert found is not None and found.token_ids == (3, 4, 5) and found.chances == (1.0, 1.0, 1.0)
    found = recorded(file, wrong=0.2).propose(asked, 1999)
    assert found is not None and found.chances[0] == 0.8 and set(found.token_ids) <= set(range(50))
    wrong = sum(a != b for a, b in zip(found.token_ids, output[1:], strict=True))
    assert 300 < wrong < 500
    again = recorded(file, wrong=0.2).propose(request(asked.tokens, "c:0", prompt_len=3), 1999)
    other = recorded(file, wrong=0.2, seed=1).propose(asked, 1999)
    assert again == found and other is not None and other != found
    assert recorded(file).propose(request([7, 8, 1], "d:0", prompt_len=2), 3) is None


def test_an_output_unlike_its_record_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "outputs.jsonl"
    OutputRecorder(str(file)).ended(request([7, 1, 2, 3], prompt_len=1))
    proposer = recorded(file)
    for name, output in (("b:0", [1, 2, 3]), ("c:0", [1, 9, 3])):
        asked = request([7, *output], name, prompt_len=1)
        asked.tokens.pop()
        proposer.propose(asked, 2)
        proposer.ended(asked)
    assert [record.getMessage() for record in caplog.records] == [
        "c:0: the output differs from the recorded one at token 1"
    ]


@pytest.mark.parametrize("line", ["x", "[]", '{"request": "a"}', '{"request": "a", "token_ids": [50]}'])
def test_files_that_are_no_records_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "outputs.jsonl"
    file.write_text('{"request": "b", "token_ids": [1]}\n' + line)
    with pytest.raises(ConfigError, match=r"outputs\.jsonl', line 2: not a recorded output"):
        recorded(file)
    with pytest.raises(ConfigError, match="speculation: cannot read"):
        recorded(tmp_path / "none")
    with pytest.raises(ConfigError, match="speculation: cannot write"):
        OutputRecorder(str(tmp_path))


# --- all of them ------------------------------------------------------------------------------------------------
def grow(proposers: Sequence[Proposer], name: str, text: list[int]) -> None:
    """Ask for guesses at each length of a text, and check them."""
    asked = request(text[:1], name, prediction=text[1:] + text[:3])
    for end in range(1, len(text) + 1):
        asked.tokens[:] = text[:end]
        for proposer in proposers:
            for after in ((), (3,), (1, 2, 3)):
                found = proposer.propose(asked, 3, after)
                assert found is None or 1 <= len(found.token_ids) <= 3
                assert found is None or set(found.token_ids) <= {0, 1, 2, 3, 4}
                assert found is None or len(found.chances) == len(found.token_ids)
                assert found is None or all(0 < chance <= 1 for chance in found.chances)


@examples(50)
@given(texts=st.lists(TOKENS, min_size=1, max_size=3))
def test_guesses_are_known_tokens_and_no_more_than_asked_for(texts: list[list[int]]) -> None:
    proposers = [ngram(), suffix(), PredictionProposer(IndexBudget())]
    for number, text in enumerate(texts):
        grow(proposers, f"{number}:0", text)
        for proposer in proposers:
            proposer.ended(request(text, f"{number}:0"))
