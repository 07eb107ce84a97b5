"""Decoding rows without objectives give way to a burst of prompts, on simulated time, and to nothing less."""

from itertools import pairwise
from statistics import fmean

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost import CostParams
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.simulator import Lifetime, simulate
from roseinfer.sim.workload import Arrival

# As of some billion parameters on a large GPU: full of rows, a step takes a third longer.
COST = CostParams(step_s=4.6e-3, token_s=17e-6, row_s=30e-6, context_s=80e-9)
PROMPT, OUTPUT, SEATS, BUDGET = 512, 100, 128, 1024
FULL_STEP_S = COST.step_s + COST.token_s * BUDGET
LARGEST_ROWS_S = SEATS * (COST.row_s + COST.context_s * (PROMPT + OUTPUT))


def burst(count: int = SEATS, at_s: float = 0.0) -> list[Arrival]:
    return [Arrival(at_s, [2 + number] * PROMPT, OUTPUT) for number in range(count)]


def lives(
    arrivals: list[Arrival], *, share: float | None = None, cost: CostParams = COST, **options: object
) -> list[Lifetime]:
    if share is not None:
        options["slack_decode_share"] = share
    config = scheduler_config(max_num_seqs=SEATS + 1, max_num_batched_tokens=BUDGET, overlap=True, **options)
    return simulate(arrivals, config, Machine(cost=cost)).lifetimes


def gaps(life: Lifetime) -> list[float]:
    return [later - earlier for earlier, later in pairwise(life.token_s)]


def test_first_tokens_come_sooner_and_the_last_no_later() -> None:
    at_once, giving_way = lives(burst(), share=1.0), lives(burst())
    assert fmean(life.ttft_s for life in giving_way) < 0.98 * fmean(life.ttft_s for life in at_once)
    assert max(life.ttft_s for life in giving_way) < 0.95 * max(life.ttft_s for life in at_once)
    assert max(life.token_s[-1] for life in giving_way) < 1.01 * max(life.token_s[-1] for life in at_once)


@pytest.mark.parametrize("share", [0.1, 0.2])
def test_two_tokens_are_no_further_apart_than_the_share_says(share: float) -> None:
    found = lives(burst(), share=share)
    longest_s = max(max(gaps(life)) for life in found)
    assert 2 * FULL_STEP_S < longest_s < LARGEST_ROWS_S / share + 2 * FULL_STEP_S


def test_rows_that_cost_little_beside_a_step_of_prompts_wait_for_no_other() -> None:
    cheap = CostParams(step_s=COST.step_s, token_s=COST.token_s, row_s=5e-6, context_s=5e-9)
    assert lives(burst(), cost=cheap) == lives(burst(), cost=cheap, share=1.0)


def test_prompts_that_fit_a_step_are_no_burst() -> None:
    """One at a time, beside as many rows as there are seats: their tokens come as without."""
    arrivals = burst(SEATS - 8) + [Arrival(4.0 + 0.05 * number, [400 + number] * 256, 8) for number in range(8)]
    found = lives(arrivals)
    late = [gap for life in found for at_s, gap in zip(life.token_s, gaps(life), strict=False) if at_s > 3.9]
    assert late and max(late) < FULL_STEP_S


@pytest.mark.parametrize(
    "options", [{"decode_first": False}, {"max_batch_size": 16}, {"enable_chunked_prefill": False}]
)
def test_other_options_hold_beside_it(options: dict[str, object]) -> None:
    found = lives(burst(), **options)
    assert all(len(life.token_s) == OUTPUT for life in found)


def test_who_has_an_objective_keeps_its_pace_in_the_burst() -> None:
    """It decodes when the burst comes, which ends behind it."""
    first = Arrival(0.0, [1] * PROMPT, 40, Slo(ttft_s=1.0, tpot_s=0.03))
    promised, *others = lives([first, *burst(at_s=0.1)])
    assert promised.good and max(gaps(promised)) < 2 * 0.03
    assert max(life.ttft_s for life in others) > promised.latency_s


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="slack_decode_share must be above 0 and at most 1"):
        scheduler_config(slack_decode_share=share)
