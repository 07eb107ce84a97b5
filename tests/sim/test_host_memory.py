"""K/V in host memory on simulated time: conversations whose turns the KV cache forgets in between."""

import random

from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.simulator import SimulationResult, simulate
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases

COST = CostParams(4.6e-3, 17e-6, 4e-9, 13e-6, 34e-9, load_s=45e-6, store_s=45e-6)


def turns(seed: int, gap_s: float) -> list[Arrival]:
    """Twelve conversations that take turns at random, five times each; a turn begins with all before it."""
    rng = random.Random(seed)
    said: list[list[int]] = [[of] for of in range(12)]
    order = [of for of in range(12) for _ in range(5)]
    rng.shuffle(order)
    arrivals, at_s = [], 0.0
    for of in order:
        at_s += rng.expovariate(1 / gap_s)
        said[of] = said[of] + [rng.randrange(3, 900) for _ in range(rng.randrange(300, 900))]
        arrivals.append(Arrival(at_s, list(said[of]), rng.randrange(20, 120), slo=Slo(1.0, 0.05)))
    return arrivals


def run(arrivals: list[Arrival], policy: str, host_blocks: int, cost: CostParams = COST) -> SimulationResult:
    machine = Machine(cost, max_model_len=8192, num_blocks=600, num_host_blocks=host_blocks)
    options = {"scheduling_policy": policy, "max_num_seqs": 32, "overlap": True}
    return simulate(arrivals, scheduler_config(**options), machine)


def mean_ttft_s(found: SimulationResult) -> float:
    served = [life.ttft_s for life in found.lifetimes if life.served]
    return sum(served) / len(served)


def good(found: SimulationResult) -> int:
    return sum(life.good for life in found.lifetimes)


@cases("policy", ["slack"], exhaustive=["fifo"])
def test_turns_come_back_from_host_memory_and_first_tokens_are_sooner(policy: str) -> None:
    arrivals = turns(1, 0.15)
    without, beside = run(arrivals, policy, 0), run(arrivals, policy, 4000)
    assert without.reused[1] == 0 and beside.reused[1] > 0.3
    assert mean_ttft_s(beside) < 0.9 * mean_ttft_s(without)
    assert good(beside) >= good(without) and beside.busy_s < without.busy_s


@cases(
    ("policy", "copy_s"),
    [("slack", 2e-3)],
    exhaustive=[("fifo", 3e-4), ("slack", 3e-4), ("slack", 0.05), ("fifo", 2e-3), ("fifo", 0.05)],
)
def test_over_a_slow_link_it_is_no_slower_than_without(policy: str, copy_s: float) -> None:
    """A block of 16 tokens takes about 0.3 ms to compute."""
    arrivals = turns(2, 0.15)
    cost = CostParams(*COST.values(), load_s=copy_s, store_s=copy_s)
    without, beside = run(arrivals, policy, 0, cost), run(arrivals, policy, 4000, cost)
    assert mean_ttft_s(beside) <= 1.02 * mean_ttft_s(without) and good(beside) >= good(without)
    assert beside.busy_s <= 1.01 * without.busy_s
    if copy_s > 1e-3:
        assert beside.stats.offload.loaded == 0
