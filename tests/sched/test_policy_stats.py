"""The figures that policies with objectives show."""

import random

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import FinishReason, PolicyStats, SchedulerStats
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import Prompt, Request, RequestMeta, sequence_id
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import OracleLengths
from roseinfer.sched.policies.common.ledger import MAX_OBJECTIVE_S, MIN_OBJECTIVE_S, TpotBatch, Track
from roseinfer.sched.policies.slack.terms import Margins
from roseinfer.sched.policy import Ended
from roseinfer.sched.registry import make_policy, scheduler_config
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.engine import END, FixedLengthRunner
from tests.helpers.kv_managers import kv_manager
from tests.sched.queues import State

# 10 ms a step, 1 ms a prompt token, 1 ms a decoding request, 10 us a context token.
COST = CostParams(step_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.001, context_s=1e-5)


def state(policy: str, **options: object) -> State:
    config = scheduler_config(scheduling_policy=policy, **options)
    made = State(make_policy(config, Estimates(CostModel(COST, fit=False), OracleLengths())))
    if policy == "slack":
        made.policy.state.margins.START = 0.0
    return made


def end(made: State, *names: str) -> None:
    for name in names:
        made.running.remove(next(request for request in made.running if request.request_id == name))
        made.policy.observe(Ended(name, made.now_s, FinishReason.ABORT, 1))


def stats_of(made: State) -> PolicyStats:
    found = made.policy.stats()
    assert isinstance(found, PolicyStats)
    return found


# --- slack ------------------------------------------------------------------------------------------------------
def test_what_slack_shows_with_objectives() -> None:
    """Mean contexts are 10 + 100 / 2, so a row takes 1.6 ms; three prompts took 10 ms each of the last 10 s."""
    made = state("slack")
    for name, tpot_s in (("a", 0.050), ("b", 0.100), ("c", 0.100)):
        made.run(name, tpot_s=tpot_s)
    made.begin()
    assert stats_of(made) == PolicyStats(
        utilisation=pytest.approx(0.010 / 0.050 + 0.0016 * (20 + 10 + 10) + 0.003),
        speed=1.0,
        margin=0.0,
        step_budget_s=pytest.approx(0.050),
        virtual_batch_size=pytest.approx(2.0),
        demoted=0,
    )
    end(made, "a")
    made.begin()
    assert stats_of(made).utilisation == pytest.approx(0.010 / 0.100 + 0.0016 * 20 + 0.003)
    assert stats_of(made).virtual_batch_size == pytest.approx(2.0)
    assert stats_of(made).step_budget_s == pytest.approx(0.100 - 0.01333), "from the end of the step in flight"


def test_before_the_first_step_is_done_a_machine_may_have_been_up_for_long() -> None:
    """Clocks begin when the machine does."""
    made = state("slack")
    made.now_s = 1e6
    made.run("a", tpot_s=0.050)
    made.begin()
    assert stats_of(made).utilisation == pytest.approx(0.010 / 0.050 + 0.0016 * 20 + 0.001)


def test_what_the_margin_leaves_is_what_there_is() -> None:
    made = state("slack")
    made.run("a", tpot_s=0.050)
    made.begin()
    before = stats_of(made).utilisation
    made.policy.state.margins.START = 0.1
    assert (stats_of(made).utilisation, stats_of(made).margin) == (pytest.approx(before / 0.9), 0.1)


@pytest.mark.parametrize("best_effort", [False, True])
def test_nothing_of_slack_outlives_the_last_objective(best_effort: bool) -> None:
    made = state("slack")
    if best_effort:
        made.run("free")
    made.run("lost", tpot_s=0.030, predicted=3, first_s=-1.0)
    made.run("a", tpot_s=0.050)
    made.begin()
    assert stats_of(made).demoted == 1, "best effort is not demoted"
    end(made, "lost")
    assert stats_of(made).demoted == 0
    end(made, "a")
    expected = PolicyStats(utilisation=0.0, speed=1.0, margin=Margins.START, virtual_batch_size=0.0, demoted=0)
    assert stats_of(made) == expected
    made.begin()
    assert stats_of(made) == expected


def test_who_has_no_token_deadline_leaves_a_step_unlimited() -> None:
    made = state("slack")
    made.run("only the first token", ttft_s=1.0)
    made.begin()
    share = 0.010 / 10 / (1 - Margins.START)  # of its prompt, lately
    assert stats_of(made) == PolicyStats(pytest.approx(share), 1.0, Margins.START, None, 0.0, 0)


@pytest.mark.parametrize("paces_s", [(0.02, 0.03, 0.05, 0.1), (MIN_OBJECTIVE_S, 0.02, MAX_OBJECTIVE_S)])
def test_sums_over_a_batch_stay_true_while_requests_come_and_go(paces_s: tuple[float, ...]) -> None:
    rng = random.Random(0)
    batch, inside = TpotBatch(), []
    for number in range(2000):
        if inside and rng.random() < (0.45 if number < 1500 else 1.0):
            batch.remove(inside.pop(rng.randrange(len(inside))))
        else:
            slo = Slo(tpot_s=rng.choice(paces_s))
            track = Track(
                Request(str(number), Prompt([1] * rng.randrange(1, 900), SequenceParams(), RequestMeta(slo=slo)))
            )
            track.length = rng.randrange(1, 900)
            batch.add(track)
            inside.append(track)
        rates = [(1 / t.tpot_s, (t.request.prompt_len + t.length / 2) / t.tpot_s) for t in inside]
        assert batch.tokens_per_s == pytest.approx(sum(rate for rate, _ in rates))
        assert batch.context_per_s == pytest.approx(sum(rate for _, rate in rates))
        assert batch.smallest_s == min((t.tpot_s for t in inside), default=float("inf"))
    assert (len(inside), batch.tokens_per_s, batch.context_per_s) == (0, 0.0, 0.0)


