"""Rows with drafts give what rows of one token give, whatever the drafts and the sampling parameters."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.plan import RowResult, TokenMasks
from tests.helpers.cases import examples
from tests.runner.tiny import BAD_TOKEN, VOCAB, Bench

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
STEPS = 14


def sampling(rng: random.Random) -> dict[str, Any]:
    """Return random parameters of a request, most of them at their defaults."""
    choices: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.7, 1.5]),
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 0, 5]),
        "min_p": rng.choice([0.0, 0.05]),
        "repetition_penalty": rng.choice([1.0, 1.0, 1.6]),
        "presence_penalty": rng.choice([0.0, 1.2]),
        "frequency_penalty": rng.choice([0.0, 0.0, 1.5]),
        "logit_bias": rng.choice([(), ((4, 3.0), (7, -2.0))]),
        "bad_token_ids": rng.choice([(), ((1, 4), (9,), (5, 9, 2))]),
        "allowed_token_ids": rng.choice([None, None, tuple(range(0, VOCAB, 2))]),
        "logprobs": rng.choice([None, None, 0, 2]),
        "min_tokens": rng.choice([0, 6]),
        "stop_token_ids": (4, 8),
    }
    return {name: choices[name] for name in choices if rng.random() < 0.5 or name == "temperature"}


def admitted(bench: Bench, seat: int, seed: int) -> Any:
    params = sampling(random.Random(seed))
    prompt = PROMPT[: 2 + seed % 9]
    return bench.admit(seat, prompt, seed=seed, stop=params.get("stop_token_ids", ()), **params)


def alone(seed: int) -> list[RowResult]:
    """Return the results of a request's rows of one token each."""
    bench = Bench()
    admission = admitted(bench, 0, seed)
    results = [bench.run([admission], [bench.row(0, 0, admission.prompt_len)]).rows[0]]
    while len(results) < STEPS:
        results.append(bench.run([], [bench.row(0, admission.prompt_len + len(results) - 1, 1)]).rows[0])
    return results


def guesses(rng: random.Random, known: list[int], done: int) -> tuple[int, ...]:
    """Return drafts of the tokens from index `done` on, some of them wrong."""
    most = rng.choice([0, 1, 3, 5])
    return tuple(
        known[i] if rng.random() < 0.8 else rng.randrange(BAD_TOKEN) for i in range(done, min(STEPS, done + most))
    )


@examples(120, derandomize=True)
@given(seeds=st.lists(st.integers(0, 10**6), min_size=1, max_size=4), order=st.integers(0, 10**6))
def test_tokens_and_log_probabilities_do_not_depend_on_drafts(seeds: list[int], order: int) -> None:
    expected = [alone(seed) for seed in seeds]
    known = [[result.token_ids[0] for result in results] for results in expected]
    rng = random.Random(order)
    bench = Bench()
    admissions = [admitted(bench, seat, seed) for seat, seed in enumerate(seeds)]
    tokens: list[list[int]] = [[] for _ in seeds]
    scores: list[list[Any]] = [[] for _ in seeds]
    first = True
    while min(map(len, tokens)) < STEPS:
        rows = []
        for seat, admission in enumerate(admissions):
            done = len(tokens[seat])
            if first:
                rows.append(bench.row(seat, 0, admission.prompt_len))
            elif done < STEPS and rng.random() < 0.8:
                drafts = guesses(rng, known[seat], done)
                rows.append(bench.row(seat, admission.prompt_len + done - 1, 1, drafts=drafts))
        rng.shuffle(rows)
        result = bench.run(admissions if first else [], rows)
        first = False
        for row, got in zip(rows, result.rows, strict=True):
            assert got.error is None and 1 <= len(got.token_ids) <= 1 + len(row.drafts)
            done = len(tokens[row.seat])
            right = 0
            while right < len(row.drafts) and row.drafts[right] == known[row.seat][done + right]:
                right += 1
            assert len(got.token_ids) == 1 + right
            tokens[row.seat] += got.token_ids
            scores[row.seat] += got.logprobs or ()
    for seat, results in enumerate(expected):
        assert tokens[seat][:STEPS] == known[seat]
        wanted = [entry for result in results for entry in result.logprobs or ()]
        assert len(scores[seat]) == (len(tokens[seat]) if wanted else 0)
        for got, want in zip(scores[seat], wanted, strict=False):
            assert (got.token_id, got.rank) == (want.token_id, want.rank)
            assert got.logprob == pytest.approx(want.logprob, abs=1e-5)


