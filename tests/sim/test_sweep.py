"""Policies against loads, and what is said of them."""

import json
import random
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import FinishReason
from roseinfer.core.slo import Cause, Rejection, Slo
from roseinfer.priced.machine import Machine
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.registry import scheduler_config
from roseinfer.sim.arrivals import OptionArrivals
from roseinfer.sim.config import SweepConfig, WorkloadConfig
from roseinfer.sim.report import jain, mean_of, percentiles, summarise
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.simulator import Lifetime, SimulationResult, simulate
from roseinfer.sim.sweep import LoadPoint, PolicySweep, check_given, contender, find_capacity, run_sweep, settings_of
from roseinfer.sim.workload import Arrival, poisson
from tests.helpers.cases import cases

pytestmark = pytest.mark.long

SLO = Slo(1.0, 0.1, class_name="a")


def life(ttft_s: float, tpot_s: float, tokens: int = 11, reason: FinishReason = FinishReason.STOP) -> Lifetime:
    times = [ttft_s + i * tpot_s for i in range(tokens)]
    return Lifetime(0.0, SLO, tokens, "", times, reason)


def at(rate: float, requests: int = 300) -> LoadPoint:
    return LoadPoint(rate, OptionArrivals(WorkloadConfig(num_requests=requests), SCORPIO_8B, rate))


def sweep(*policies: str, rate: float = 15.0, requests: int = 300, **options: object) -> list[dict]:
    return [point_of(policy, rate, requests, **options) for policy in policies]


@cache
def point_of(policy: str, rate: float, requests: int, **options: object) -> dict:
    compared = PolicySweep(SCORPIO_8B.machine, [at(rate, requests)], [policy], SCORPIO_8B.scheduler, jobs=1, **options)
    return run_sweep(compared)[0]


def test_good_is_finished_and_in_time_on_both_counts() -> None:
    assert life(0.9, 0.099).good
    assert not life(1.1, 0.099).good
    assert not life(0.9, 0.101).good
    assert not life(0.9, 0.05, reason=FinishReason.TIMEOUT).good
    assert life(0.9, 0.0, tokens=1).good
    assert not Lifetime(0.0, SLO, 5, "", [], FinishReason.REJECTED).good


def test_a_summary_counts_the_rejected_in_the_denominator() -> None:
    lives = [life(0.5, 0.05), life(0.5, 0.2), Lifetime(4.0, SLO, 5, "", [], FinishReason.REJECTED)]
    found = summarise(SimulationResult(lives, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0, policy_s=1e-3))
    assert found["adherence"] == pytest.approx(1 / 3)
    assert found["rejected"] == pytest.approx(1 / 3)
    assert found["accepted_missed"] == pytest.approx(1 / 2)
    assert (found["goodput_req_s"], found["goodput_window_req_s"]) == (1 / 8, 1 / 4)
    assert found["offered_req_s"] == 3 / 4
    assert found["tpot_ms"]["p50"] == pytest.approx(125.0)
    assert found["longest_gap_ms"] == pytest.approx(200.0)
    assert found["scheduler_us_per_step"] == pytest.approx(100.0)
    assert found["false_rejected"] is None


