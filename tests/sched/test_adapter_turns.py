"""Adapters that share a slot: their requests run in turn, keep what they hold, and none starves."""

import pytest

from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Cause, Slo
from roseinfer.engine.core import EngineCore
from roseinfer.sched.adapter_turns import MIN_TURN_STEPS
from roseinfer.sched.adapters import DRAIN_AFTER_S
from roseinfer.sched.liveness import MAX_IDLE_TURNS
from tests.helpers.engines import add, run_dry, submitted
from tests.helpers.fake_adapters import SIZE, adapter
from tests.sched.test_adapters import A, B, C, loads, make, steps
from tests.sched.test_liveness import Silent

PATIENT = Slo(tpot_s=0.1)  # ten steps of `steps`
STEP_S = 0.01


def start(core: EngineCore, names: str, slo: Slo | None = PATIENT, max_tokens: int = 60) -> None:
    """Add requests for the adapters of these names, each after ten steps of the earlier ones."""
    for name in names:
        add(core, name, [5, 6, 7], adapter=adapter(name), ignore_eos=True, slo=slo, max_tokens=max_tokens)
        steps(core, 10, STEP_S)


def computed(core: EngineCore) -> str:
    """Return the names of the requests that have computed, in order, one for consecutive steps."""
    found = ""
    for plan in submitted(core):
        for row in plan.rows:
            name = row.request_id.partition(":")[0]
            found += name if not found.endswith(name) else ""
    return found


def rows(core: EngineCore, name: str) -> int:
    return sum(row.request_id == f"{name}:0" for plan in submitted(core) for row in plan.rows)


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_of_a_shared_slot_run_in_turn(depth: int) -> None:
    core = make(1, pinned=(A, B, C), depth=depth)
    start(core, "abc")
    run_dry(core)
    outputs = [row.request_id for plan in submitted(core) for row in plan.rows if row.sample]
    assert [outputs.count(f"{name}:0") for name in "abc"] == [60] * 3
    assert any(3 * order in computed(core) for order in ("abc", "acb")), "the longest absent adapter is next"
    stats = core.stats().adapters
    assert stats.loads == len(loads(core)) > 9 and stats.evictions == stats.loads - 1
    assert {load.slot for plan in submitted(core) for load in plan.adapter_loads} == {0}
    assert core.stats().preemptions == 0


@pytest.mark.parametrize("slo", [None, Slo(ttft_s=10.0), Slo(tpot_s=2 * STEP_S)])
def test_slots_are_not_shared_without_time_to_sit_out(slo: Slo | None) -> None:
    core = make(1, pinned=(A, B))
    start(core, "ab", slo)
    run_dry(core)
    assert computed(core) == "ab" and len(loads(core)) == 2


def test_a_shared_slot_serves_one_adapter_again_when_the_other_has_no_requests() -> None:
    core = make(1, pinned=(A, B))
    start(core, "ab")
    core.abort(["b:0"])
    steps(core, 3 * MIN_TURN_STEPS, STEP_S)
    count = len(loads(core))
    run_dry(core)
    assert len(loads(core)) == count and computed(core).endswith("a")


def test_a_request_that_sits_out_may_end() -> None:
    core = make(1, pinned=(A, B))
    start(core, "ab")
    while not core.scheduler.adapters.sitting_out:
        steps(core, 1, STEP_S)
    (request,) = core.scheduler.adapters.sitting_out
    core.abort([request.request_id])
    done = run_dry(core)
    assert done[request.request_id].reason is FinishReason.ABORT and len(done) == 2 and core.stats().blocks_used == 0


def test_steps_that_a_request_sits_out_are_counted() -> None:
    core = make(1, pinned=(A, B))
    start(core, "ab")
    done = run_dry(core)
    assert all(each.end.why.sat_out > MIN_TURN_STEPS for each in done.values())


