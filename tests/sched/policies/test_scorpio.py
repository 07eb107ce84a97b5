"""SCORPIO's guards on its own worked examples."""

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Cause
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.scorpio import ScorpioPolicy, VirtualBatch
from roseinfer.sched.policy import Ended
from roseinfer.sched.registry import options_of, scheduler_config
from tests.sched.queues import State

FREE = CostParams(step_s=1e-6, token_s=0.0, pair_s=0.0, row_s=0.0, context_s=0.0)


def scorpio(cost: CostParams = FREE, **options: object) -> ScorpioPolicy:
    config = scheduler_config(scheduling_policy="scorpio", **{"scorpio_eps": 1.0, **options})
    return ScorpioPolicy(config, options_of(config), Estimates(CostModel(cost, fit=False), OracleLengths()))


def running(*objectives: float, **options: object) -> State:
    state = State(scorpio(**options))
    for i, tpot_s in enumerate(objectives):
        state.run(f"R{i + 1}", tpot_s=tpot_s)
    return state


def test_the_worked_example_over_six_iterations() -> None:
    state = running(2.0, 4.0, 6.0)
    credits, batches = [], []
    for _ in range(6):
        batches.append(state.decode(state.begin()))
        tracks = [state.policy.ledger.decoding[name] for name in ("R2", "R3")]
        credits.append([track.credit + (track.request.request_id in batches[-1]) for track in tracks])
    assert batches == [
        ["R1"],
        ["R1", "R2"],
        ["R1", "R3"],
        ["R1", "R2"],
        ["R1"],
        ["R1", "R2", "R3"],
    ]
    expected = [[1 / 2, 1 / 3], [1, 2 / 3], [1 / 2, 1], [1, 1 / 3], [1 / 2, 2 / 3], [1, 1]]
    assert credits == [pytest.approx(pair) for pair in expected]


def test_credits_return_to_zero_and_turns_follow_the_shares() -> None:
    state = running(2.0, 4.0, 6.0)
    turns = [name for _ in range(12) for name in state.decode(state.begin())]
    assert [turns.count(name) for name in ("R1", "R2", "R3")] == [12, 6, 4]
    assert all(abs(track.credit) < 1e-9 for track in state.policy.ledger.decoding.values())


def test_when_the_tightest_leaves_the_others_speed_up() -> None:
    state = running(2.0, 4.0, 6.0)
    for _ in range(6):
        state.decode(state.begin())
    state.running.pop(0)
    state.policy.observe(Ended("R1", 0.0, FinishReason.STOP, 6))
    batches = [state.decode(state.begin()) for _ in range(7, 13)]
    assert [i for i, batch in enumerate(batches, 7) if "R2" in batch] == [7, 8, 9, 10, 11, 12]
    assert [i for i, batch in enumerate(batches, 7) if "R3" in batch] == [8, 9, 11, 12]


def test_ten_tenths_make_one() -> None:
    state = running(2.0, 20.0)
    turns = [i for i in range(1, 21) if "R2" in state.decode(state.begin())]
    assert turns == [10, 20]


@pytest.mark.parametrize("stagger", [False, True])
def test_each_requests_frequency_converges_to_its_proportionality(stagger: bool) -> None:
    objectives = (20.0, 23.0, 37.0, 51.0, 100.0)
    state = running(*objectives, scorpio_stagger=stagger)
    turns = [name for _ in range(500) for name in state.decode(state.begin())]
    for i, tpot_s in enumerate(objectives):
        assert turns.count(f"R{i + 1}") / 500 == pytest.approx(20.0 / tpot_s, abs=1 / 500 + 1e-9)


def test_staggered_credits_keep_the_batch_near_its_virtual_size() -> None:
    objectives = [20.0] * 4 + [40.0] * 8 + [60.0] * 8 + [100.0] * 10

    def sizes(stagger: bool) -> list[int]:
        state = running(*objectives, scorpio_stagger=stagger)
        return [len(state.decode(state.begin())) for _ in range(60)]

    assert sum(20.0 / tpot_s for tpot_s in objectives) == pytest.approx(12.67, abs=0.01)
    assert (min(sizes(False)), max(sizes(False))) == (4, 30)
    assert min(sizes(True)) >= 10 and max(sizes(True)) <= 15


def test_virtual_batch_size() -> None:
    batch = VirtualBatch()
    batch.add(4.0, 10)
    batch.add(6.0, 20)
    size, context, smallest = batch.with_one(2.0, 30)
    assert (size, context, smallest) == (pytest.approx(11 / 6), 20.0, 2.0)


def test_a_newcomer_is_admitted_only_if_the_estimate_stays_within_the_smallest_objective() -> None:
    """One request with objective 2 runs; with the newcomer's 3, 1 + 2/3 rows: 1.5 s each estimate 2.5 s > 2 s."""
    for row_s, admitted in ((1.5, {}), (1.2, {"new": 10})):
        state = State(scorpio(CostParams(0.0, 0.0, 0.0, row_s, 0.0)))
        state.run("old", tpot_s=2.0)
        state.wait("new", tpot_s=3.0)
        assert state.admitted(state.begin()) == admitted


def test_the_estimate_is_the_mean_step_time_over_the_predicted_length() -> None:
    policy = scorpio(CostParams(step_s=4.0, token_s=0.0, pair_s=0.0, row_s=0.5, context_s=0.01), scorpio_eps=1.5)
    assert policy.estimate(10, 100, 50) == pytest.approx(1.5 * (0.5 * 0.01 * 10 * 250 + 0.5 * 10 + 4.0))


