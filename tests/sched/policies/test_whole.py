"""Objectives for whole requests under policies that otherwise know of first tokens and of paces only."""

from math import inf

import pytest

from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.common.ledger import Track, e2e_pace_s, latest_first_token_s
from roseinfer.sched.policies.qoserve import MAX_CHUNK_TOKENS, QoServePolicy
from roseinfer.sched.policies.scorpio import ScorpioPolicy
from roseinfer.sched.policy import Ended
from roseinfer.sched.registry import options_of, scheduler_config
from roseinfer.sim.distributions import Uniform
from roseinfer.sim.length_hints import NoisyHints
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import TrafficClass, Workload
from tests.helpers.cases import cases
from tests.sched.queues import State

COST = CostParams(step_s=0.010, token_s=1e-3, pair_s=0.0, row_s=0.0, context_s=0.0)


def state(kind: type[QoServePolicy] | type[ScorpioPolicy], cost: CostParams = COST, budget: int = 2048) -> State:
    config = scheduler_config(scheduling_policy="qoserve" if kind is QoServePolicy else "scorpio")
    known = Estimates(CostModel(cost, fit=False), OracleLengths())
    return State(kind(config, options_of(config), known), budget=budget)


def test_the_first_token_is_due_while_the_others_can_be_in_time() -> None:
    track = Track(state(QoServePolicy).wait("a", 100, predicted=50, e2e_s=2.0))
    assert track.end_s == 2.0
    assert latest_first_token_s(track, 50, COST) == pytest.approx(2.0 - 49 * 0.010)
    assert latest_first_token_s(track, 50, CostParams(0.010, 0.0, 0.0, 0.005, 1e-3)) == pytest.approx(2.0 - 49 * 0.140)
    assert e2e_pace_s(track, 1.0, 50) == pytest.approx(0.020)
    assert e2e_pace_s(track, 3.0, 50) == 0.0
    bare = Track(state(QoServePolicy).wait("b", ttft_s=1.0))
    assert (bare.end_s, latest_first_token_s(bare, 50, COST), e2e_pace_s(bare, 0.0, 50)) == (inf, inf, inf)


def test_qoserve_orders_prompts_by_what_their_deadlines_leave() -> None:
    """Equal prompts: the later deadline belongs to the longer output, and comes first."""
    queue = state(QoServePolicy, budget=20)
    queue.wait("short", 20, predicted=10, e2e_s=3.0)
    queue.wait("long", 20, predicted=250, e2e_s=4.0)
    assert queue.admitted(queue.begin()) == {"long": 20}


def test_qoserve_lets_those_wait_behind_that_can_no_longer_be_in_time() -> None:
    queue = state(QoServePolicy, budget=20)
    queue.wait("late", 20, predicted=400, e2e_s=3.0)
    queue.wait("good", 20, predicted=10, e2e_s=3.0)
    assert queue.admitted(queue.begin()) == {"good": 20}


def test_qoserve_paces_tokens_to_the_deadline() -> None:
    """49 tokens in 1.96 s, 40 ms each less the margin of 5%: 28 ms beside the step's own 10 ms are 28 tokens."""
    queue = state(QoServePolicy)
    queue.now_s = 0.04
    queue.run("a", 100, predicted=50, e2e_s=1.96)
    queue.wait("b", 1000, ttft_s=9.0)
    (tokens,) = queue.admitted(queue.begin()).values()
    assert tokens == pytest.approx(0.95 * 40 - 10, abs=1)


def test_qoserve_waits_for_no_deadline_that_is_out_of_reach() -> None:
    queue = state(QoServePolicy)
    queue.now_s = 0.04
    queue.run("a", 100, predicted=500, e2e_s=1.0)
    queue.wait("b", 3000, ttft_s=9.0)
    assert queue.admitted(queue.begin()) == {"b": min(MAX_CHUNK_TOKENS, 2047)}


def test_qoserve_sets_a_new_pace_for_who_outlives_the_expectation() -> None:
    queue = state(QoServePolicy)
    queue.now_s = 0.04
    queue.run("a", 100, predicted=10, e2e_s=3.0)
    rooms = []
    for _ in range(12):
        queue.now_s += 0.010
        decision = queue.begin()
        rooms.append(queue.policy.stats().step_budget_s)
        queue.decode(decision)
    assert min(rooms[:10]) > 0.25, "3 s for ten tokens"
    assert rooms[-1] > 0.25, "the last tokens are as many as are expected then"


def test_scorpio_refuses_whose_tokens_cannot_be_in_time_any_more() -> None:
    queue = state(ScorpioPolicy)
    queue.wait("hopeless", 20, predicted=400, e2e_s=3.0)
    queue.wait("good", 20, predicted=100, e2e_s=3.0)
    decision = queue.begin()
    assert queue.rejected(decision).keys() == {"hopeless"}
    assert queue.admitted(decision) == {"good": 20}


def test_scorpio_looks_at_the_tighter_of_two_objectives() -> None:
    queue = state(ScorpioPolicy)
    queue.wait("a", 20, predicted=10, ttft_s=2.0, e2e_s=1.0)
    queue.wait("b", 20, predicted=10, ttft_s=0.5, e2e_s=2.0)
    queue.begin()
    tracks = queue.policy.ledger.waiting
    assert (tracks["a"].due_s, tracks["b"].due_s) == (pytest.approx(1.0 - 9 * 0.010), 0.5)


def test_lengths_are_learnt_by_qoserve_too() -> None:
    ended = []
    config = scheduler_config(scheduling_policy="qoserve")
    known = Estimates(CostModel(COST))
    known.lengths.finished = lambda request, outputs: ended.append(outputs)
    queue = State(QoServePolicy(config, options_of(config), known))
    for name, reason in (("a", FinishReason.STOP), ("b", FinishReason.ABORT)):
        queue.run(name)
        queue.policy.observe(Ended(name, 1.0, reason, 7))
    assert ended == [7]


@cases("policy", ["qoserve"], exhaustive=["scorpio"])
def test_they_keep_more_deadlines_than_fifo_beside_long_prompts(policy: str) -> None:
    """Nine of ten are short and due in 4 s, one has thousands of tokens and 15 s, on a machine where these are dear."""
    cost = CostParams(4.57e-3, 17.2e-6, 3.9e-9, 13.5e-6, 34e-9)
    machine = Machine(cost, max_model_len=32768, num_blocks=27000, prefix_caching=False)
    outputs = Uniform(16, 512)
    classes = [
        TrafficClass("short", Uniform(32, 1024), outputs, Slo(e2e_s=4.0), 9),
        TrafficClass("long", Uniform(8000, 30000), outputs, Slo(e2e_s=15.0), 1),
    ]
    arrivals = Workload(classes, 12.0, hints=NoisyHints(195.0)).requests(120, 0)
    kept = {}
    for name in (policy, "fifo"):
        known = Estimates(CostModel(machine.cost), OracleLengths())
        options = {"scorpio_mixed": True} if name == "scorpio" else {}
        lives = simulate(arrivals, scheduler_config(scheduling_policy=name, **options), machine, estimates=known)
        kept[name] = sum(life.good for life in lives.lifetimes) / 120
    assert kept[policy] > kept["fifo"] + 0.02