def test_copies_of_adapters_in_turn_stay_in_host_memory() -> None:
    core = make(1, host=2)
    start(core, "abcd")
    assert core.stats().adapters.host_bytes <= 3 * SIZE, "one above the budget is read so that it can wait for the slot"
    done = run_dry(core)
    assert len(done) == 4 and core.stats().adapters.reads == 4


def test_a_request_waits_for_the_turn_of_its_adapter() -> None:
    core = make(1, pinned=(A, B))
    start(core, "ab")
    slots = core.scheduler.adapters
    while slots.wait_s(A) < STEP_S:
        steps(core, 1, STEP_S)
    assert slots.wait_s(A) < 2 * MIN_TURN_STEPS * STEP_S
    add(core, "late", [5, 6, 7], adapter=A, slo=PATIENT)
    done = steps(core, 6 * MIN_TURN_STEPS, STEP_S)
    assert Cause.ADAPTER in dict(done["late:0"].end.why.waited)


def test_a_policy_that_schedules_nothing_is_overruled_while_adapters_take_turns() -> None:
    core = make(1, pinned=(A, B))
    start(core, "ab")
    core.scheduler.policy = Silent()
    steps(core, 40 * MAX_IDLE_TURNS, STEP_S)
    assert core.stats().policy_stalls > 20


@pytest.mark.parametrize("depth", [1, 2])
def test_turns_go_on_while_other_adapters_are_loaded_in_every_step(depth: int) -> None:
    """All requests but two of a shared slot end at once, and leave their slots to the next."""
    others = [adapter(f"x{number}") for number in range(200)]
    core = make(5, pinned=(*map(adapter, "abcdef"), *others), depth=depth, host=300, max_num_seqs=64)
    start(core, "abcdef", max_tokens=100)
    core.abort([f"{name}:0" for name in "bcde"])
    before = len(loads(core))
    for each in others:
        add(core, each.name, [5, 6, 7], adapter=each, max_tokens=1)
    steps(core, 100, STEP_S)
    found = [slot for slot, _ in loads(core)[before:]]
    assert 7 <= found.count(0) <= 12 and len(found) > 70, found


def test_an_adapter_takes_no_turn_while_its_requests_find_no_seat() -> None:
    core = make(1, pinned=(A, B, C), max_num_seqs=2)
    start(core, "abc", max_tokens=100)
    steps(core, 6 * MIN_TURN_STEPS, STEP_S)
    assert C.digest not in [digest for _, digest in loads(core)]
    done = run_dry(core)
    assert len(done) == 3 and len(done["c:0"].tokens) == 100


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lacking", ["seats", "blocks"])
def test_requests_that_cannot_start_leave_a_running_one_its_steps(lacking: str, depth: int) -> None:
    seats, prompt = (1, [5, 6, 7]) if lacking == "seats" else (8, list(range(5, 45)) * 6)  # 60 of 64 blocks
    core = make(1, pinned=(A, B), depth=depth, max_num_seqs=seats)
    start(core, "a", max_tokens=200)
    add(core, "b", prompt, adapter=B, ignore_eos=True, slo=PATIENT)
    core.clock.advance(2 * DRAIN_AFTER_S)
    rows_before = rows(core, "a")
    steps(core, 60, STEP_S)
    assert rows(core, "a") - rows_before >= 45
    done = run_dry(core)
    assert len(done) == 2 and len(done["b:0"].tokens) == 8


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi", "qoserve", "scorpio", "slack"])
@pytest.mark.parametrize("depth", [1, 2])
def test_many_adapters_with_objectives_all_finish_on_two_slots(policy: str, depth: int) -> None:
    core = make(2, scheduling_policy=policy, depth=depth, max_num_seqs=16)
    for round in range(2):
        for number in range(11):
            slo = PATIENT if number % 2 else None
            add(core, f"{number}.{round}", [5, 6, number + 10], adapter=adapter(str(number)), ignore_eos=True, slo=slo)
    done = steps(core, 3, STEP_S) | run_dry(core)
    assert {each.reason for each in done.values()} == {FinishReason.LENGTH} and len(done) == 22
    assert core.stats().policy_stalls == 0