def test_the_head_that_fails_blocks_those_behind_it() -> None:
    state = State(scorpio(CostParams(0.0, 0.0, 0.0, 1.5, 0.0)))
    state.run("old", tpot_s=2.0)
    state.wait("tight", tpot_s=3.0, ttft_s=5.0)
    state.wait("loose", tpot_s=100.0, ttft_s=9.0)
    assert state.admitted(state.begin()) == {}


def test_ttft_guard_rejects_what_cannot_be_in_time_behind_tighter_ones() -> None:
    """Prefills take 1 s each. By deadline: a (1.5), b (2.04), c (3.5); b would take until 2 s: too close."""
    state = State(scorpio(CostParams(0.0, 0.1, 0.0, 0.0, 0.0)))
    state.wait("c", ttft_s=3.5, tpot_s=9.0)
    state.wait("b", ttft_s=2.04, tpot_s=9.0)
    state.wait("a", ttft_s=1.5, tpot_s=9.0)
    decision = state.begin()
    rejected = state.rejected(decision)
    assert rejected.keys() == {"b"}
    assert rejected["b"].predicted_ttft_s == pytest.approx(2.0)
    assert (rejected["b"].reason, rejected["b"].cause) == ("ttft", Cause.QUEUE)
    assert list(state.admitted(decision)) == ["a", "c"]


def test_what_even_an_idle_machine_misses_is_called_hopeless() -> None:
    state = State(scorpio(CostParams(0.0, 0.1, 0.0, 0.0, 0.0)))
    state.wait("a", ttft_s=0.5, tpot_s=9.0)
    assert state.rejected(state.begin())["a"].cause is Cause.IDLE


def test_what_could_have_been_kept_is_behind_all_that_start() -> None:
    """Prefills take 1 s each, and a and c start."""
    state = State(scorpio(CostParams(0.0, 0.1, 0.0, 0.0, 0.0)))
    for name, ttft_s in (("a", 1.5), ("b", 2.04), ("c", 3.5)):
        state.wait(name, ttft_s=ttft_s, tpot_s=9.0)
    least_s = state.rejected(state.begin())["b"].attainable_s
    assert least_s == pytest.approx(3.1)
    again = State(scorpio(CostParams(0.0, 0.1, 0.0, 0.0, 0.0)))
    for name, ttft_s in (("a", 1.5), ("b", least_s), ("c", 3.5)):
        again.wait(name, ttft_s=ttft_s, tpot_s=9.0)
    assert "b" in again.admitted(again.begin())


def test_nobody_can_say_what_could_be_kept_where_those_that_run_need_the_time() -> None:
    state = State(scorpio(CostParams(0.0, 0.0, 0.0, 1.5, 0.0)))
    state.run("old", tpot_s=2.0)
    state.wait("new", tpot_s=3.0, ttft_s=0.001)
    assert state.rejected(state.begin())["new"].attainable_s is None


def test_what_those_that_run_held_up_until_it_was_late_says_so() -> None:
    state = State(scorpio(CostParams(0.0, 0.0, 0.0, 1.5, 0.0)))
    state.run("old", tpot_s=2.0)
    state.wait("new", tpot_s=3.0, ttft_s=5.0)
    assert not state.rejected(state.begin())
    state.now_s = 4.9999
    assert state.rejected(state.begin())["new"].cause is Cause.UTILISATION


def test_what_it_waited_for_last_is_why_it_is_refused() -> None:
    state = State(scorpio(), seats=0)
    state.run("old", tpot_s=2.0)
    state.wait("new", tpot_s=3.0, ttft_s=5.0)
    assert not state.rejected(state.begin())
    state.now_s = 4.9999
    assert state.rejected(state.begin())["new"].cause is Cause.SEATS


def test_the_step_that_ran_when_it_came_took_its_time() -> None:
    """A prefill of 1 s, and 1.2 s for it, of which 0.5 s have passed."""
    state = State(scorpio(CostParams(0.0, 0.1, 0.0, 0.0, 0.0)))
    state.run("old", tpot_s=2.0)
    state.wait("new", tpot_s=3.0, ttft_s=1.2)
    state.now_s = 0.5
    assert state.rejected(state.begin())["new"].cause is Cause.STEP


def test_an_end_that_is_out_of_reach_is_named_as_the_reason() -> None:
    state = State(scorpio(CostParams(0.010, 0.001, 0.0, 0.0, 0.0)))
    state.wait("a", 500, predicted=100, e2e_s=1.0)
    state.now_s = 0.9
    assert state.rejected(state.begin())["a"].reason == "e2e"


def test_as_published_an_admissible_prompt_stops_all_decodes() -> None:
    for mixed, decoding in ((False, []), (True, ["old"])):
        state = State(scorpio(scorpio_mixed=mixed))
        state.run("old", tpot_s=2.0)
        state.wait("new", tpot_s=3.0)
        decision = state.begin()
        assert state.admitted(decision) == {"new": 10}
        assert state.decode(decision) == decoding


def test_requests_without_a_tpot_objective_stay_outside_the_set() -> None:
    state = State(scorpio(CostParams(0.0, 0.0, 0.0, 1.5, 0.0)))
    state.run("old", tpot_s=2.0)
    state.run("free")
    state.wait("new")
    decision = state.begin()
    assert state.admitted(decision) == {"new": 10}, "nothing is asked of them"
    state.waiting.clear()
    state.policy.observe(Ended("new", 0.0, FinishReason.ABORT, 0))
    assert state.decode(state.begin()) == ["free", "old"]


@pytest.mark.parametrize("eps", [0.9, float("nan"), float("inf")])
def test_the_inefficiency_factor_is_one_or_more(eps: float) -> None:
    with pytest.raises(ConfigError, match="scorpio_eps"):
        scheduler_config(scorpio_eps=eps)
