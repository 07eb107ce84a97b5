"""Outputs of several tokens give the same text, ends and scores as one token at a time."""

import random
from dataclasses import asdict

import pytest

from roseinfer.core.outputs import DraftRun, DraftTally, End, FinishReason, FirstToken, RequestTimes, SequenceOutput
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.engine.output import SequenceText, merge
from tests.helpers.tokenizers import EOS_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()
STARTED = FirstToken(3, 1.0, 2.0, 3.0)
TIMES = RequestTimes(1.0, 2.0, 3.0, 9.0)


def outputs(tokens: list[int], cuts: list[int], end: End) -> list[SequenceOutput]:
    """Return the tokens as outputs of steps that end at `cuts`."""
    steps = []
    for first, last in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        part = tuple(tokens[first:last])
        scores = tuple(TokenLogprobs(token, -float(first + i), 1, ()) for i, token in enumerate(part))
        started, prompt = (STARTED, (TokenLogprobs(7, -0.5, 1, ()),)) if first == 0 else (None, None)
        steps.append(SequenceOutput("a:0", part, scores, prompt, started, end if last == len(tokens) else None))
    return steps


def merged(steps: list[SequenceOutput], params: SequenceParams) -> SequenceChunk:
    """Return all chunks until the sequence ends, merged."""
    text, whole = SequenceText(0, params, TOKENIZER), None
    for output in steps:
        chunk = text.take(output, 5.0)
        assert chunk is not None
        whole = chunk if whole is None else merge(whole, chunk)
        if text.ended:
            return whole
    raise AssertionError("it does not end")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_how_many_tokens_come_at_once_changes_nothing(include: bool, min_tokens: int) -> None:
    rng = random.Random(5)
    params = SequenceParams(
        stop=("ab", "bcc"), include_stop_str_in_output=include, min_tokens=min_tokens, prompt_logprobs=0, logprobs=0
    )
    stopped = 0
    for _ in range(300):
        tokens = [ord(rng.choice("abcd")) for _ in range(rng.randrange(1, 12))]
        end = End(FinishReason.LENGTH, TIMES)
        if rng.random() < 0.5:
            tokens.append(EOS_ID)
            end = End(FinishReason.STOP, TIMES, stop_token=EOS_ID)
        expected = merged(outputs(tokens, list(range(1, len(tokens))), end), params)
        cuts = sorted(rng.sample(range(1, len(tokens)), rng.randrange(len(tokens)))) if len(tokens) > 1 else []
        assert asdict(merged(outputs(tokens, cuts, end), params)) == asdict(expected)
        stopped += expected.stop_reason in params.stop
    assert stopped > 20


def test_text_after_a_stop_string_in_the_same_step_is_not_output() -> None:
    tokens = list(b"xxab tail")
    params = SequenceParams(stop=("ab",), logprobs=0, prompt_logprobs=0)
    chunk = merged(outputs(tokens, [], End(FinishReason.LENGTH, TIMES)), params)
    assert (chunk.text, chunk.token_ids, chunk.num_output_tokens) == ("xx", list(b"xxab"), 4)
    assert [entry.token_id for entry in chunk.logprobs] == list(b"xxab")
    assert (chunk.finish_reason, chunk.stop_reason) == (FinishReason.STOP, "ab")


def test_times_of_a_request_do_not_depend_on_the_delay_of_its_messages() -> None:
    text = SequenceText(0, SequenceParams(prompt_logprobs=0, logprobs=0), TOKENIZER)
    steps = outputs([65, 66, 67], [1, 2], End(FinishReason.LENGTH, TIMES))
    chunks = [text.take(output, 5.0, shift_s) for output, shift_s in zip(steps, (100.0, 100.5, 101.0), strict=True)]
    assert chunks[-1] is not None and chunks[-1].times == RequestTimes(101.0, 102.0, 103.0, 109.0)


def test_the_engine_that_continues_a_request_has_its_own_clock() -> None:
    text = SequenceText(0, SequenceParams(prompt_logprobs=0, logprobs=0), TOKENIZER)
    first, last = outputs([65, 66], [1], End(FinishReason.LENGTH, TIMES))
    text.take(first, 5.0, 100.0)
    text.begin_on_engine()
    ended = text.take(last, 5.0, 1000.0)
    assert ended is not None and ended.times == RequestTimes(101.0, 102.0, 103.0, 1009.0)


def test_drafts_add_up_and_those_after_a_stop_string_are_not_accepted() -> None:
    text = SequenceText(0, SequenceParams(stop=("ab",)), TOKENIZER)
    rows = [
        (b"x", (), None),
        (b"yz", (DraftRun("ngram", 3),), {"ngram": DraftTally(3, 1)}),
        (b"w", (DraftRun("suffix", 2),), {"ngram": DraftTally(3, 1), "suffix": DraftTally(2, 0)}),
        (b"v", (), None),
        (b"xab..", (DraftRun("ngram", 4),), {"ngram": DraftTally(7, 3), "suffix": DraftTally(2, 0)}),
    ]
    whole: SequenceChunk | None = None
    for ids, drafts, counted in rows:
        chunk = text.take(SequenceOutput("a:0", tuple(ids), drafts=drafts), 5.0)
        assert chunk is not None and chunk.drafts == counted
        whole = chunk if whole is None else merge(whole, chunk)
    assert text.ended and whole is not None and whole.num_output_tokens == 8
    assert whole.drafts == rows[-1][2]


def test_drafts_of_a_request_add_up_over_engines() -> None:
    text = SequenceText(0, SequenceParams(), TOKENIZER)
    text.take(SequenceOutput("a:0", (65, 66), drafts=(DraftRun("ngram", 1),)), 5.0)
    text.begin_on_engine()
    chunk = text.take(SequenceOutput("a:0", (67,), drafts=(DraftRun("ngram", 2),)), 5.0)
    assert chunk is not None and chunk.drafts == {"ngram": DraftTally(3, 1)}
