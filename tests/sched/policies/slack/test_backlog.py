"""Backlog of the slack policy: requests that wait, that were preempted, and that have ended."""

import random
from typing import Any

import pytest

from roseinfer.core.request import Prompt, RequestMeta, Status
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.policy import Queued
from tests.helpers.engines import Collected, assert_empty, gather, make_core, run_dry
from tests.sched.policies.slack.test_slack import state
from tests.sched.queues import State

MANY = 300


def add(core: EngineCore, name: str, slo: Slo | None = None, n: int = 1, **options: Any) -> None:
    params = SequenceParams(max_tokens=4, ignore_eos=True)
    core.add(Add(name, Prompt([1] * 4, params, RequestMeta(slo=slo, arrival_s=1.0, **options)), n))


def kept(core: EngineCore) -> int:
    backlog = core.scheduler.policy.state.backlog
    return sum(map(len, (backlog.affordable, backlog.parked, backlog.rest)))


# --- requests that are gone -------------------------------------------------------------------------------------
@pytest.mark.parametrize("slo", [None, Slo(ttft_s=1e6), Slo(ttft_s=1e6, tpot_s=10.0)])
def test_requests_that_are_gone_are_forgotten(slo: Slo | None) -> None:
    """Another policy decides while no request has objectives, and a far objective is never overdue."""
    core = make_core(scheduling_policy="slack")
    for i in range(MANY):
        add(core, f"{i}", slo)
        run_dry(core)
    assert kept(core) == 0


def test_many_that_wait_at_a_time_are_all_kept() -> None:
    core = make_core(scheduling_policy="slack", max_num_seqs=2)
    for i in range(MANY):
        add(core, f"{i}", priority=i % 3)
    core.step()
    assert kept(core) >= MANY - 2
    add(core, "promised", Slo(ttft_s=1e6, tpot_s=10.0))
    done = run_dry(core)
    assert len(done) == MANY + 1 and all(each.end is not None for each in done.values())


def test_limits_of_requests_that_are_gone_are_forgotten() -> None:
    core = make_core()
    for i in range(MANY):
        add(core, f"{i}", deadline_s=1e9)
        run_dry(core)
    assert len(core.scheduler.roster.expiries) < MANY / 2


# --- requests that wait again -----------------------------------------------------------------------------------
def preempted(made: State, name: str) -> None:
    """One that starts and yields before the policy looks at its queue again."""
    request = made.wait(name, 10, tpot_s=0.050)
    made.start(request)
    request.status, request.seat, request.preemptions = Status.WAITING, None, 1
    made.running.remove(request)
    made.waiting.append(request)
    made.policy.observe(Queued(request))


def test_one_that_was_preempted_waits_once() -> None:
    made = state()
    preempted(made, "again")
    backlog = made.policy.state.backlog
    assert [track.request.request_id for track in backlog.affordable] == ["again"]
    backlog.sort_by_price(lambda track: True)
    assert len(backlog.affordable) == 1
    assert made.admitted(made.begin()) == {"again": 10}


@pytest.mark.parametrize("seed", [4, 20, 26])
def test_preemption_beside_objectives(seed: int) -> None:
    """Few blocks and many requests, with and without objectives, so that the same ones start, yield and wait."""
    rng = random.Random(seed)
    core = make_core(scheduling_policy="slack", num_blocks=24, max_num_batched_tokens=64)
    choices = [None, Slo(ttft_s=1.0, tpot_s=0.5), Slo(ttft_s=100.0, tpot_s=5.0), Slo(tpot_s=1.0)]
    for turn in range(400):
        if turn < 200 and rng.random() < 0.3:
            params = SequenceParams(max_tokens=rng.randrange(1, 40), ignore_eos=True)
            prompt, n, slo = [5] * rng.randrange(1, 20), rng.choice([1, 1, 3]), rng.choice(choices)
            core.add(Add(f"{turn}", Prompt(prompt, params, RequestMeta(arrival_s=1.0 + core.clock.now(), slo=slo)), n))
        core.clock.advance(rng.choice([0.001, 0.01]))
        core.step()
        core.scheduler.check_integrity()
    run_dry(core)
    assert_empty(core)
    assert core.stats().preemptions > 0


# --- objectives beyond all measure ------------------------------------------------------------------------------
EXTREMES = [
    Slo(e2e_s=5e-324),
    Slo(e2e_s=1e-323),
    Slo(tpot_s=5e-324),
    Slo(ttft_s=5e-324, tpot_s=1.7e305),
    Slo(ttft_s=1.7e305, tpot_s=1.7e305, e2e_s=1.7e305),
]


@pytest.mark.parametrize("slo", EXTREMES, ids=str)
@pytest.mark.parametrize("policy", ["slack", "scorpio", "qoserve"])
def test_no_objective_stops_the_engine(policy: str, slo: Slo) -> None:
    core = make_core(scheduling_policy=policy)
    add(core, "before", Slo(ttft_s=1e3, tpot_s=10.0))
    add(core, "extreme", slo, n=2)
    done: dict[str, Collected] = {}
    gather(core.step(), done)
    add(core, "behind", Slo(ttft_s=1e3, tpot_s=10.0))
    run_dry(core, done)
    assert len(done["before:0"].tokens) == len(done["behind:0"].tokens) == 4
    assert done["extreme:1"].end is not None


def test_an_endless_objective_does_not_stop_the_prompts_of_others() -> None:
    made = state()
    made.run("endless", 2000, tpot_s=1.7e305)
    made.wait("other", 500, ttft_s=9.0, tpot_s=0.050)
    assert made.admitted(made.begin()) == {"other": 500}


def test_a_pace_that_no_step_can_keep_is_refused_even_while_every_seat_is_taken() -> None:
    made = state(seats=0)
    made.policy.state.cost.steps = 50
    made.run("a", tpot_s=0.050)
    made.wait("free", 10, predicted=1)
    made.now_s = 20.0
    made.wait("b", 10, tpot_s=0.005)
    assert made.rejected(made.begin())["b"].reason == "tpot"
