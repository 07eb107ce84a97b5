"""Promises that a scheduler publishes for routers."""

from math import e, exp, inf

import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.plan import StepLimits
from roseinfer.core.promise import DUE_S, Promise
from roseinfer.core.request import Prompt, Request, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.lengths.estimators import EcdfLengths, OracleLengths, make_lengths
from roseinfer.sched.registry import make_policy, scheduler_config
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.engine import END, FixedLengthRunner
from tests.helpers.kv_managers import kv_manager

# 10 ms a step, 1 ms a prompt token, 1 ms a decoding request, 10 us a context token.
COST = CostParams(step_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.001, context_s=1e-5)


class Engine:
    """A core on simulated time, in which requests' outputs are 100 tokens long."""

    def __init__(self, policy: str = "slack", blocks: int = 1000) -> None:
        config = scheduler_config(scheduling_policy=policy, max_num_seqs=4, max_num_batched_tokens=64)
        machine = Machine(COST, max_model_len=2000, num_blocks=blocks)
        self.clock = ManualClock()
        self.outputs = FixedLengthRunner()
        limits = StepLimits.of(config, machine.max_model_len)
        made = make_policy(config, Estimates(CostModel(COST, fit=False), OracleLengths()))
        self.scheduler = Scheduler(config, kv_manager(blocks, 16), made, machine.max_model_len, limits)
        self.core = EngineCore(
            self.scheduler,
            PricedRunner(self.outputs, machine, self.clock, limits=limits),
            self.clock,
            eos_ids=(END,),
            vocab_size=1000,
        )
        self.number = 0

    def add(self, prompt: int, samples: int = 1, **objectives: float) -> None:
        self.number += 1
        name = str(self.number)
        for sample in range(samples):
            self.outputs.expect(f"{name}:{sample}", prompt, 100)
        meta = RequestMeta(slo=Slo(**objectives) if objectives else None, predicted_len=100)
        ids = [1000 - self.number] * prompt if prompt > 100 else [self.number] * prompt
        self.core.add(Add(name, Prompt(tuple(ids), SequenceParams(max_tokens=1000), meta), samples))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def promise(self) -> Promise:
        return self.scheduler.promise(self.clock.now())


def test_a_policy_without_objectives_promises_counts_alone() -> None:
    engine = Engine("fifo")
    for _ in range(6):
        engine.add(20)
    assert engine.promise() == Promise(0.0, waiting=6, best_effort=6, free_seats=4, free_blocks=1000, blocks=1000)
    engine.steps(2)
    found = engine.promise()
    assert (found.steps, found.running, found.waiting, found.best_effort, found.free_seats) == (2, 4, 2, 2, 0)
    assert found.free_blocks == 1000 - 4 * 2 and not found.cost.is_known


@pytest.mark.parametrize("policy", ["slack", "fifo"])
def test_prompts_are_a_share_of_the_recent_time(policy: str) -> None:
    engine = Engine(policy)
    assert engine.promise().prompt_share == 0.0
    engine.add(900)
    engine.steps(14)
    share = engine.promise().prompt_share
    assert share == pytest.approx(1 - exp(-engine.clock.now() / 10.0), rel=0.02), "all of the time so far"
    engine.clock.advance(10.0)
    assert engine.promise().prompt_share == pytest.approx(share / e)


@pytest.mark.parametrize("policy", ["slack", "fifo"])
def test_the_oldest_request_without_a_token_counts_while_it_waits_or_its_prompt_runs(policy: str) -> None:
    """4 seats: the prompts of the first four take 5 steps each, the fifth waits for one of their seats."""
    engine = Engine(policy)
    engine.add(300)
    engine.steps(1)
    assert engine.promise().oldest_wait_s == pytest.approx(engine.clock.now()) and engine.promise().waiting == 0
    engine.steps(6)
    assert (engine.promise().running, engine.promise().oldest_wait_s) == (1, 0.0)
    since_s = engine.clock.now()
    for _ in range(4):
        engine.add(10)
    engine.steps(20)
    assert engine.promise().waiting == 1
    assert engine.promise().oldest_wait_s == pytest.approx(engine.clock.now() - since_s)


