"""Window groups on simulated time."""

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.runner import WindowPool
from roseinfer.priced.machine import Machine
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.config import CostConfig
from roseinfer.sim.simulator import SimulationResult, simulate
from tests.sim.test_host_memory import COST, turns


def run(policy: str, windows: tuple[WindowPool, ...], num_kv_blocks: int = 600) -> SimulationResult:
    machine = Machine(COST, max_model_len=8192, num_kv_blocks=num_kv_blocks, windows=windows)
    options = {"scheduling_policy": policy, "max_num_seqs": 32, "overlap": True, "max_num_batched_tokens": 512}
    return simulate(turns(3, 0.2), scheduler_config(**options), machine)


@pytest.mark.parametrize("policy", ["fifo", "slack"])
def test_a_pool_that_forgets_nothing_changes_nothing(policy: str) -> None:
    without, beside = run(policy, ()), run(policy, (WindowPool(256, 20_000),))
    assert beside.reused == without.reused and beside.reused[0] > 0.2
    assert [life.token_s for life in beside.lifetimes] == [life.token_s for life in without.lifetimes]


def test_a_pool_of_two_requests_serves_all_of_them() -> None:
    found = run("fifo", (WindowPool(256, 100),), num_kv_blocks=2000)
    assert all(life.served for life in found.lifetimes)
    assert found.kv_peak > 0.9, "the fullest pool is reported"


def test_windows_are_an_option_of_simulate() -> None:
    assert CostConfig(kv_windows="1024:4000,128:600").machine.windows == (WindowPool(1024, 4000), WindowPool(128, 600))
    for wrong in ("1024", "0:5", "a:5", "5:-1"):
        with pytest.raises(ConfigError, match="kv_windows"):
            CostConfig(kv_windows=wrong)
    with pytest.raises(ConfigError, match="num_host_blocks"):
        CostConfig(kv_windows="128:600", num_host_blocks=5)
    with pytest.raises(ConfigError, match="window of 4096"):
        run("fifo", (WindowPool(4096, 20),))
