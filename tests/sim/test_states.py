"""Recurrent states on simulated time: slots limit how many requests run, and steps pay for states that they move."""

import random
from operator import itemgetter

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import Row, SlotCopy, StateChanges, StateSnapshot, StepPlan
from roseinfer.core.runner import StatePool
from roseinfer.core.slo import Cause, Slo
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.config import CostConfig
from roseinfer.sim.engine import FixedLengthRunner
from roseinfer.sim.simulator import SimulationResult, simulate
from roseinfer.sim.workload import Arrival
from tests.helpers.cases import cases
from tests.sim.test_host_memory import COST, turns


def run(policy: str, slots: int | None) -> SimulationResult:
    states = None if slots is None else StatePool(slots, 0)
    machine = Machine(COST, max_model_len=8192, num_blocks=2000, states=states)
    options = {"scheduling_policy": policy, "max_num_seqs": 32, "overlap": True, "max_num_batched_tokens": 512}
    return simulate(turns(3, 0.2), scheduler_config(**options), machine)


@cases("policy", ["fifo"], exhaustive=["slack"])
def test_later_turns_find_nearly_what_they_find_without_states(policy: str) -> None:
    without, with_states, few = (run(policy, slots) for slots in (None, 200, 2))
    assert without.reused[0] > 0.6
    assert without.reused[0] - 0.05 < with_states.reused[0] < without.reused[0]
    assert few.reused[0] < with_states.reused[0]
    assert all(life.served for found in (with_states, few) for life in found.lifetimes if policy == "fifo")


def test_steps_pay_for_the_states_that_they_move_and_policies_know_it() -> None:
    costs = {"step_ms": 1.0, "token_us": 1.0, "row_us": 2.0, "context_ns": 20.0, "pair_ns": 0.0}
    config = CostConfig(**costs, state_slots=8, state_us=100.0)
    machine, context_s = config.machine, 6 * 20e-9
    assert machine.states == StatePool(8, 0) and machine.cost.row_s == pytest.approx(102e-6)
    decode, chunk = (Row("a", 0, 5, count, 1, True, 5, 0, ()) for count in (1, 10))

    def seconds(rows: list[Row], states: StateChanges | None = None) -> float:
        runner = PricedRunner(FixedLengthRunner(), machine, ManualClock())
        return runner.submit(StepPlan(0, rows, states=states)).duration_s

    assert seconds([decode, decode]) == pytest.approx(1e-3 + 2 * (102e-6 + context_s))
    own_s = 10e-6 + 100e-6 + 5 * 20e-9
    assert seconds([decode, chunk]) == pytest.approx(1e-3 + 102e-6 + context_s + own_s)
    assert machine.belief.prefill_s(5, 10) == pytest.approx(own_s)
    moved = StateChanges(copies=(SlotCopy(1, 2),), snapshots=(StateSnapshot(0, 1, 3), StateSnapshot(0, 2, 4)))
    assert seconds([chunk], moved) - seconds([chunk]) == pytest.approx(200e-6)


@cases("policy", ["slack"], exhaustive=["qoserve", "scorpio"])
def test_the_cost_model_of_a_policy_predicts_steps_with_states(policy: str) -> None:
    machine = CostConfig(max_model_len=8192, state_slots=200, state_us=300.0).machine
    options = {"scheduling_policy": policy, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    errors = [error for error, _ in simulate(turns(3, 0.2), scheduler_config(**options), machine).cost_errors]
    assert max(errors) < 1e-6 and len(errors) > 100


def short_of_slots(rest: int) -> list[Arrival]:
    """Return `rest` long requests without objectives, then ones with objectives that four slots cannot serve."""
    rng = random.Random(1)
    first = [Arrival(0.0, [rng.randrange(3, 900) for _ in range(200)], 1500) for _ in range(rest)]
    later = [
        Arrival(1.0 + 0.08 * i, [rng.randrange(3, 900) for _ in range(200)], rng.randrange(40, 160), Slo(1.0, 0.05))
        for i in range(100)
    ]
    return first + later


def simulated(policy: str, arrivals: list[Arrival]) -> SimulationResult:
    machine = Machine(COST, max_model_len=4096, num_blocks=4000, states=StatePool(4, 0))
    return simulate(arrivals, scheduler_config(scheduling_policy=policy, max_num_batched_tokens=512), machine)


@cases("policy", ["slack"], exhaustive=["scorpio"])
def test_objectives_are_kept_or_refused_for_want_of_a_slot(policy: str) -> None:
    found = simulated(policy, short_of_slots(0)).lifetimes
    served = [life for life in found if life.served]
    assert len(served) > 60 and all(life.good for life in served)
    causes = {life.rejection.cause for life in found if life.rejection is not None}
    assert len(served) < len(found) and causes == {Cause.SLOTS}
    waits = [max(life.waited, key=itemgetter(1))[0] for life in found if sum(s for _, s in life.waited) > 0.1]
    assert set(waits) == {Cause.SLOTS} and len(waits) > 50


def test_requests_without_objectives_give_their_slots_up_once_as_they_do_with_blocks() -> None:
    result = simulated("slack", short_of_slots(4))
    rest, promised = result.lifetimes[:4], result.lifetimes[4:]
    assert all(life.served for life in rest) and 0 < result.preemptions <= 4
    assert sum(life.good for life in promised) > 50 and all(life.good for life in promised if life.served)
    assert {life.rejection.cause for life in promised if life.rejection is not None} == {Cause.SLOTS}


def test_states_are_an_option_of_simulate() -> None:
    assert CostConfig().machine.states is None
    for wrong in ({"state_slots": 0}, {"state_us": 5.0}):
        with pytest.raises(ConfigError, match="state_slots"):
            CostConfig(**wrong)
    with pytest.raises(ConfigError, match="state_us needs context_ns"):
        CostConfig(state_slots=5, state_us=5.0, context_ns=0.0).machine  # noqa: B018


def test_turns_come_back_from_states_in_host_memory() -> None:
    """Twelve conversations take turns, and the slots hold the snapshots of three."""
    found = []
    for host_slots in (0, 60):
        machine = Machine(
            COST,
            max_model_len=8192,
            num_blocks=2000,
            num_host_blocks=2000,
            states=StatePool(8, 0),
            num_host_slots=host_slots,
        )
        result = simulate(turns(3, 0.2), scheduler_config(max_num_seqs=4, max_num_batched_tokens=512), machine)
        assert all(life.served for life in result.lifetimes) and result.stats.states is not None
        assert (result.stats.states.loaded > 0) == (host_slots > 0)
        found.append(sum(result.reused))
    assert found[1] > found[0] + 0.1, found