def masks_of(bench: Bench, masks: dict[tuple[int, int], set[int]]) -> TokenMasks:
    words = bench.runner.mask_space(len(masks))
    for line, allowed in enumerate(masks.values()):
        words[line] = sum(1 << token for token in allowed)
    rows, before = zip(*masks, strict=True)
    return TokenMasks(rows, words, before)


def sets(rng: random.Random) -> Iterator[set[int]]:
    while True:
        yield {rng.randrange(BAD_TOKEN) for _ in range(rng.choice([1, 2, 9]))}


@pytest.mark.parametrize("seed", range(6))
def test_each_token_of_a_row_has_a_mask_of_its_own(seed: int) -> None:
    rng = random.Random(seed)
    allowed = [next(sets(rng)) for _ in range(STEPS)]
    bench = Bench()
    known: list[int] = []
    for step in range(STEPS):
        admitted = [] if step else [bench.admit(0, PROMPT, temperature=0.7, seed=seed)]
        row = bench.row(0, len(PROMPT) + step - 1, 1) if step else bench.row(0, 0, len(PROMPT))
        plan = bench.plan(admitted, [row])
        plan.guided = (0,)
        handle = bench.runner.submit(plan)
        bench.runner.sample(handle, masks_of(bench, {(0, 0): allowed[step]}))
        known += bench.runner.collect(handle).rows[0].token_ids
    bench = Bench()
    bench.run([bench.admit(1, [7, 7])], [bench.row(1, 0, 2)])
    tokens: list[int] = []
    while len(tokens) < STEPS:
        done = len(tokens)
        drafts = guesses(rng, known, done) if done else ()
        admitted = [] if done else [bench.admit(0, PROMPT, temperature=0.7, seed=seed)]
        row = bench.row(0, len(PROMPT) + done - 1, 1, drafts=drafts) if done else bench.row(0, 0, len(PROMPT))
        plan = bench.plan(admitted, [bench.row(1, bench.step + 1, 1), row])
        plan.guided = (1,)
        masks = {(1, i): allowed[done + i] for i in range(len(drafts) + 1) if done + i < STEPS}
        handle = bench.runner.submit(plan)
        bench.runner.sample(handle, masks_of(bench, dict(rng.sample(list(masks.items()), len(masks)))))
        tokens += bench.runner.collect(handle).rows[1].token_ids
    assert tokens[:STEPS] == known


def test_a_failure_behind_right_drafts_keeps_the_tokens_before_it_and_one_behind_a_wrong_draft_is_none() -> None:
    known = Bench().generate(0, PROMPT, 3)
    every = set(range(BAD_TOKEN))
    for drafts, error in ((known[1:3], True), ([known[1] + 1, known[2]], False)):
        bench = Bench()
        bench.run([bench.admit(0, PROMPT)], [bench.row(0, 0, len(PROMPT))])
        plan = bench.plan([], [bench.row(0, len(PROMPT), 1, drafts=tuple(drafts))])
        plan.guided = (0,)
        handle = bench.runner.submit(plan)
        bench.runner.sample(handle, masks_of(bench, {(0, 0): every, (0, 1): set(), (0, 2): every}))
        (row,) = bench.runner.collect(handle).rows
        assert list(row.token_ids) == known[1:2] and bool(row.error) == error


def test_values_of_a_wrong_draft_that_are_not_finite_harm_nobody() -> None:
    """BAD_TOKEN makes K and V NaN. A wrong draft leaves them after its request's tokens, in a block that is reused."""
    bench = Bench(bad=True)
    bench.run([bench.admit(0, PROMPT)], [bench.row(0, 0, len(PROMPT))])
    bench.run([], [bench.row(0, len(PROMPT), 1, drafts=(BAD_TOKEN,))])
    assert not bool(bench.store.data.isfinite().all())
    last = bench.next_block - 1
    (row,) = bench.run([bench.admit(1, PROMPT[:2], blocks=(last,))], [bench.row(1, 0, 2)], released=[0]).rows
    alone = Bench(bad=True)
    (expected,) = alone.run([alone.admit(1, PROMPT[:2])], [alone.row(1, 0, 2)]).rows
    assert row.error is None and row.token_ids == expected.token_ids
