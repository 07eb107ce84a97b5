"""Recurrent states on simulated time: slots limit how many requests run, and steps pay for states that they move."""

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import Row, SlotCopy, StateChanges, StateSnapshot, StepPlan
from roseinfer.core.runner import StatePool
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.config import CostConfig
from roseinfer.sim.engine import FixedLengthRunner
from roseinfer.sim.simulator import SimulationResult, simulate
from tests.sim.test_host_memory import COST, turns


def run(policy: str, slots: int | None) -> SimulationResult:
    states = None if slots is None else StatePool(slots, 0)
    machine = Machine(COST, max_model_len=8192, num_kv_blocks=2000, states=states)
    options = {"scheduling_policy": policy, "max_num_seqs": 32, "overlap": True, "max_num_batched_tokens": 512}
    return simulate(turns(3, 0.2), scheduler_config(**options), machine)


@pytest.mark.parametrize("policy", ["fifo", "slack"])
def test_later_turns_find_nearly_what_they_find_without_states(policy: str) -> None:
    without, with_states, few = (run(policy, slots) for slots in (None, 200, 2))
    assert without.reused[0] > 0.6
    assert without.reused[0] - 0.05 < with_states.reused[0] < without.reused[0]
    assert few.reused[0] < with_states.reused[0]
    assert all(life.served for found in (with_states, few) for life in found.lifetimes if policy == "fifo")


def test_steps_pay_for_the_states_that_they_move() -> None:
    config = CostConfig(step_ms=1.0, token_us=1.0, row_us=2.0, context_ns=0.0, state_slots=8, state_us=100.0)
    machine = config.machine
    assert machine.states == StatePool(8, 0) and machine.cost.row_s == pytest.approx(102e-6)
    decode, chunk = (Row("a", 0, 5, count, 1, True, 5, 0, ()) for count in (1, 10))

    def seconds(rows: list[Row], states: StateChanges | None = None) -> float:
        runner = PricedRunner(FixedLengthRunner(), machine, ManualClock())
        return runner.submit(StepPlan(0, rows, states=states)).duration_s

    assert seconds([decode, decode]) == pytest.approx(1e-3 + 2 * 102e-6)
    assert seconds([decode, chunk]) == pytest.approx(1e-3 + 102e-6 + 10e-6 + 100e-6)
    moved = StateChanges(copies=(SlotCopy(1, 2),), snapshots=(StateSnapshot(0, 1, 3), StateSnapshot(0, 2, 4)))
    assert seconds([chunk], moved) - seconds([chunk]) == pytest.approx(200e-6)


def test_states_are_an_option_of_simulate() -> None:
    assert CostConfig().machine.states is None
    for wrong in ({"state_slots": 0}, {"state_us": 5.0}):
        with pytest.raises(ConfigError, match="state_slots"):
            CostConfig(**wrong)


def test_turns_come_back_from_states_in_host_memory() -> None:
    """Twelve conversations take turns, and the slots hold the snapshots of three."""
    found = []
    for host_slots in (0, 60):
        machine = Machine(
            COST,
            max_model_len=8192,
            num_kv_blocks=2000,
            num_host_blocks=2000,
            states=StatePool(8, 0),
            num_host_slots=host_slots,
        )
        result = simulate(turns(3, 0.2), scheduler_config(max_num_seqs=4, max_num_batched_tokens=512), machine)
        assert all(life.served for life in result.lifetimes) and result.stats.states is not None
        assert (result.stats.states.loaded > 0) == (host_slots > 0)
        found.append(sum(result.reused))
    assert found[1] > found[0] + 0.1, found
