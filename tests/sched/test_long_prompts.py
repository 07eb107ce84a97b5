"""Long prompts, whose tokens cost more the longer they are, under policies that predict step times."""

import pytest

from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.registry import make_policy, scheduler_config
from tests.sched.queues import State

FLAT = CostParams(step_s=0.001, token_s=10e-6, pair_s=0.0, row_s=0.0, context_s=0.0)
STEEP = CostParams(step_s=0.001, token_s=10e-6, pair_s=10e-9, row_s=0.0, context_s=0.0)


def state(policy: str, cost: CostParams) -> State:
    return State(make_policy(scheduler_config(scheduling_policy=policy), Estimates(CostModel(cost, fit=False))))


@pytest.mark.parametrize("done", [0, 3000])
def test_qoserve_fills_the_slack_with_as_many_tokens_as_take_that_long(done: int) -> None:
    queue = state("qoserve", STEEP)
    queue.now_s = 1.0
    queue.run("a", tpot_s=0.011)
    prompt = queue.wait("b", 4000, ttft_s=9.0)
    queue.start(prompt)
    prompt.planned = prompt.computed = done
    chunk = queue.begin().chunk(prompt, 2048)
    spare_s = 0.95 * 0.011 - STEEP.step_s
    assert STEEP.prefill_s(done, chunk) <= spare_s < STEEP.prefill_s(done, chunk + 1)


@pytest.mark.parametrize(("cost", "in_time"), [(FLAT, True), (STEEP, False)])
def test_qoserve_sees_that_a_long_prompt_cannot_be_in_time(cost: CostParams, in_time: bool) -> None:
    """4,000 tokens take 40 ms, and 80 more for what they attend to: 120 ms against an objective of 100."""
    queue = state("qoserve", cost)
    queue.wait("long", 4000, ttft_s=0.1)
    queue.begin()
    assert queue.policy.stats().demoted == (0 if in_time else 1)


@pytest.mark.parametrize(("cost", "in_time"), [(FLAT, True), (STEEP, False)])
def test_scorpio_refuses_a_long_prompt_that_cannot_be_in_time(cost: CostParams, in_time: bool) -> None:
    queue = state("scorpio", cost)
    queue.wait("long", 4000, ttft_s=0.1, tpot_s=1.0)
    assert bool(queue.rejected(queue.begin())) is not in_time
