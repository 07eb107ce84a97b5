"""Texts without a model: the same whatever the schedule, and what a request asks of its output is kept."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import pytest

from roseinfer.core.errors import NO_TOKEN_ALLOWED, InvalidRequestError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.plan import Admission, Row, StepLimits, StepPlan, TokenMasks
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.priced.drawn import DrawnRunner, DrawnVocabulary, drawn_length
from tests.helpers.drafters import Oracle
from tests.helpers.engines import EOS, Collected, add, make_core, run_dry
from tests.helpers.guides import ArithmeticGuides

VOCAB, CLOSER = 50, 40
WORDS = tuple(range(5, 35))
LIMITS = StepLimits(8, 64)


def drawn(mean_len: float = 12.0, limits: StepLimits = LIMITS) -> DrawnRunner:
    return DrawnRunner(DrawnVocabulary(VOCAB, WORDS, (CLOSER,), (EOS,)), mean_len, limits)


def core_of(mean_len: float = 12.0, **options: object) -> EngineCore:
    return make_core(runner=drawn(mean_len), **options)  # type: ignore[arg-type]


def run(prompts: dict[str, list[int]], params: dict[str, object], mean_len: float = 12.0, **options: object):
    core = core_of(mean_len, **options)
    for number, (name, prompt) in enumerate(prompts.items()):
        add(core, name, prompt, **{"seed": number, "max_tokens": 8, **params})
    return run_dry(core)


def texts(collected: dict[str, Collected]) -> dict[str, tuple[list[int], FinishReason | None]]:
    return {name: (seen.tokens, seen.reason) for name, seen in collected.items()}


PROMPTS = {f"r{i}": list(range(1 + i, 15 + 2 * i)) for i in range(6)}


def test_the_texts_of_any_schedule_are_the_same():
    """Chunks, steps in flight, preemptions, other requests."""
    expected = texts(run(PROMPTS, {}))
    assert len({tuple(tokens) for tokens, _ in expected.values()}) == len(PROMPTS)
    assert {reason for _, reason in expected.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    small = core_of(num_blocks=11, depth=2, max_num_batched_tokens=9, scheduling_policy="fifo")
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        add(small, name, prompt, seed=number, max_tokens=8)
    assert texts(run_dry(small)) == expected
    assert small.stats().preemptions
    alone: dict[str, tuple[list[int], FinishReason | None]] = {}
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        alone |= texts(run({name: prompt}, {"seed": number}, depth=2))
    assert alone == expected


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("params", [{}, {"bad_token_ids": ((9,), (7, 8))}, {"min_tokens": 6, "stop_token_ids": (6, 7)}])
def test_texts_with_drafts_are_the_same(right: float, params: dict[str, object]) -> None:
    expected = run(PROMPTS, params)
    known = {name: seen.tokens for name, seen in expected.items()}
    runner = drawn(limits=StepLimits(8, 64, 64))
    core = make_core(runner=runner, depth=2, drafter=Oracle(known, VOCAB, right))  # type: ignore[arg-type]
    for number, (name, prompt) in enumerate(PROMPTS.items()):
        add(core, name, prompt, **{"seed": number, "max_tokens": 8, **params})
    assert texts(run_dry(core)) == texts(expected)
    assert core.scheduler.drafting is not None and core.scheduler.drafting.counts["test"].steps


def test_each_token_of_a_row_with_drafts_has_its_own_mask() -> None:
    runner = drawn()
    first, second = (_masked_word(allowed) for allowed in ([6], [7]))
    row = Row("a:0", 0, 3, 3, 3, True, 3, 0, (0, 1), (6, 9))
    admission = Admission("a:0", 0, [1, 2, 3, 5], 3, SequenceParams(max_tokens=20, ignore_eos=True), 7, (), ())
    plan = StepPlan(0, [row], [admission], num_tokens=3, num_drafts=2)
    runner.limits = StepLimits(8, 64, 8)
    words = TokenMasks.words_per_row(VOCAB)
    space = runner.mask_space(2)
    space[:words], space[words:] = array("I", second), array("I", first)
    runner.sample(runner.submit(plan), TokenMasks((0, 0), space, (1, 0)))
    assert runner.collect(plan).rows[0].token_ids == (6, 7), "the second draft is not what its mask allows"


def _masked_word(allowed: Sequence[int]) -> list[int]:
    words = [0] * TokenMasks.words_per_row(VOCAB)
    for token in allowed:
        words[token >> 5] |= 1 << (token & 31)
    return words


def test_an_output_that_was_begun_elsewhere_goes_on_the_same():
    whole = run({"a": [1, 2, 3]}, {"seed": 7, "ignore_eos": True})["a:0"].tokens
    params = SequenceParams(max_tokens=20, seed=7, ignore_eos=True)
    for sent in (1, 4, 7):
        runner = drawn()
        known = [1, 2, 3, *whole[:sent]]
        admission = Admission("a:0", 0, known, 3, params, 7, (), ())
        row = Row("a:0", 0, 0, len(known), 1, True, 0, 0, (0, 1))
        plan = StepPlan(0, [row], [admission], num_tokens=len(known))
        runner.sample(runner.submit(plan))
        assert runner.collect(plan).rows[0].token_ids == (whole[sent],)


def test_seed_and_prompt_both_count():
    def text(prompt: list[int], seed: int) -> list[int]:
        return run({"a": prompt}, {"seed": seed, "ignore_eos": True})["a:0"].tokens

    assert text([1, 2], 5) == text([1, 2], 5)
    assert text([1, 2], 5) != text([1, 2], 6)
    assert text([1, 2], 5) != text([2, 1], 5)
    assert text([1, 2], -5) != text([1, 2], 5)


def test_lengths_have_the_mean_that_was_asked_for():
    lengths = [drawn_length(key * 2_654_435_761 % 2**32, 40.0) for key in range(4000)]
    assert 38 < sum(lengths) / len(lengths) < 42 and min(lengths) >= 1
    assert {drawn_length(key, 1.0) for key in range(9)} == {1}


def test_outputs_end_where_they_are_told_to():
    def ends(**params: object) -> tuple[int, FinishReason | None, int]:
        seen = run({"a": [1, 2, 3]}, {"max_tokens": 30, **params}, mean_len=1.0)["a:0"]
        return len(seen.tokens), seen.reason, seen.tokens[-1]

    assert ends() == (1, FinishReason.STOP, EOS)
    assert ends(min_tokens=11) == (12, FinishReason.STOP, EOS)
    assert ends(min_tokens=11, max_tokens=11)[:2] == (11, FinishReason.LENGTH)
    assert ends(ignore_eos=True)[:2] == (30, FinishReason.LENGTH)
    length, reason, last = ends(ignore_eos=True, stop_token_ids=WORDS[:10], min_tokens=4)
    assert 5 <= length < 30 and reason is FinishReason.STOP and last in WORDS[:10]


def test_forbidden_tokens_do_not_come():
    own = run({"a": [1, 2, 3]}, {"ignore_eos": True})["a:0"].tokens
    pair = (own[3], own[4])
    seen = run({"a": [1, 2, 3]}, {"ignore_eos": True, "bad_token_ids": ((own[0],), pair)})["a:0"].tokens
    assert own[0] not in seen and pair not in list(pairwise(seen))
    assert seen[1:4] == own[1:4], "what is not forbidden stays"
    few = run({"a": [1, 2, 3]}, {"allowed_token_ids": (7, 9)})["a:0"].tokens
    assert set(few) <= {7, 9} and len(few) == 8, "an EOS id is none of the allowed"
    stuck = run({"a": [1, 2, 3]}, {"allowed_token_ids": (7,), "bad_token_ids": ((7,),)})["a:0"]
    assert stuck.reason is FinishReason.ERROR and stuck.end.error.startswith(NO_TOKEN_ALLOWED)


@pytest.mark.parametrize("depth", [1, 2])
def test_guides_are_obeyed(depth):
    core = core_of(depth=depth, guides=ArithmeticGuides(VOCAB), scheduling_policy="fifo")
    add(core, "a", [1, 2, 3], guide="3,6", max_tokens=20)
    add(core, "b", [1, 2, 4], max_tokens=20, seed=1)
    seen = run_dry(core)
    said = seen["a:0"].tokens
    assert len(said) == 6 and all(sum(said[: i + 1]) % 3 == 0 for i in range(6))


def masked(allowed: Sequence[int], end_at: int, **params: object):
    """The first token under a mask of these, of an output that is long enough from index `end_at` on."""
    runner = drawn(1.0)
    sampling = SequenceParams(max_tokens=20, min_tokens=end_at, **params)
    plan = StepPlan(
        0, [Row("a:0", 0, 0, 2, 1, True, 0, 0, (0,))], [Admission("a:0", 0, [1, 2], 2, sampling, 7, (EOS,), ())]
    )
    plan.num_tokens, plan.guided = 2, (0,)
    handle = runner.submit(plan)
    space = runner.mask_space(1)
    words = array("I", bytes(8))
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    words[1] |= 1 << 31  # beyond the vocabulary: means nothing
    space[:] = memoryview(words)
    runner.sample(handle, TokenMasks((0,), space))
    return runner.collect(handle).rows[0]


def test_under_a_mask_an_output_that_is_long_enough_is_brought_to_its_end():
    assert masked([6, EOS, CLOSER], 0).token_ids == (EOS,)
    assert masked([6, CLOSER], 0).token_ids == (CLOSER,)
    assert masked([6], 0).token_ids == (6,)
    assert masked([6, EOS, CLOSER], 5).token_ids == (6,)
    assert masked([49], 5).token_ids == (49,), "no word, but allowed"
    assert masked([EOS], 5).token_ids == (EOS,), "the guide knows better than min_tokens"
    assert masked([6, 7], 5, allowed_token_ids=(7, 8)).token_ids == (7,)
    assert (masked([6], 5, allowed_token_ids=(7, 8)).error or "").startswith(NO_TOKEN_ALLOWED)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_what_it_does_not_have_is_refused(name):
    core = core_of()
    with pytest.raises(InvalidRequestError, match=name):
        add(core, "a", [1, 2, 3], **{name: 1})
    assert not core.busy
