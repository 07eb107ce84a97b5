"""The cost model learns a machine's shape and follows its speed."""

import random

import pytest

from roseinfer.core.plan import Row
from roseinfer.sched.cost import CostModel, CostParams, Work, pairs, work_of
from roseinfer.sched.estimates import FAST

TRUE = CostParams(step_s=17.5e-3, token_s=85e-6, pair_s=2e-9, row_s=70e-6, context_s=0.16e-6, chunk_context_s=0.3e-6)


def draw(rng: random.Random) -> Work:
    tokens = rng.choice([0, 0, rng.randrange(16, 2048)])
    rows = rng.randrange(1, 200)
    start = rng.randrange(4000) if tokens else 0
    return Work(tokens, pairs(start, tokens), rows, rows * rng.randrange(50, 2000), start)


def error(model: CostModel, rng: random.Random, speed: float = 1.0) -> float:
    """The largest relative error over 200 steps."""
    works = [draw(rng) for _ in range(200)]
    return max(abs(model.seconds(work) / (speed * TRUE.seconds(work)) - 1) for work in works)


def teach(model: CostModel, steps: int, *, speed: float = 1.0, noise: float = 0.0, outliers: bool = False) -> None:
    rng = random.Random(1)
    for i in range(steps):
        work = draw(rng)
        seconds = speed * TRUE.seconds(work) * (1 + rng.gauss(0, noise))
        model.observe(work, 40 * seconds if outliers and i % 50 == 49 else seconds)


def test_features_of_a_plan() -> None:
    rows = [Row("a", 0, 9, 1, 1, True, 9, 0, ()), Row("b", 1, 4, 2, 0, False, 4, 0, ())]
    assert work_of(rows) == Work(2, 5 + 6, 1, 10, 4)
    two = [row for start in (100, 30) for row in (rows[0], rows[1]._replace(start=start, count=5))]
    assert work_of(two).prompt_context == 130 and work_of(two).decode_context == 20
    assert work_of([]) == Work()


def test_a_row_that_verifies_drafts_decodes_and_its_drafts_are_counted_apart() -> None:
    verifying = Row("c", 2, 20, 4, 4, True, 20, 0, (), (7, 8, 9))
    rows = [Row("a", 0, 9, 1, 1, True, 9, 0, ()), Row("b", 1, 4, 2, 0, False, 4, 0, ()), verifying]
    assert work_of(rows) == Work(2, 5 + 6, 2, 10 + 21, 4, 3)
    plain, drafted = Work(decode_rows=1, decode_context=21), work_of([verifying])
    assert plain.fits and not drafted.fits and plain.features == drafted.features
    assert TRUE.seconds(drafted) == pytest.approx(TRUE.seconds(plain) + 3 * TRUE.token_s)


def test_steps_with_drafts_do_not_move_it() -> None:
    """On a machine where a draft costs nothing, and another where it costs ten times what a prompt token does."""
    model, other = CostModel(TRUE), CostModel(TRUE)
    rng = random.Random(3)
    for i in range(400):
        work = draw(rng)
        for one in (model, other):
            one.observe(work, TRUE.seconds(work))
        drafted = work._replace(draft_tokens=64)
        model.observe(drafted, TRUE.seconds(work) + (i % 2) * 640 * TRUE.token_s)
        assert model.predicted_s == model.seconds(drafted)
    assert model.params == other.params and model.steps == other.steps == 400


def test_it_learns_the_shape_from_a_poor_guess() -> None:
    model = CostModel(CostParams(), trust=1.0)
    assert error(model, random.Random(2)) > 0.5
    teach(model, 600, noise=0.03)
    assert error(model, random.Random(2)) < 0.05
    assert model.rho == pytest.approx(1.0, abs=0.03), "the shape holds the speed, the corrector is at rest"


def test_outliers_do_not_move_it() -> None:
    model = CostModel(TRUE)
    teach(model, 600, noise=0.03, outliers=True)
    assert error(model, random.Random(2)) < 0.25


@pytest.mark.parametrize("speed", [1.08, 1.2, 0.8])
def test_it_follows_the_speed_of_the_machine(speed: float) -> None:
    model = CostModel(TRUE)
    teach(model, 200, speed=speed, noise=0.03)
    assert error(model, random.Random(2), speed) < 0.05


def test_without_the_fit_the_fast_corrector_alone_follows() -> None:
    model = CostModel(TRUE, fit=False)
    teach(model, 200, speed=1.2)
    assert model.rho == pytest.approx(1.2, rel=0.02)
    assert error(model, random.Random(2), 1.2) < 0.03


