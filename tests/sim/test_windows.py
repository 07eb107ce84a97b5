"""Window groups on simulated time."""

import random

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import ContextReads, WindowPool
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.config import CostConfig
from roseinfer.sim.simulator import SimulationResult, simulate
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases
from tests.sim.test_host_memory import COST, turns


def run(policy: str, windows: tuple[WindowPool, ...], num_kv_blocks: int = 600) -> SimulationResult:
    machine = Machine(COST, max_model_len=8192, num_blocks=num_kv_blocks, windows=windows)
    options = {"scheduling_policy": policy, "max_num_seqs": 32, "overlap": True, "max_num_batched_tokens": 512}
    return simulate(turns(3, 0.2), scheduler_config(**options), machine)


@cases("policy", ["slack"], exhaustive=["fifo"])
def test_a_pool_that_forgets_nothing_changes_nothing(policy: str) -> None:
    without, beside = run(policy, ()), run(policy, (WindowPool(256, 20_000),))
    assert beside.reused == without.reused and beside.reused[0] > 0.2
    assert [life.token_s for life in beside.lifetimes] == [life.token_s for life in without.lifetimes]


def test_a_pool_of_two_requests_serves_all_of_them() -> None:
    found = run("fifo", (WindowPool(256, 100),), num_kv_blocks=2000)
    assert all(life.served for life in found.lifetimes)
    assert found.kv_peak > 0.9, "the fullest pool is reported"


@cases("policy", ["slack"], exhaustive=["qoserve", "scorpio"])
def test_steps_read_windows_only_and_policies_know_it(policy: str) -> None:
    options = scheduler_config(scheduling_policy=policy, max_num_seqs=32, max_num_batched_tokens=512)
    results = []
    for pools in ("256:9000", "256:9000:0.8"):
        costs = CostConfig(max_model_len=8192, context_ns=500, pair_ns=0, kv_windows=pools)
        results.append(simulate(turns(3, 0.2), options, costs.machine))
        assert max(error for error, _ in results[-1].cost_errors) < 1e-6
    assert results[1].busy_s < 0.95 * results[0].busy_s


def test_windows_are_an_option_of_simulate() -> None:
    assert CostConfig(kv_windows="1024:4000,128:600").machine.windows == (WindowPool(1024, 4000), WindowPool(128, 600))
    shared = CostConfig(kv_windows="1024:4000:.75,128:600:0.2").machine
    assert shared.cost.reads == shared.belief.reads == ContextReads(((1024, 0.75), (128, 0.2)))
    for wrong in ("1024", "0:5", "a:5", "5:-1", "5:5:", "5:5:1.5", "5:5:.6,6:5:.6"):
        with pytest.raises(ConfigError, match="kv_windows"):
            CostConfig(kv_windows=wrong)
    with pytest.raises(ConfigError, match="num_host_blocks"):
        CostConfig(kv_windows="128:600", num_host_blocks=5)
    with pytest.raises(ConfigError, match="window of 4096"):
        run("fifo", (WindowPool(4096, 20),))


def growing(seed: int) -> list[Arrival]:
    """Return requests that arrive together and hold three times their prompt at their end."""
    rng = random.Random(seed)
    return [
        Arrival(i * 0.01, [rng.randrange(3, 900) for _ in range(100)], 200, slo=Slo(20.0, 0.2), predicted_len=200)
        for i in range(60)
    ]


def test_slack_starts_no_more_than_a_window_group_can_hold_at_the_end() -> None:
    """The first pool could hold all of them."""
    machine = Machine(COST, max_model_len=8192, num_blocks=6000, windows=(WindowPool(256, 350),))
    preemptions = {}
    for policy in ("fifo", "slack"):
        options = {"scheduling_policy": policy, "max_num_seqs": 64, "max_num_batched_tokens": 256}
        found = simulate(growing(1), scheduler_config(**options), machine)
        assert all(life.served for life in found.lifetimes)
        preemptions[policy] = found.preemptions
    assert preemptions["fifo"] > 10 > preemptions["slack"]