def test_an_idle_slack_engine_says_what_steps_cost() -> None:
    found = Engine().promise()
    assert found.cost == StepCost(step_s=0.010, token_s=0.001, row_s=0.001, context_s=1e-5)
    assert (found.usable_share, found.smallest_s, found.busy, found.weights, found.step_s) == (1.0, inf, 0.0, 0.0, 0.0)
    assert found.free_seats == 4


def test_requests_that_wait_are_prompt_tokens_by_due_time_and_weights() -> None:
    engine = Engine()
    engine.add(50, ttft_s=0.3, tpot_s=0.05)
    engine.add(30, ttft_s=1.0, tpot_s=0.1)
    engine.add(20, tpot_s=0.2)
    engine.add(10)
    found = engine.promise()
    waiting = [0] * len(DUE_S)
    waiting[3], waiting[5], waiting[-1] = 50, 30, 20
    assert found.waiting_tokens == tuple(waiting)
    assert (found.waiting, found.best_effort, found.fill_tokens) == (4, 1, 0)
    assert found.growth_blocks == (150 + 130 + 120) // 16, "prompts and outputs of those with objectives"
    assert found.weights == pytest.approx(0.002 / 0.05 + 0.0018 / 0.1 + 0.0017 / 0.2)
    assert found.smallest_s == inf, "nobody decodes or fills"


def test_requests_that_run_are_what_their_objectives_ask_for() -> None:
    engine = Engine()
    engine.add(50, ttft_s=3.0, tpot_s=0.05)
    engine.steps(2)
    engine.add(300, ttft_s=9.0, tpot_s=0.1)
    engine.steps(1)
    found = engine.promise()
    assert (found.running, found.waiting) == (2, 0)
    assert found.smallest_s == 0.05
    assert found.busy == pytest.approx((0.001 + 1e-5 * 100) / 0.05)
    assert found.weights == pytest.approx((0.001 + 1e-5 * 350) / 0.1)
    request = next(r for r in engine.scheduler.running.values() if r.prompt_len == 300)
    assert found.fill_tokens == request.remaining > 0
    assert 0 < found.arriving <= 0.35 and found.usable_share == pytest.approx(0.98)
    left = [100 - r.num_outputs for r in engine.scheduler.running.values()]
    assert found.growth_blocks == pytest.approx((sum(left) + request.remaining) / 16, abs=1.0)
    assert found.blocks == 1000


def test_the_step_is_as_long_as_it_was_planned() -> None:
    engine = Engine()
    engine.add(50, ttft_s=3.0, tpot_s=0.05)
    engine.scheduler.plan(engine.clock.now())
    assert engine.promise().step_s == pytest.approx(0.060)


def test_cached_prompt_tokens_are_not_waiting() -> None:
    """The second asks for the same prompt: all but the last block's rest, or the last token, is there."""
    engine = Engine()
    engine.add(50)
    engine.steps(110)
    assert not engine.core.busy
    engine.number -= 1
    engine.add(50, ttft_s=3.0)
    found = engine.promise()
    assert 0 < sum(found.waiting_tokens) <= 2


def test_samples_wait_for_one_prompt() -> None:
    engine = Engine()
    engine.add(50, samples=4, ttft_s=3.0, tpot_s=0.05)
    found = engine.promise()
    assert (found.waiting, sum(found.waiting_tokens)) == (4, 50 + 3), "and each computes its last token"


def test_a_policy_that_cannot_promise_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Promise:
        raise OverflowError("planted")

    engine = Engine()
    engine.add(20)
    monkeypatch.setattr(engine.scheduler.policy, "promise", fails)
    assert engine.promise() == Promise(0.0, waiting=1, best_effort=1, free_seats=4, free_blocks=1000, blocks=1000)
    assert engine.scheduler.stats().policy_faults == 1


def test_while_nobody_has_objectives_nothing_is_owed() -> None:
    """Fifo plans if there are no objectives: nothing is promised, and the step's length is a guess."""
    engine = Engine()
    for _ in range(3):
        engine.add(40)
    engine.steps(8)
    found = engine.promise()
    assert (found.running, found.busy, found.weights, found.fill_tokens, found.smallest_s) == (3, 0.0, 0.0, 0, inf)


def test_the_usual_length_of_an_output() -> None:
    table = EcdfLengths()
    assert table.usual == table.total(Request("a", Prompt([1], SequenceParams(max_tokens=10_000))))
    assert make_lengths("classifier").usual == table.usual
    assert OracleLengths().usual == 0.0
