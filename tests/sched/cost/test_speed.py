"""The cost model follows a machine that changes its speed within a few steps, and counts stalls instead of learning
from them.
"""

import random
from collections.abc import Callable

import pytest

from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.cost.speed import STALLS_WINDOW_S, StallStats
from roseinfer.sched.estimates import FAST
from tests.sched.cost.test_online_fit import TRUE, draw, error

PLAIN = Work(0, 0.0, 20, 10_000)


def run(
    model: CostModel,
    steps: int,
    *,
    speed: float = 1.0,
    noise: float = 0.0,
    stall_s: Callable[[int], float] = lambda step: 0.0,
    seed: int = 1,
) -> list[float]:
    """`rho` after each step of a machine that takes `speed` times as long as `TRUE`, with half-normal noise."""
    rng = random.Random(seed)
    found = []
    for step in range(steps):
        work = draw(rng)
        seconds = speed * TRUE.seconds(work) * (1 + abs(rng.gauss(0, noise)))
        model.observe(work, seconds + stall_s(step))
        found.append(model.rho)
    return found


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.1])
@pytest.mark.parametrize("speed", [0.7, 1.3, 4.0])
def test_a_change_of_speed_that_lasts_is_followed_after_four_steps_and_so_is_its_end(
    speed: float, noise: float
) -> None:
    model = CostModel(TRUE)
    before = run(model, 300, noise=noise)[-1]
    changed = run(model, 5, speed=speed, noise=noise, seed=2)
    assert changed[2] == pytest.approx(before, rel=0.03), "three steps may be chance"
    assert changed[4] == pytest.approx(speed * before, rel=max(0.01, noise))
    run(model, 100, speed=speed, noise=noise, seed=3)
    assert run(model, 5, noise=noise, seed=4)[-1] == pytest.approx(before, rel=max(0.01, noise))


def test_a_machine_that_was_slow_for_a_while_has_the_shape_that_it_had() -> None:
    model = CostModel(TRUE)
    run(model, 300)
    run(model, 200, speed=1.5, seed=2)
    run(model, 10, seed=3)
    assert error(model, random.Random(5)) < 0.01


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_noise_alone_does_not_move_it(noise: float) -> None:
    model = CostModel(TRUE)
    run(model, 200, noise=noise)
    found = run(model, 3000, noise=noise, seed=2)
    mean = sum(found) / len(found)
    assert sum(abs(rho / mean - 1) > 0.05 for rho in found) < 0.01 * len(found)


@pytest.mark.parametrize("every", [10, 50])
def test_stalls_change_neither_the_speed_nor_the_shape_and_are_counted(every: int) -> None:
    """Each lasts as long as some 50 steps."""
    stalled, calm = CostModel(TRUE), CostModel(TRUE)
    rhos = run(stalled, 600, noise=0.03, stall_s=lambda step: 2.5 if step % every == every - 1 else 0.0)
    assert max(abs(rho / other - 1) for rho, other in zip(rhos, run(calm, 600, noise=0.03), strict=True)) < 0.02
    assert error(stalled, random.Random(2)) < error(calm, random.Random(2)) + 0.01
    assert stalled.stalls.typical_s == pytest.approx(2.5, rel=0.05)
    assert calm.stalls == StallStats()


def test_a_slowdown_is_no_row_of_stalls() -> None:
    model = CostModel(TRUE)
    run(model, 300)
    run(model, 3, speed=4.0)
    assert model.stalls.count > 0, "so far they may be"
    run(model, 10, speed=4.0)
    assert model.stalls.count == 0


def test_stalls_are_told_by_how_much_of_the_time_they_take() -> None:
    model = CostModel(TRUE)
    step_s = TRUE.seconds(PLAIN)
    for step in range(3000):  # some 60 s of steps, and 4 stalls of 1, 1, 1 and 3 s
        late_s = {1000: 1.0, 1500: 1.0, 2000: 3.0, 2500: 1.0}.get(step, 0.0)
        model.observe(PLAIN, step_s + late_s)
    found, span_s = model.stalls, 3000 * step_s + 6.0
    assert span_s < STALLS_WINDOW_S
    assert (found.count, found.typical_s) == (4, pytest.approx(1.0))
    assert found.share == pytest.approx(6.0 / span_s)
    for _ in range(round(STALLS_WINDOW_S / step_s) + 1):
        model.observe(PLAIN, step_s)
    assert model.stalls == StallStats()


def test_a_model_that_knows_little_takes_no_step_for_a_stall() -> None:
    """The model starts from a fast machine's cost, and prompts come after hundreds of steps without one."""
    model = CostModel(FAST, trust=1.0)
    for _ in range(300):
        model.observe(PLAIN, TRUE.seconds(PLAIN))
    prompt = Work(1500, 1.5e6, 20, 10_000)
    for _ in range(3):
        model.observe(prompt, TRUE.seconds(prompt))
    assert model.stalls.count == 0
    assert model.seconds(prompt) == pytest.approx(TRUE.seconds(prompt), rel=0.2)


def test_what_happens_all_the_time_is_no_stall_but_what_the_model_must_learn() -> None:
    """Each third step holds what it thinks it knows to take half of what it takes."""
    model = CostModel(CostParams(*TRUE.slower(1.0).values()[:3], TRUE.row_s, 0.0))
    rows = Work(0, 0.0, 100, 300_000)
    for step in range(600):
        work = rows if step % 3 == 2 else PLAIN._replace(decode_context=0)
        model.observe(work, TRUE.seconds(work))
    assert model.seconds(rows) == pytest.approx(TRUE.seconds(rows), rel=0.05)


def test_without_the_fit_it_follows_and_counts_as_well() -> None:
    model = CostModel(TRUE, fit=False)
    run(model, 60)
    assert run(model, 5, speed=1.3)[-1] == pytest.approx(1.3)
    run(model, 1, speed=1.3, stall_s=lambda step: 1.0)
    assert model.rho == pytest.approx(1.3) and model.stalls.typical_s == pytest.approx(1.0, rel=0.2)
