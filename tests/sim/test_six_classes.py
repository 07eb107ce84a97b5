"""Six classes with objectives on a simulated GPU: drafts make room for more requests, and never less."""

import random
from dataclasses import replace
from functools import cache
from statistics import fmean

import pytest

from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival

# Qwen3-8B in bf16 on an H200; the costs of drafts are estimates.
PLAIN = CostParams(step_s=4.57e-3, token_s=17.2e-6, pair_s=3.9e-9, row_s=13.5e-6, context_s=34e-9)
COST = replace(PLAIN, drafts=DraftCost(0.3e-3, 0.1e-3, 8e-6, 17e-6, 2e-9))
TTFT_TPOT_S = [(0.13, 0.008), (0.53, 0.008), (0.8, 0.008), (0.13, 0.013), (0.27, 0.013), (2.0, 0.013)]
SECONDS = 2.0


@cache
def good_share(
    rate: float,
    acceptance: float | None,
    cost: CostParams = COST,
    known: CostParams | None = PLAIN,
    seconds: float = SECONDS,
) -> float:
    """Return the share of the requests that meet their objectives. `known`: costs that the scheduler starts with."""
    rng, arrivals, at_s = random.Random(0), list[Arrival](), 0.0
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        slo = Slo(*rng.choice(TTFT_TPOT_S))
        arrivals.append(Arrival(at_s, [5] * rng.randint(32, 1024), rng.randint(16, 512), slo))
    shares = (acceptance,) * 4 if acceptance else ()
    machine = Machine(cost, num_blocks=20_000, prefix_caching=False, acceptance=shares)
    config = scheduler_config(max_num_seqs=512, max_num_batched_tokens=2048)
    estimates = Estimates(cost=CostModel() if known is None else CostModel(known))
    return fmean(life.good for life in simulate(arrivals, config, machine, estimates=estimates).lifetimes)


def test_likely_drafts_serve_more_requests() -> None:
    assert good_share(50, 0.6, seconds=3.0) > good_share(50, None, seconds=3.0) + 0.05


@pytest.mark.exhaustive
def test_unlikely_drafts_serve_hardly_fewer() -> None:
    assert good_share(50, 0.4) > good_share(50, None) - 0.01


@pytest.mark.exhaustive
@pytest.mark.parametrize("many_draft_s", [20e-6, 40e-6])
def test_a_cold_engine_serves_hardly_fewer(many_draft_s: float) -> None:
    """Costs are as measured on an H200 (28 November 2026), and unknown at first."""
    plain = CostParams(step_s=4.7e-3, token_s=12.5e-6, pair_s=6.5e-9, row_s=8e-6, context_s=40e-9)
    cost = replace(plain, drafts=DraftCost(1e-3, 30e-6, 16e-6, many_draft_s, 2e-9))
    assert good_share(50, 0.6, cost, None, 12.0) > good_share(50, None, cost, None, 12.0) - 0.01
