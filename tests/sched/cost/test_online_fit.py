"""The cost model learns a machine's shape and follows its speed."""

import random

import pytest

from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work, pairs
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


def test_what_is_learnt_of_rows_leaves_copies_as_they_are() -> None:
    model = CostModel(CostParams(load_s=1e-6, store_s=2e-6), trust=1.0)
    teach(model, 50, speed=2.0)
    assert (model.params.load_s, model.params.store_s) == (1e-6, 2e-6)
