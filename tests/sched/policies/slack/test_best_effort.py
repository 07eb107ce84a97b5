"""Requests without objectives beside many that have them, on simulated time: slow, but never starved."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from roseinfer.core.slo import Slo
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policies.slack.terms import AGEING_S, MAX_IDLE_S
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import Lifetime, simulate
from roseinfer.sim.workload import Arrival
from tests.sched.policies.slack.test_slack import state


def beside(
    promised: list[Arrival], others: list[Arrival], *, seats: int, blocks: int, kept: bool = False
) -> list[Lifetime]:
    """Simulate both and return the lifetimes of `others`, by arrival. kept: assert that all of `promised` are good."""
    arrivals = sorted([*promised, *others], key=lambda arrival: arrival.at_s)
    config = scheduler_config(max_num_seqs=seats, max_num_batched_tokens=2048)
    run = simulate(arrivals, config, replace(SCORPIO_8B.machine, num_blocks=blocks))
    ended_s = max(life.token_s[-1] for life in run.lifetimes if life.slo is not None and life.token_s)
    found = [life for life in run.lifetimes if life.slo is None]
    assert not kept or all(life.good for life in run.lifetimes if life.slo is not None)
    assert ended_s > max(life.arrival_s for life in found) + AGEING_S + 2, "the others are still there"
    return found


def queue(count: int, rate: float | None, slo: Slo, output: int = 200) -> list[Arrival]:
    rng = random.Random(0)
    lengths = [rng.randrange(output // 10, 2 * output) for _ in range(count)]
    return [Arrival(i / rate if rate else 0.0, [1] * 100, n, slo, n) for i, n in enumerate(lengths)]


def test_one_seat_in_a_second_is_theirs_though_others_wait_for_all_of_them() -> None:
    """300 with objectives on 64 seats: each seat that came free went to one of those until none was left."""
    others = [Arrival(0.5, [2] * 50, 20, None, 20) for _ in range(4)]
    found = beside(queue(300, None, Slo(60.0, 0.1)), others, seats=64, blocks=20_000, kept=True)
    waits = sorted(life.ttft_s for life in found)
    for number, wait_s in enumerate(waits):
        assert wait_s < AGEING_S + number * MAX_IDLE_S + 1.0
    starts = sorted(life.token_s[0] for life in found)
    assert all(later - earlier > 0.9 * MAX_IDLE_S for earlier, later in pairwise(starts))


@pytest.mark.parametrize(("planned", "cached"), [(4000, 0), (1000, 0), (4000, 1500)])
def test_the_next_one_follows_after_ten_times_what_the_prompt_takes(planned: int, cached: int) -> None:
    """The wait does not depend on the first chunk, which is planned before the scheduler reports the start."""
    made = state(CostParams(0.010, 1e-4, 0.0, 0.001, 0.0))
    made.run("promised", tpot_s=0.050)
    rest = made.wait("rest", 4000)
    rest.computed, rest.planned, rest.pending = cached, planned, planned == 4000
    made.start(rest)
    assert made.policy.state.rest_again_s == pytest.approx(10 * (4000 - cached) * 1e-4)


def test_kv_blocks_are_kept_for_the_one_whose_turn_it_is() -> None:
    """A prompt of a quarter of the cache: those that came free went to the next short one, at once. Until so many have
    come free takes 1 to 4 s, by which outputs happen to run.
    """
    others = [Arrival(2.0, [2] * 1200, 20, None, 20)]
    found = beside(queue(130, 12.0, Slo(5.0, 0.2)), others, seats=256, blocks=300)
    assert all(life.ttft_s < AGEING_S + 5.0 for life in found), [life.ttft_s for life in found]


def test_a_prompt_gets_tokens_though_decoding_takes_the_whole_step() -> None:
    """Objectives so tight that steps have no room for prompts: the aged one is guarded from its tenth second on."""
    others = [Arrival(5.0, [2] * 600, 20, None, 20)]
    (found,) = beside(queue(600, 30.0, Slo(2.0, 0.025)), others, seats=256, blocks=20_000)
    assert found.ttft_s < AGEING_S + 5.0


@pytest.mark.exhaustive
@pytest.mark.parametrize("slo", [Slo(None, 0.05), Slo(100.0), Slo(e2e_s=60.0)])
def test_whatever_the_others_were_promised(slo: Slo) -> None:
    found = beside(queue(500, None, slo), [Arrival(0.5, [2] * 50, 20, None, 20)], seats=64, blocks=20_000)
    assert found[0].ttft_s < AGEING_S + 1.0
