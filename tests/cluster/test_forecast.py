"""Forecasts of engines for a request that is not sent."""

import pytest

from roseinfer.cluster.forecast import forecasts
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.slo import Slo
from roseinfer.core.step_cost import StepCost
from roseinfer.engine.api import EngineHealth, EngineReport, EngineState
from tests.router.promises import COST, promise

NOW_S = 10.0


def report(engine: int, state: EngineState = EngineState.READY, **fields: object) -> EngineReport:
    told = promise(NOW_S, **fields)  # type: ignore[arg-type]
    return EngineReport(engine, state, EngineHealth(True, 0.0), SchedulerStats(), promise=told)


def test_an_idle_engine_takes_a_step_and_the_prompt() -> None:
    (found,) = forecasts([report(3)], NOW_S, 1000)
    # A step takes 10 ms, 1,000 tokens .1 ms each, and the machine is otherwise idle.
    assert found.engine == 3 and found.ttft_s == pytest.approx(COST.step_s + 1000 * COST.token_s)
    assert found.meets_objectives is None


def test_the_best_engine_comes_first() -> None:
    busy = report(0, fill_tokens=5000)
    found = forecasts([busy, report(1)], NOW_S, 100, Slo(ttft_s=0.1))
    assert [(one.engine, one.meets_objectives) for one in found] == [(1, True), (0, False)]
    assert forecasts([busy], NOW_S, 100, Slo(ttft_s=1.0))[0].meets_objectives


def test_a_pace_that_no_step_keeps_is_not_promised() -> None:
    (found,) = forecasts([report(0)], NOW_S, 100, Slo(tpot_s=COST.step_s / 2))
    assert found.meets_objectives is False and found.utilisation > 1


def test_outputs_and_samples_ask_for_more_of_a_machine() -> None:
    one, many = (forecasts([report(0)], NOW_S, 100, Slo(tpot_s=0.02), samples=n)[0] for n in (1, 8))
    long = forecasts([report(0)], NOW_S, 100, Slo(tpot_s=0.02), output_tokens=1000)[0]
    assert one.utilisation < many.utilisation and one.utilisation < long.utilisation


@pytest.mark.parametrize(
    "other",
    [
        report(1, draining=True),
        report(1, EngineState.DRAINING),
        report(1, EngineState.DEAD),
        report(1, cost=StepCost()),
        EngineReport(1, EngineState.READY, EngineHealth(True, 0.0), SchedulerStats()),
    ],
    ids=["about to drain", "drains", "dead", "costs nobody knows", "has said nothing"],
)
def test_engines_that_promise_nothing_are_left_out(other: EngineReport) -> None:
    assert [one.engine for one in forecasts([other, report(0)], NOW_S, 10)] == [0]
    assert forecasts([other], NOW_S, 10, Slo(ttft_s=1.0)) == []