def test_steps_that_never_vary_do_not_unlearn_what_they_do_not_show() -> None:
    """A machine that decodes one request for an hour must still know what a prompt costs."""
    model, rng = CostModel(TRUE), random.Random(4)
    for i in range(60_000):
        work = Work(100 if i % 1000 == 999 else 0, 0.0, 1, 100 + i % 500)
        model.observe(work, TRUE.seconds(work) * (1 + abs(rng.gauss(0, 0.03))))
    assert model.params.token_s == pytest.approx(TRUE.token_s, rel=0.15)
    assert all(model._cov[i][i] > 0 for i in range(6))
    busy = Work(1000, 0.0, 50, 20_000)
    assert model.seconds(busy) == pytest.approx(TRUE.seconds(busy), rel=0.1)


def test_coefficients_never_become_negative() -> None:
    model = CostModel(TRUE, trust=1.0)
    rng = random.Random(3)
    for _ in range(400):
        model.observe(Work(0, 0.0, rng.randrange(1, 64), 0), 0.001 * rng.random())
    assert min(model.params.values()) >= 0


def accelerator(work: Work) -> float:
    """Seconds as a GPU takes them, which no linear model fits: weights are read once however few rows there are, a
    prompt in a step costs some kernels more, and few prompt tokens that attend to many are slow.
    """
    rows = work.prompt_tokens + work.decode_rows
    seconds = 4e-3 + max(0.0, 15e-6 * (rows - 64)) + 36e-9 * work.decode_context + 4e-6 * work.decode_rows
    if work.prompt_tokens:
        seconds += 1.2e-3 + 1e-6 * work.prompt_pairs / work.prompt_tokens
    return seconds


@pytest.mark.parametrize("seed", range(4))
def test_a_machine_that_is_not_linear_is_fitted_as_well_as_it_can_be(seed: int) -> None:
    model, rng = CostModel(FAST, trust=1.0), random.Random(seed)
    for _ in range(60):  # as many requests decode for a while, and prompts of one length pass by
        rows, tokens = rng.choice([0, 1, 16, 64, 128]), rng.choice([16, 64, 256, 1024])
        context = rng.randrange(200, 400)
        for step in range(12):
            prompt, start = (tokens, rng.choice([0, 2000])) if step % 3 == 2 or not rows else (0, 0)
            work = Work(prompt, prompt * (start + prompt / 2), rows, rows * (context + step))
            model.observe(work, accelerator(work) * (1 + abs(rng.gauss(0, 0.01))))
    errors = sorted(abs(error) for error in list(model.errors)[-200:])
    assert errors[100] < 0.15
    assert 0.8 < model.rho < 1.25
    assert 2e-3 < model.params.step_s < 6e-3


def test_a_step_without_a_duration_teaches_nothing() -> None:
    model = CostModel(TRUE)
    model.observe(Work(1, 1.0, 1, 1), 0.0)
    assert model.params == TRUE


@pytest.mark.parametrize("pair_s", [0.0, 3.9e-9])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 512), (20_000, 64), (511, 30_000)])
def test_prompt_tokens_that_fit_a_time_are_those_that_take_it(pair_s, start, count):
    params = CostParams(step_s=1e-3, token_s=17e-6, pair_s=pair_s, chunk_context_s=34e-9)
    whole = params.seconds(Work(count, count * start + count * (count + 1) / 2, prompt_context=start))
    assert params.prefill_s(start, count) == pytest.approx(whole - params.step_s)
    assert params.prefill_tokens(start, params.prefill_s(start, count)) == pytest.approx(count)


def test_a_chunk_pays_for_the_context_before_it_whatever_its_length():
    params = CostParams(token_s=10e-6, chunk_context_s=100e-9)
    assert params.prefill_s(20_000, 0) == 0.0
    assert params.prefill_s(20_000, 1) == pytest.approx(2e-3 + 10e-6)
    assert params.prefill_tokens(20_000, 1.9e-3) == params.prefill_tokens(20_000, 2e-3) == 0.0
    assert params.prefill_tokens(20_000, 3e-3) == pytest.approx(100)
    assert not params.worth_a_chunk(20_000, 7.9e-3) and params.worth_a_chunk(20_000, 8.1e-3)
    assert params.worth_a_chunk(0, 0.0) and CostParams().worth_a_chunk(20_000, 1e-9)


def test_no_prompt_tokens_fit_no_time():
    assert CostParams().prefill_tokens(100, 0.0) == CostParams().prefill_tokens(100, -1.0) == 0.0


# --- copies between the device and the host -------------------------------------------------------------------------
def test_the_two_directions_go_beside_each_other() -> None:
    params = CostParams(load_s=50e-6, store_s=100e-6)
    assert params.copies_s(400, 100) == pytest.approx(20e-3) and params.copies_s(100, 400) == pytest.approx(40e-3)
    assert params.slower(2.0).copies_s(1, 0) == pytest.approx(100e-6)


def test_what_is_learnt_of_rows_leaves_copies_as_they_are() -> None:
    model = CostModel(CostParams(load_s=1e-6, store_s=2e-6), trust=1.0)
    teach(model, 50, speed=2.0)
    assert (model.params.load_s, model.params.store_s) == (1e-6, 2e-6)
