"""Decoding rows without objectives give way to a burst of prompts, on simulated time, and to nothing less."""

import random
from itertools import pairwise
from statistics import fmean

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import Row, StepPlan
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.rotation import MAX_GAP_S
from roseinfer.sched.policies.slack.policy import SlackPolicy
from roseinfer.sched.policies.slack.terms import SlackOptions
from roseinfer.sched.policy import StepDone
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.simulator import Lifetime, simulate
from roseinfer.sim.workload import Arrival
from tests.helpers.engines import add, make_core, submitted

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
    taking_turns, giving_way = lives(burst(), share=1.0), lives(burst(), share=0.1)
    assert fmean(life.ttft_s for life in giving_way) < 0.98 * fmean(life.ttft_s for life in taking_turns)
    assert max(life.ttft_s for life in giving_way) < 0.95 * max(life.ttft_s for life in taking_turns)
    assert max(life.token_s[-1] for life in giving_way) < 1.01 * max(life.token_s[-1] for life in taking_turns)


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
    """The request decodes when the burst comes, and ends after it."""
    first = Arrival(0.0, [1] * PROMPT, 40, Slo(ttft_s=1.0, tpot_s=0.03))
    promised, *others = lives([first, *burst(at_s=0.1)])
    assert promised.good and max(gaps(promised)) < 2 * 0.03
    assert max(life.ttft_s for life in others) > promised.latency_s


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_a_share_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="slack_decode_share must be above 0 and at most 1"):
        scheduler_config(slack_decode_share=share)


def test_nobody_waits_longer_than_that_whatever_the_share() -> None:
    """A step takes as long as a fifth of it: rows would otherwise sit out for all of the burst."""
    slow = COST.slower(5)
    found = lives(burst(), share=1e-3, cost=slow)
    longest_s = max(max(gaps(life)) for life in found)
    assert MAX_GAP_S / 2 < longest_s < MAX_GAP_S + 5 * (FULL_STEP_S + LARGEST_ROWS_S)


def test_what_it_takes_to_attend_counts_for_prompts_as_well() -> None:
    """Two machines on which a full step of these prompts takes the same."""
    dear = CostParams(COST.step_s, COST.token_s / 2, COST.token_s / PROMPT, COST.row_s, COST.context_s)
    of_tokens, of_pairs = lives(burst(), share=0.15), lives(burst(), share=0.15, cost=dear)
    assert max(max(gaps(life)) for life in of_pairs) == pytest.approx(max(max(gaps(life)) for life in of_tokens), 0.15)


@pytest.mark.parametrize(("counts", "learnt"), [((1, 1), 2), ((1, 512), 8)])
def test_all_steps_with_prompts_are_learnt_from(counts: tuple[int, int], learnt: int) -> None:
    """Count among eight: every fourth step of decodes alone might be one that leaves the rows out."""
    known = Estimates(cost=CostModel(COST))
    policy = SlackPolicy(scheduler_config(), SlackOptions(), known)
    for step in range(8):
        rows = [Row(str(at), at, 600, count, 1, True, 600, 0, ()) for at, count in enumerate(counts)]
        policy.observe(StepDone(StepPlan(step, rows, num_tokens=sum(counts)), 0.01 * step, 0.01))
    assert known.cost.steps == learnt


@pytest.mark.parametrize(("blocks", "prompt"), [(10, 16), (12, 24), (14, 28)])
def test_prompts_without_room_are_not_given_way_to(blocks: int, prompt: int) -> None:
    """Prompts that have started lack the blocks that rows have taken meanwhile, and yield: a step would be empty."""
    core = make_core(slack_decode_share=0.01, scheduling_policy="slack", num_blocks=blocks, max_num_batched_tokens=4)
    for number in range(3):
        add(core, f"row {number}", [10 + number] * 4, max_tokens=20, ignore_eos=True)
    for _ in range(5):
        core.step()
    for number in range(3):
        add(core, f"prompt {number}", [20 + number] * prompt, max_tokens=2, ignore_eos=True)
    while core.scheduler.has_work:
        before = len(submitted(core))
        core.step()
        assert len(submitted(core)) == before + 1
    assert core.scheduler.stats().policy_stalls == 0


@pytest.mark.parametrize("seed", [0, 7, 9, 11])
def test_prompts_do_not_take_the_block_that_a_row_needs_next(seed: int) -> None:
    """Again and again they would start in its block and yield it, and nobody got a token."""
    rng = random.Random(seed)
    core = make_core(
        slack_decode_share=0.001,
        scheduling_policy="slack",
        num_blocks=6,
        max_num_seqs=4,
        depth=2,
        max_num_batched_tokens=rng.choice([1, 2, 4]),
    )
    for turn in range(150):
        if turn % 3 == 0:
            add(core, f"{turn}", [turn % 50] * rng.randint(1, 12), max_tokens=rng.randint(1, 12), ignore_eos=True)
        core.step()
    assert core.scheduler.stats().policy_stalls == 0
