"""The simulator runs the real scheduler on simulated time."""

import json
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError, RequestTooLongError
from roseinfer.core.plan import Row
from roseinfer.sched.cost.params import CostParams, Work
from roseinfer.sched.liveness import Liveness
from roseinfer.sched.policies.fifo import FifoPolicy
from roseinfer.sched.prefill import PrefillOptions
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim import engine
from roseinfer.sim.arrivals import make_arrivals
from roseinfer.sim.config import CostConfig, WorkloadConfig
from roseinfer.sim.engine import StuckError
from roseinfer.sim.simulator import simulate
from roseinfer.sim.workload import Arrival

COST = CostConfig(step_ms=10.0, token_us=1000.0, context_ns=0.0, num_kv_blocks=512).machine


def row(start: int, count: int) -> Row:
    return Row("a", 0, start, count, 1, True, start, 0, ())


def test_the_price_of_a_step() -> None:
    cost = CostConfig(
        step_ms=5.0, token_us=20.0, row_us=10.0, context_ns=1000.0, pair_ns=500.0, chunk_context_ns=50.0
    ).machine.cost
    assert CostParams().work([row(10, 3), row(0, 1), row(7, 1)]) == Work(3, 11 + 12 + 13, 2, 1 + 8, 10)
    assert cost.seconds(Work()) == pytest.approx(0.005)
    assert cost.seconds(Work(3, 36.0, 2, 9, 10)) == pytest.approx(0.005 + 60e-6 + 18e-6 + 20e-6 + 9e-6 + 0.5e-6)


def test_one_request_takes_what_its_steps_cost() -> None:
    result = simulate([Arrival(1.0, [5] * 10, 3)], SchedulerConfig(), COST)
    life = result.lifetimes[0]
    assert life.ttft_s == pytest.approx(0.020)
    assert life.tpot_s == pytest.approx(0.011)
    assert (result.steps, result.elapsed_s) == (3, pytest.approx(1.042))


def test_requests_that_arrive_while_a_step_runs_wait_for_its_end() -> None:
    arrivals = [Arrival(0.0, [5] * 10, 2), Arrival(0.005, [6] * 10, 2)]
    first, second = simulate(arrivals, SchedulerConfig(), COST).lifetimes
    assert first.ttft_s == pytest.approx(0.020)
    assert second.token_s[0] == pytest.approx(0.020 + 0.010 + 0.011)


def test_packing_helps_short_prompts_behind_long_ones() -> None:
    arrivals = [Arrival(0.0, [i + 2] * (400 if i % 4 == 0 else 2), 8) for i in range(32)]

    def median_ttft(policy: str) -> float:
        config = scheduler_config(scheduling_policy=policy, prefill_max_tokens=256, enable_chunked_prefill=False)
        return sorted(life.ttft_s for life in simulate(arrivals, config, COST).lifetimes)[16]

    assert median_ttft("pack") < 0.5 * median_ttft("fifo")


def test_time_passes_while_a_policy_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine loop waits in the same way: a policy may idle on purpose for a moment."""
    seen: list[float] = []

    class Hesitant(FifoPolicy):
        """Lets those that run decode 20 ms after it first saw them, and no sooner."""

        def begin(self, view):
            decision = super().begin(view)
            if view.running:
                seen.append(view.now_s)
                decision.select = lambda running: running if view.now_s >= seen[0] + 0.020 else ()
            return decision

    monkeypatch.setattr(engine, "make_policy", lambda config, known: Hesitant(config, PrefillOptions()))
    run = simulate([Arrival(0.0, [5] * 10, 3)], SchedulerConfig(), COST)
    assert run.lifetimes[0].token_s[1] - run.lifetimes[0].token_s[0] >= 0.020
    assert 10 <= sum(at_s < seen[0] + 0.020 for at_s in seen) <= 12, "it is asked every 2 ms"


def test_a_policy_that_stops_the_engine_for_good_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the rules that keep the engine going broken, the simulated time would go on for ever."""

    class Idle(FifoPolicy):
        def begin(self, view):
            decision = super().begin(view)
            decision.select = lambda running: ()
            return decision

    monkeypatch.setattr(engine, "make_policy", lambda config, known: Idle(config, PrefillOptions()))
    assert len(simulate([Arrival(0.0, [5] * 10, 2)], SchedulerConfig(), COST).lifetimes[0].token_s) == 2
    monkeypatch.setattr(Liveness, "may_idle", lambda self: True)
    with pytest.raises(StuckError, match=r"scheduling_policy .*, with 1 requests running and 0 waiting"):
        simulate([Arrival(0.0, [5] * 10, 2), Arrival(9.0, [5] * 10, 2)], SchedulerConfig(), COST)


def test_the_same_seed_gives_the_same_run_and_overlap_changes_no_count() -> None:
    workload = WorkloadConfig(num_requests=30, request_rate=50.0, input_len=64, output_len=20)
    machine = CostConfig().machine
    runs = [simulate(make_arrivals(workload), SchedulerConfig(overlap=o), machine) for o in (False, False, True)]
    assert runs[0] == runs[1]
    counts = [[len(life.token_s) for life in run.lifetimes] for run in runs]
    assert counts[0] == counts[2] == [arrival.output_len for arrival in make_arrivals(workload)]


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(RequestTooLongError):
        simulate([Arrival(0.0, [5] * 100, 1)], SchedulerConfig(), CostConfig(max_model_len=64).machine)
    with pytest.raises(ConfigError, match="request_rate"):
        WorkloadConfig(request_rate=-1.0)
    with pytest.raises(ConfigError, match="token_us"):
        CostConfig(step_ms=0.0, token_us=0.0)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert cli.main(["simulate", "--num-requests", "8", "--scheduling-policy", "pack", "--json", str(file)]) == 0
    assert "TTFT ms p99" in capsys.readouterr().out
    assert json.loads(file.read_text())["requests"] == 8


@pytest.mark.parametrize("comparison", [(), ("--replicas", "1", "--rates", "5", "--jobs", "1", "--kill", "0@0")])
def test_a_run_in_which_no_time_passes(comparison: tuple[str, ...], tmp_path: Path) -> None:
    """The request is rejected at once, or no engine lives. The result has no NaN, which JSON does not know."""
    classes, file = tmp_path / "slo.toml", tmp_path / "result.json"
    classes.write_text("[classes.fast]\nttft_ms = 0.001\n")
    options = ["--num-requests", "1", "--slo-classes", str(classes), "--json", str(file), *comparison]
    assert cli.main(["simulate", *options]) == 0
    result = json.loads(file.read_text(), parse_constant=pytest.fail)
    (found,) = result.get("points", [result])
    assert found["requests"] == 1 and found["steps"] == 0