# --- the others -------------------------------------------------------------------------------------------------
def test_scorpios_virtual_batch_is_that_of_the_worked_example() -> None:
    made = state("scorpio")
    for name, tpot_s in (("R1", 2.0), ("R2", 4.0), ("R3", 6.0)):
        made.run(name, tpot_s=tpot_s)
    made.run("outside")
    made.begin()
    assert stats_of(made) == PolicyStats(speed=1.0, virtual_batch_size=pytest.approx(11 / 6))
    end(made, "R1")
    made.begin()
    assert stats_of(made).virtual_batch_size == pytest.approx(1 + 4 / 6)
    end(made, "R2", "R3")
    made.begin()
    assert stats_of(made).virtual_batch_size == 0.0


def test_scorpio_has_no_virtual_batch_once_all_have_left() -> None:
    made = state("scorpio")
    made.run("R1", tpot_s=2.0)
    made.begin()
    end(made, "R1")
    assert stats_of(made).virtual_batch_size == 0.0


def test_qoserve_shows_its_budget_and_late_prompts() -> None:
    made = state("qoserve")
    made.now_s = 1.0
    made.run("a", tpot_s=0.100)
    made.wait("late", 500, ttft_s=0.1)
    made.wait("fine", 500, ttft_s=9.0)
    made.wait("free", 500)
    made.begin()
    assert stats_of(made) == PolicyStats(speed=1.0, margin=0.05, step_budget_s=pytest.approx(0.095), demoted=1)
    end(made, "a")
    assert stats_of(made).step_budget_s is None


# --- through the engine -----------------------------------------------------------------------------------------
def engine(policy: str, depth: int = 1) -> tuple[EngineCore, FixedLengthRunner]:
    clock = ManualClock()
    outputs = FixedLengthRunner()
    config = SchedulerConfig(scheduling_policy=policy, max_num_seqs=8, max_num_batched_tokens=64)
    made = make_policy(config, Estimates(CostModel(COST, fit=False), OracleLengths()))
    scheduler = Scheduler(config, kv_manager(256, 16, prefix_caching=False), made, 1024, StepLimits.of(config, 1024))
    runner = PricedRunner(outputs, Machine(COST), clock)
    return EngineCore(scheduler, runner, clock, depth=depth, eos_ids=(END,), vocab_size=10), outputs


def steps(core: EngineCore, runner: FixedLengthRunner, slo: Slo | None) -> list[SchedulerStats]:
    """The snapshots after each turn that completed a step, for three requests of several lengths."""
    for number, (prompt, output) in enumerate(((100, 10), (30, 5), (10, 20))):
        meta = RequestMeta(slo=slo, predicted_len=output)
        core.add(Add(str(number), Prompt([1] * prompt, SequenceParams(max_tokens=100), meta)))
        runner.expect(sequence_id(str(number), 0), prompt, output)
    found = [core.stats()]
    while core.busy:
        core.step()
        if core.stats().steps_done != found[-1].steps_done:
            found.append(core.stats())
    return found[1:]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["slack", "scorpio", "qoserve"])
def test_the_prediction_is_that_of_the_step_that_was_completed(policy: str, depth: int) -> None:
    """The machine costs exactly what the policy believes."""
    found = steps(*engine(policy, depth), Slo(ttft_s=9.0, tpot_s=0.5))
    assert [stats.steps_done for stats in found] == list(range(1, len(found) + 1))
    assert len({stats.step_duration_s for stats in found}) > 5
    for stats in found:
        assert stats.policy is not None
        if not stats.running:
            continue  # slack no longer asks what every step takes
        assert stats.policy.predicted_step_s == pytest.approx(stats.step_duration_s, rel=1e-9)
        assert stats.policy.speed == pytest.approx(1.0)


def test_without_objectives_slack_predicts_every_fourth_step_and_those_with_prompts() -> None:
    found = steps(*engine("slack"), None)
    said = [stats.policy.predicted_step_s for stats in found if stats.policy is not None]
    taken = [stats.step_duration_s for stats in found]
    prompts = [stats.step_tokens > stats.step_rows for stats in found]
    assert any(prompts) and not all(prompts)
    assert said == pytest.approx(
        [seconds if step % 4 == 0 or prompts[step] else 0.0 for step, seconds in enumerate(taken)]
    )


@pytest.mark.parametrize("policy", ["fifo", "pack", "sarathi"])
def test_policies_without_objectives_have_no_figures(policy: str) -> None:
    assert {stats.policy for stats in steps(*engine(policy), Slo(tpot_s=0.5))} == {None}
