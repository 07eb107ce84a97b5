"""Policies with objectives know how long a prefix takes to come from host memory."""

import pytest

from roseinfer.core.slo import Cause
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policies.common.planned import PlannedDecision
from roseinfer.sched.registry import make_policy, scheduler_config
from tests.sched.queues import State

COST = CostParams(step_s=0.01, token_s=0.001, row_s=0.0001, context_s=0.0)


def state(policy: str) -> State:
    """1,000 tokens take a second; a prompt of 900 has 890 of them in host memory."""
    config = scheduler_config(scheduling_policy=policy)
    made = State(make_policy(config, Estimates(CostModel(COST, fit=False))))
    made.cached = 890
    return made


@pytest.mark.parametrize("policy", ["slack", "scorpio"])
def test_a_first_token_that_the_load_makes_late_is_not_promised(policy: str) -> None:
    made = state(policy)
    made.load_s = 0.1
    made.wait("in time", 900, ttft_s=0.3)
    decision = made.begin()
    assert not made.rejected(decision) and list(made.admitted(decision)) == ["in time"]
    made = state(policy)
    made.load_s = 0.4
    made.wait("late", 900, ttft_s=0.3)
    rejection = made.rejected(made.begin())["late"]
    assert rejection.predicted_ttft_s >= 0.4
    assert rejection.attainable_s is not None and 0.4 <= rejection.attainable_s < 0.6


def test_qoserve_puts_who_would_be_late_for_the_load_behind_the_others() -> None:
    for load_s, late in ((0.1, 0), (0.4, 1)):
        made = state("qoserve")
        made.load_s = load_s
        made.wait("a", 900, ttft_s=0.3)
        made.begin()
        stats = made.policy.stats()
        assert stats.demoted == late


def test_a_sample_whose_load_began_with_its_lead_is_not_named_again() -> None:
    made = state("fifo")
    lead, loads, other = (made.wait(name) for name in ("lead", "loads", "other"))
    named = iter(PlannedDecision([], {}, [lead, loads, other]).order([]))
    assert next(named) is lead
    loads.loading = Cause.LOAD  # as one of its samples
    assert list(named) == [other]


@pytest.mark.parametrize("policy", ["slack", "scorpio"])
def test_a_request_whose_adapter_comes_too_late_is_rejected_for_it(policy: str) -> None:
    for load_s, late in ((0.1, False), (0.4, True)):
        made = state(policy)
        made.cached, made.load_s = 0, load_s
        made.wait("lora", 100, ttft_s=0.3).loading = Cause.ADAPTER
        decision = made.begin()
        rejected = made.rejected(decision)
        assert not made.admitted(decision) and list(rejected) == ["lora"] * late
        if late:
            assert rejected["lora"].cause is Cause.ADAPTER and rejected["lora"].predicted_ttft_s >= 0.4
