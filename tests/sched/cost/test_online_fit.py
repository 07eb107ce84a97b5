"""The cost model learns a machine's shape and follows its speed."""

import random
from dataclasses import replace

import pytest

from roseinfer.core.runner import ExpertChoice
from roseinfer.sched.cost.drafts import DraftCost
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


DRAFTS = DraftCost(0.4e-3, 90e-6, 12e-6, 20e-6, 2e-9)


def drafted(rng: random.Random) -> Work:
    """Rows with 1 to 7 drafts each, in small and large steps, some with a prompt."""
    rows, each, context = rng.choice([1, 2, 4, 8, 32, 96, 200]), rng.randrange(1, 8), rng.randrange(50, 2000)
    tokens = rng.choice([0, 0, 0, 256])
    return Work(tokens, pairs(0, tokens), rows, rows * context, 0, rows * each, rows * each * context)


def test_steps_with_drafts_teach_what_drafts_cost_and_nothing_else() -> None:
    true = replace(TRUE, drafts=DRAFTS)
    model, other = CostModel(TRUE), CostModel(TRUE)
    rng = random.Random(3)
    for _ in range(600):
        work = draw(rng)
        for one in (model, other):
            one.observe(work, TRUE.seconds(work))
        verifying = drafted(rng)
        model.observe(verifying, true.seconds(verifying) * (1 + rng.gauss(0, 0.01)))
        assert model.draft_steps and model.predicted_s > 0
    assert replace(model.params, drafts=None) == other.params and model.steps == other.steps == 600
    for work in (drafted(rng) for _ in range(100)):
        assert model.seconds(work) == pytest.approx(true.seconds(work), rel=0.05)


@pytest.mark.parametrize("drafts", [DraftCost(), DraftCost(0.0, 0.4e-3, 0.4e-3, 0.4e-3, 0.5e-6)], ids=["free", "dear"])
def test_a_few_steps_show_that_drafts_are_free_or_dear(drafts: DraftCost) -> None:
    true = replace(TRUE, drafts=drafts)
    model, rng = CostModel(TRUE), random.Random(4)
    for _ in range(30):
        work = drafted(rng)
        model.observe(work, true.seconds(work))
    wrong = [model.params.drafts_s(work) - true.drafts_s(work) for work in (drafted(rng) for _ in range(50))]
    assert max(map(abs, wrong)) < 0.15 * TRUE.step_s


def test_a_single_slow_step_hardly_moves_the_cost_of_drafts() -> None:
    true = replace(TRUE, drafts=DRAFTS)
    model, rng = CostModel(true), random.Random(5)
    for i in range(200):
        work = drafted(rng)
        model.observe(work, true.seconds(work) * (10 if i == 150 else 1))
    work = drafted(rng)
    assert model.seconds(work) == pytest.approx(true.seconds(work), rel=0.1)


def test_steps_of_a_head_teach_what_they_cost_and_nothing_else() -> None:
    """Steps with draft steps alone, and with drafts of the step before beside them."""
    true = replace(TRUE, drafts=DRAFTS._replace(head_step_s=0.22e-3, head_draft_s=2e-6))
    model, other = CostModel(TRUE), CostModel(TRUE)
    rng = random.Random(7)
    for number in range(400):
        work = draw(rng)
        for one in (model, other):
            one.observe(work, TRUE.seconds(work))
        verifying = drafted(rng) if number % 4 else replace_tokens(drafted(rng))
        most = rng.randrange(1, 8)
        drafting = verifying._replace(head_steps=most, head_drafts=most * verifying.decode_rows)
        model.observe(drafting, true.seconds(drafting) * (1 + rng.gauss(0, 0.01)))
    assert replace(model.params, drafts=None) == other.params
    found = model.params.draft_cost
    assert found.head_step_s == pytest.approx(0.22e-3, rel=0.2)
    assert found.head_s(4, 16) == pytest.approx(true.draft_cost.head_s(4, 16), rel=0.2)


def replace_tokens(work: Work) -> Work:
    return work._replace(draft_tokens=0, draft_context=0)


def test_experts_of_drafts_are_not_counted_twice() -> None:
    true = replace(TRUE, drafts=DRAFTS, expert_s=50e-6, experts=ExpertChoice(128, 8))
    model, rng = CostModel(replace(true, drafts=None)), random.Random(6)
    for _ in range(300):
        work = drafted(rng)
        model.observe(work, true.seconds(work))
    work = drafted(rng)
    assert model.seconds(work) == pytest.approx(true.seconds(work), rel=0.02)


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
    """A machine that decodes one request for half an hour must still know what a prompt costs."""
    model, rng = CostModel(TRUE), random.Random(4)
    for i in range(30_000):
        work = Work(100 if i % 1000 == 999 else 0, 0.0, 1, 100 + i % 500)
        model.observe(work, TRUE.seconds(work) * (1 + abs(rng.gauss(0, 0.03))))
    assert model.params.token_s == pytest.approx(TRUE.token_s, rel=0.15)
    busy = Work(1000, 0.0, 50, 20_000)
    assert model.seconds(busy) == pytest.approx(TRUE.seconds(busy), rel=0.1)
    slower = replace(TRUE, token_s=2 * TRUE.token_s)
    for _ in range(400):  # and it still learns
        work = draw(rng)
        model.observe(work, slower.seconds(work))
    assert model.seconds(busy) > 1.3 * TRUE.seconds(busy)


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


def test_a_step_that_should_have_taken_no_time_is_learnt_from() -> None:
    """Prompts are all that costs anything, and the step has none."""
    model = CostModel(CostParams(step_s=0.0, token_s=0.001, pair_s=0.0, row_s=0.0, context_s=0.0))
    for _ in range(50):
        model.observe(Work(decode_rows=1), 0.010)
    assert model.seconds(Work(decode_rows=1)) == pytest.approx(0.010, rel=0.2)