def test_the_refused_are_counted_by_cause() -> None:
    gone = [
        Lifetime(4.0, SLO, 5, "", [], FinishReason.REJECTED, Rejection("ttft", 1.0, cause))
        for cause in (Cause.PRICE, Cause.PRICE, Cause.SEATS)
    ]
    found = summarise(SimulationResult([life(0.5, 0.05), *gone], elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    assert found["refused_by"] == {cause.value: 0 for cause in Cause} | {"price": 2, "seats": 1}
    assert mean_of([found, {**found, "refused_by": dict.fromkeys(Cause, 0)}])["refused_by"]["price"] == 1


def test_waits_are_added_up_by_cause_and_class() -> None:
    lives = [life(0.5, 0.05), life(0.5, 0.05)]
    lives[0].waited = ((Cause.SEATS, 2.0), (Cause.STEP, 0.5))
    lives[1].waited = ((Cause.SEATS, 1.0),)
    found = summarise(SimulationResult(lives, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    wanted = {cause.value: 0.0 for cause in Cause} | {"seats": 3.0, "step": 0.5}
    assert found["waited_s"] == wanted == found["classes"][SLO.class_name]["waited_s"]


def test_every_wait_of_a_run_has_a_cause() -> None:
    for name in ("fifo", "slack", "qoserve"):
        (point,) = sweep(name, rate=22.0, requests=80)
        waited = point["waited_s"]
        assert sum(waited.values()) > 0 and waited["other"] == waited["transit"] == 0.0


def test_every_refusal_of_a_run_has_a_cause() -> None:
    for name in ("slack", "scorpio"):
        (point,) = sweep(name, rate=22.0, requests=80)
        refused = point["refused_by"]
        assert sum(refused.values()) == pytest.approx(point["rejected"] * point["requests"]) and refused["other"] == 0
        assert refused["price" if name == "slack" else "utilisation"] > 0.5 * sum(refused.values())


def test_requests_without_objectives_are_counted_apart() -> None:
    """They are neither good nor bad, finished or not: what was promised to nobody says nothing of promises."""
    free = [Lifetime(0.0, None, 9, "b", [2.0, 2.1], FinishReason.STOP), Lifetime(1.0, Slo(class_name="c"), 9, "b")]
    lives = [life(0.5, 0.05), *free, life(0.5, 0.2), Lifetime(4.0, SLO, 5, "", [], FinishReason.REJECTED)]
    assert not free[0].good
    found = summarise(SimulationResult(lives, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    assert (found["requests"], found["promised"], found["offered_req_s"]) == (5, 3, 5 / 4)
    assert (found["adherence"], found["rejected"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert found["accepted_missed"] == pytest.approx(1 / 2)
    assert (found["goodput_req_s"], found["goodput_window_req_s"]) == (1 / 8, 1 / 4)
    assert found["missed"]["tpot"] == pytest.approx(1 / 3)
    assert found["terciles"] == {"short": 0.0, "middle": 1.0, "long": 0.0}
    assert found["tenants"] == {"": pytest.approx(1 / 3)}
    assert found["classes"]["c"]["adherence"] is None
    waits = {"p50": 2000.0, "p95": 2000.0, "p99": 2000.0}
    assert found["best_effort"] == {"requests": 2, "finished": 0.5, "ttft_ms": waits}
    bare = summarise(SimulationResult(free, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    assert bare["adherence"] is None and bare["goodput_req_s"] == 0


def test_misses_are_counted_by_objective() -> None:
    late, slow = life(1.5, 0.05), life(0.5, 0.2)
    lives = [life(0.5, 0.05), late, slow, Lifetime(4.0, SLO, 5, "", [], FinishReason.REJECTED)]
    found = summarise(SimulationResult(lives, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    assert found["missed"] == {"ttft": 0.25, "tpot": 0.25, "e2e": 0.0}
    assert found["classes"]["a"]["missed"] == found["missed"]


def test_the_longest_gap_and_the_thirds_by_output_length() -> None:
    lives = [life(0.5, 0.05, tokens=n) for n in (2, 5, 20, 25)] + [life(0.5, 0.2, tokens=n) for n in (40, 50)]
    lives[1].token_s[-1] += 3.0
    found = summarise(SimulationResult(lives, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    assert found["longest_gap_ms"] == pytest.approx(3050.0)
    assert found["terciles"] == {"short": 0.5, "middle": 1.0, "long": 0.0}


def test_adherence_by_tenant_and_how_equal_it_is() -> None:
    lives = [life(0.5, 0.05), life(0.5, 0.05), life(0.5, 0.05), life(0.5, 0.2)]
    for number, tenant in enumerate("aabb"):
        lives[number].tenant = tenant
    found = summarise(SimulationResult(lives, elapsed_s=8.0, busy_s=4.0, steps=10, preemptions=0))
    assert found["tenants"] == {"a": 1.0, "b": 0.5}
    assert found["fairness"] == pytest.approx(1.5**2 / (2 * 1.25))


def test_the_error_of_the_cost_model_over_the_run() -> None:
    """The policy believes in a machine a fifth faster: rho catches up within the first tenth, and stays."""
    arrivals = SCORPIO_8B.mix.requests(poisson(7.0, 50, 0), 0)
    config = scheduler_config(scheduling_policy="slack", **SCORPIO_8B.scheduler)
    quiet = replace(SCORPIO_8B.machine, noise=0.0)
    right, wrong = (simulate(arrivals, config, machine) for machine in (quiet, quiet.misjudged(1.25)))
    assert 0.99 * right.steps < len(right.cost_errors) <= right.steps
    assert max(error for error, _ in right.cost_errors) < 1e-6
    assert wrong.cost_errors[0] == (pytest.approx(0.25), pytest.approx(1.0, abs=0.01))
    found = summarise(wrong)["cost_model"]
    assert len(found["mape_tenths"]) == len(found["rho_tenths"]) == 10
    assert found["mape_tenths"][0] > found["mape_tenths"][9]
    assert found["mape_tenths"][9] < 0.01
    assert found["rho"] == found["rho_tenths"][9] == wrong.cost_errors[-1][1]


def test_a_policy_that_predicts_nothing_has_no_error() -> None:
    config = SchedulerConfig(scheduling_policy="fifo")
    run = simulate(SCORPIO_8B.mix.requests(poisson(7.0, 50, 0), 0), config, SCORPIO_8B.machine)
    assert run.cost_errors == []
    assert summarise(run)["cost_model"] is None


def test_the_peak_of_the_cache_in_use() -> None:
    machine = Machine(num_blocks=8, block_size=16, max_model_len=64, prefix_caching=False)
    arrivals = [Arrival(0.0, [1] * 16, 40), Arrival(0.0, [1] * 16, 10)]
    assert simulate(arrivals, SchedulerConfig(), machine).kv_peak == 0.5  # 4 blocks, the short one has left
    assert simulate(arrivals[:1] * 2, SchedulerConfig(), machine).kv_peak == 1.0


def test_means_over_seeds_go_member_by_member() -> None:
    runs = [{"a": 1, "b": {"c": 2.0}, "d": [1.0, 3.0], "e": None}, {"a": 2, "b": {"c": 4.0}, "d": [3.0, 5.0], "e": 1}]
    assert mean_of(runs) == {"a": 1.5, "b": {"c": 3.0}, "d": [2.0, 4.0], "e": None}


def test_means_of_what_only_some_runs_have() -> None:
    runs = [
        {"classes": {"a": {"x": 1.0}}, "free": None},
        {"classes": {"a": {"x": 3.0}, "b": {"x": 5.0}}, "free": {"y": 2}},
    ]
    assert mean_of(runs) == {"classes": {"a": {"x": 2.0}, "b": {"x": 5.0}}, "free": {"y": 2.0}}


def test_percentiles_and_fairness() -> None:
    assert percentiles([1.0, 2.0, 3.0], 1.0) == {"p50": 2.0, "p95": pytest.approx(2.9), "p99": pytest.approx(2.98)}
    assert percentiles([]) == {"p50": None, "p95": None, "p99": None}
    assert jain([1.0, 1.0]) == 1.0
    assert jain([1.0, 0.0]) == 0.5


def test_every_policy_sees_the_same_arrivals() -> None:
    arrivals = at(7.0).arrivals
    assert arrivals(0) == arrivals(0)
    assert arrivals(0) != arrivals(1)


def test_slack_beats_scorpio_and_fifo_past_saturation() -> None:
    found = {point["policy"]: point["adherence"] for point in sweep("fifo", "scorpio", "slack", requests=130)}
    assert max(found["fifo"], found["scorpio"]) < found["slack"]


@pytest.mark.exhaustive
def test_the_order_of_the_policies_past_saturation() -> None:
    """The shape of the published curves: fcfs collapses, SCORPIO's guards hold, mixed steps and slack are better."""
    found = {point["policy"]: point for point in sweep("fifo", "scorpio", "scorpio-tuned", "slack", requests=500)}
    adherence = {name: point["adherence"] for name, point in found.items()}
    assert adherence["fifo"] < adherence["scorpio"]
    assert adherence["scorpio"] + 0.05 < adherence["scorpio-tuned"]
    assert adherence["scorpio-tuned"] + 0.02 < adherence["slack"]
    assert found["slack"]["accepted_missed"] <= 0.02


@pytest.mark.exhaustive
def test_below_saturation_slack_loses_nothing_where_scorpio_does() -> None:
    found = {point["policy"]: point["adherence"] for point in sweep("fifo", "scorpio", "slack", rate=4.0, requests=75)}
    assert found["slack"] >= found["fifo"] - 0.001
    assert found["scorpio"] < 0.99


@cases(("rate", "requests"), [(1.0, 40)], exhaustive=[(0.1, 150), (1.0, 150)])
def test_an_idle_machine_turns_nobody_away(rate: float, requests: int) -> None:
    assert sweep("slack", rate=rate, requests=requests)[0]["adherence"] == 1.0


@pytest.mark.exhaustive
def test_a_machine_whose_steps_are_short_of_the_objectives_loses_nothing_to_skipping() -> None:
    """Decoding all rows takes half of a TPOT objective: a row one token ahead must not be skipped."""
    machine = Machine(CostParams(4.4e-3, 27e-6, 0.0, 12e-6, 31e-9), noise=0.03, prefix_caching=False)
    rng, classes = random.Random(0), [Slo(0.13, 0.008), Slo(0.8, 0.008), Slo(0.27, 0.013), Slo(2.0, 0.013)]
    arrivals = []
    for at_s in poisson(25.0, 300, 0):
        output = rng.randint(32, 256)
        arrivals.append(Arrival(at_s, [1] * rng.randint(64, 512), output, rng.choice(classes), output))
    for overlap in (False, True):
        config = SchedulerConfig(scheduling_policy="slack", overlap=overlap)
        lives = simulate(arrivals, config, machine).lifetimes
        assert sum(life.good for life in lives) / 300 > 0.98


def misjudging(requests: int) -> tuple[float, float]:
    """Return the share of good requests with a right cost model, and on a machine 8% slower than believed."""
    arrivals = SCORPIO_8B.mix.requests(poisson(11.0, requests, 0), 0)
    config = scheduler_config(scheduling_policy="slack", **SCORPIO_8B.scheduler)
    misjudged = SCORPIO_8B.machine.misjudged(1.08)
    assert misjudged.cost.step_s == pytest.approx(1.08 * misjudged.belief.step_s)
    right, wrong = (
        sum(life.good for life in simulate(arrivals, config, machine).lifetimes) / requests
        for machine in (SCORPIO_8B.machine, misjudged)
    )
    return right, wrong


@pytest.mark.exhaustive
def test_a_slower_machine_than_the_model_believes_costs_little() -> None:
    right, wrong = misjudging(600)
    assert wrong > right - 0.02
    assert right > 0.8


def test_true_lengths_show_who_was_refused_without_need() -> None:
    point = sweep("slack", rate=22.0, requests=80, false_rejects=True)[0]
    assert 0 < point["false_rejected"] < point["rejected"]


def test_the_best_setting_of_a_contender_counts() -> None:
    point = sweep("sarathi", rate=6.0, requests=30)[0]
    assert point["setting"]["scheduling_policy"] == "sarathi"
    assert point["setting"]["sarathi_token_budget"] in (256, 512, 1024, 2048)


def test_given_options_beat_settings_and_are_those_of_the_policies_that_have_them() -> None:
    compared = PolicySweep(SCORPIO_8B.machine, [], ["fifo", "sarathi", "slack"], SCORPIO_8B.scheduler)
    assert len(settings_of(compared, "sarathi")) == 4
    given = replace(compared, given={"sarathi_token_budget": 96, "max_num_seqs": 9, "decode_first": False})
    check_given(given)
    (sarathi,), (fifo,) = settings_of(given, "sarathi"), settings_of(given, "fifo")
    assert (sarathi["sarathi_token_budget"], sarathi["max_num_seqs"]) == (96, 9)
    assert "sarathi_token_budget" not in fifo and fifo["decode_first"] is False
    with pytest.raises(ConfigError, match="scorpio_eps needs scheduling_policy scorpio"):
        check_given(replace(compared, given={"scorpio_eps": 1.5}))
    with pytest.raises(ConfigError, match="sarathi_token_budget must be positive"):
        check_given(replace(compared, given={"sarathi_token_budget": 0}))


def test_a_policys_option_in_a_comparison(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    flags = "--setup scorpio-8b --policies fifo,sarathi --rates 5 --requests 40 --jobs 1 --sarathi-token-budget 96"
    assert cli.main(["simulate", *flags.split(), "--json", str(file)]) == 0
    assert [point["setting"] for point in json.loads(file.read_text())["points"]] == [
        {"scheduling_policy": "fifo"},
        {"scheduling_policy": "sarathi", "sarathi_token_budget": 96},
    ]
    assert cli.main(["simulate", *flags.replace("fifo,sarathi", "fifo").split()]) != 0


def test_a_comparison_of_best_effort_only(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "simulate --policies fifo,sarathi --rates 5 --requests 10 --jobs 1"
    assert cli.main(flags.split()) == 0
    printed = capsys.readouterr().out
    assert "best effort" in printed and "wait p50 ms" in printed
    assert cli.main([*flags.replace("--policies", "--setup scorpio-8b --policies").split()]) == 0
    assert "best effort" not in capsys.readouterr().out


def test_names_of_contenders() -> None:
    assert contender("slack-oracle") == (contender("slack")[0], "oracle")
    assert contender("scorpio-tuned")[1] is None
    with pytest.raises(ConfigError, match="policies"):
        contender("lottery")


@pytest.mark.exhaustive
def test_capacity_is_the_highest_rate_that_meets_the_target() -> None:
    found = find_capacity(
        PolicySweep(SCORPIO_8B.machine, [], [], SCORPIO_8B.scheduler, jobs=1),
        "slack",
        lambda r: at(r, 150),
        0.9,
        steps=2,
    )
    assert found.adherence >= 0.9
    assert 6.0 < found.rate < 16.0
    assert set(found.reasons) == {"1", "2", "3", "4", "5", "6"}
    assert found.tight == max(found.reasons, key=found.reasons.__getitem__)


def test_options_out_of_range() -> None:
    assert SweepConfig(rates="5, 7.5").rate_list == (5.0, 7.5)
    for rates in ("a", "-1", "0", "nan"):
        with pytest.raises(ConfigError, match="rates"):
            _ = SweepConfig(rates=rates).rate_list
    with pytest.raises(ConfigError, match="target"):
        SweepConfig(target=1.0)


def test_the_command_compares_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    flags = "--setup scorpio-8b --policies fifo,slack --rates 5,60 --requests 60 --seeds 2 --jobs 1"
    assert cli.main(["simulate", *flags.split(), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "adherence" in printed and re.search(r"(seats|blocks|step|prompt_budget) \d+%", printed)
    assert re.search(r"price \d+%", printed)
    points = json.loads(file.read_text())["points"]
    assert [(point["policy"], point["rate"]) for point in points] == [
        ("fifo", 5.0),
        ("slack", 5.0),
        ("fifo", 60.0),
        ("slack", 60.0),
    ]
    wanted = (
        "offered_req_s goodput_req_s goodput_window_req_s adherence rejected refused_by waited_s false_rejected "
        "classes ttft_ms tpot_ms itl_ms good_tok_s fairness scheduler_us_per_step seeds"
    )
    assert all(set(wanted.split()) <= point.keys() for point in points)
    assert len(points[0]["seeds"]) == 2


def test_the_command_refuses_what_it_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--setup", "scorpio-8b", "--policies", "lottery", "--rates", "5"]) != 0
    assert cli.main(["simulate", "--setup", "scorpio-8b", "--policies", "slack"]) != 0
    assert "rates" in capsys.readouterr().err
    assert cli.main(["simulate", "--policies", "slack", "--capacity"]) != 0
    assert "slo-classes" in capsys.readouterr().err


def test_capacity_at_objectives_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step takes 10 ms and more: 20 ms a token can be kept, 9 ms cannot."""
    file = tmp_path / "classes.toml"
    file.write_text("[classes.chat]\nttft_ms = 500\ntpot_ms = 20\n")
    flags = f"simulate --slo-classes {file} --step-ms 10 --row-us 800 --context-ns 0 --requests 16 --policies slack"
    out = tmp_path / "capacity.json"
    assert cli.main([*flags.split(), "--capacity", "--target", "0.9", "--jobs", "1", "--json", str(out)]) == 0
    assert "class chat (TTFT 500 ms, TPOT 20 ms) is the limit" in capsys.readouterr().out
    (found,) = json.loads(out.read_text())["capacity"]
    assert found["adherence"] >= 0.9 and found["rate"] > 1.0
    file.write_text(file.read_text().replace("20", "9"))
    assert cli.main([*flags.split(), "--rates", "1", "--jobs", "1", "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["points"][0]["adherence"] < 0.5


def test_a_policy_that_keeps_nothing_does_not_end_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step takes 10 ms, and 9 ms a token are asked for."""
    file, out = tmp_path / "classes.toml", tmp_path / "out.json"
    file.write_text("[classes.chat]\nttft_ms = 500\ntpot_ms = 9\n")
    flags = f"simulate --slo-classes {file} --step-ms 10 --row-us 100 --context-ns 0 --requests 8 --policies fifo,slack"
    assert cli.main([*flags.split(), "--capacity", "--target", "0.9", "--jobs", "1", "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["fifo", "slack"]
    assert all("does not meet 90.0% at any rate" in line and "class chat" in line for line in lines)
    found = json.loads(out.read_text())["capacity"]
    assert [(entry["rate"], entry["adherence"]) for entry in found] == [(0.0, None)] * 2


def test_what_is_for_a_comparison_compares_without_being_told_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--requests", "20", "--rates", "5,10", "--jobs", "1"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["slack", "5.00"],
        ["slack", "10.00"],
    ]
    assert cli.main(["simulate", "--requests", "20", "--seeds", "3"]) == 2
    assert "--rates" in capsys.readouterr().err
