"""Arrivals: laws, processes, traces."""

import json
import statistics
from pathlib import Path

import pytest

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sim.arrivals import make_arrivals, read_trace
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.workload import bursts, gamma, poisson

MIX = SCORPIO_8B.mix
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319600,110,27"
)
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [46, 99]},
]


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("cv", [1.0, 4.0])
def test_gaps_have_the_rate_and_the_variation_asked_for(cv: float) -> None:
    found = gaps(gamma(8.0, 20_000, 0, cv) if cv != 1.0 else poisson(8.0, 20_000, 0))
    assert statistics.fmean(found) == pytest.approx(1 / 8, rel=0.1)
    assert statistics.stdev(found) / statistics.fmean(found) == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(("factor", "busy_s"), [(1.5, 10.0), (2.0, 10.0), (4.0, 5.0), (8.0, 2.5)])
def test_bursts_keep_the_mean_and_alternate(factor: float, busy_s: float) -> None:
    """The busy rate is the requested one: above twice the mean the busy part gets shorter."""
    times = bursts(10.0, 20_000, 0, factor=factor, period_s=20.0)
    assert len(times) / times[-1] == pytest.approx(10.0, rel=0.05)
    busy = sum(at % 20.0 < busy_s for at in times)
    assert busy / (times[-1] * busy_s / 20.0) == pytest.approx(10.0 * factor, rel=0.05)
    if factor >= 2:
        assert busy == len(times)


def test_lengths_follow_the_law_and_its_bounds() -> None:
    arrivals = MIX.requests([0.0] * 5000, 0)
    prompts = [len(arrival.prompt_ids) for arrival in arrivals]
    outputs = [arrival.output_len for arrival in arrivals]
    assert min(prompts) >= 4 and max(prompts) <= 1024
    assert max(len(arrival.prompt_ids) + arrival.output_len for arrival in arrivals) <= 2048
    assert statistics.median(prompts) == pytest.approx(70, rel=0.1)
    assert statistics.median(outputs) == pytest.approx(260, rel=0.1)


def test_predictions_err_as_much_as_the_published_predictor() -> None:
    arrivals = MIX.requests([0.0] * 5000, 0)
    errors = [arrival.predicted_len - arrival.output_len for arrival in arrivals if arrival.output_len > 300]
    assert statistics.fmean(error**2 for error in errors) ** 0.5 == pytest.approx(195, rel=0.1)
    assert min(arrival.predicted_len for arrival in arrivals) == 8


def test_classes_are_drawn_uniformly_and_requests_do_not_depend_on_the_times() -> None:
    arrivals = MIX.requests([0.0] * 6000, 0)
    counts = [sum(arrival.slo.class_name == str(i + 1) for arrival in arrivals) for i in range(6)]
    assert all(count == pytest.approx(1000, rel=0.15) for count in counts)
    other = MIX.requests([float(i) for i in range(6000)], 0)
    assert [a.output_len for a in arrivals] == [a.output_len for a in other]


def test_an_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE, newline="")
    lines = read_trace(str(file))
    assert [(line.prompt_len, line.output_len) for line in lines] == [(4808, 10), (110, 27)]
    assert lines[1].at_s == pytest.approx(0.052)
    assert read_trace(str(file), speed=2.0)[1].at_s == pytest.approx(0.026)
    assert len(read_trace(str(file), seconds=0.01)) == 1


def test_a_mooncake_trace_shares_prefixes_where_its_blocks_do(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    first, second = read_trace(str(file))
    assert (first.prompt_len, second.prompt_len) == (600, 1030)
    assert 0.0 < second.at_s < 6.0
    a, b = first.prompt_ids(1000), second.prompt_ids(1000)
    assert (len(a), len(b)) == (600, 1030)
    assert a[:512] == b[:512] and a[512:600] != b[512:600]


def test_trace_times_come_with_the_setups_lengths_unless_asked(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE, newline="")
    workload = WorkloadConfig(workload="trace", trace=str(file))
    assert [len(a.prompt_ids) for a in make_arrivals(workload, SCORPIO_8B)] != [4808, 110]
    own = WorkloadConfig(workload="trace", trace=str(file), trace_lengths=True)
    assert [(len(a.prompt_ids), a.output_len) for a in make_arrivals(own, SCORPIO_8B)] == [(110, 27)], "4808 do not fit"
    assert [len(a.prompt_ids) for a in make_arrivals(own)] == [4808, 110]


def test_unreadable_traces_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_trace(str(tmp_path / "none.csv"))
    for name, text in (("a.csv", "a,b\n1,2\n"), ("b.jsonl", "{}\n"), ("c.jsonl", ""), ("d.jsonl", "5\n")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            read_trace(str(tmp_path / name))
    for wrong in (
        {"timestamp": 1e300 * 1e300}, {"input_length": 0}, {"input_length": 10**9}, {"output_length": -1},
        {"hash_ids": ["a"]},
    ):  # fmt: skip
        row = {"timestamp": 0, "input_length": 5, "output_length": 5} | wrong
        (tmp_path / "e.jsonl").write_text(json.dumps(row))
        with pytest.raises(ConfigError, match=r"e\.jsonl' is no trace"):
            read_trace(str(tmp_path / "e.jsonl"))
    with pytest.raises(ConfigError, match="workload trace requires --trace"):
        WorkloadConfig(workload="trace")


def test_classes_and_tenants_come_in_the_shares_asked_for() -> None:
    options = {"setup": "scorpio-8b", "num_requests": 3000, "request_rate": 5.0}
    config = WorkloadConfig(class_shares="1,1,1,4,4,4", tenant_shares="8,1,1", **options)
    arrivals = make_arrivals(config, SCORPIO_8B)
    loose = sum(arrival.slo.tpot_s == 0.05 for arrival in arrivals) / 3000
    assert loose == pytest.approx(0.8, abs=0.03)
    shares = [sum(arrival.tenant == name for arrival in arrivals) / 3000 for name in "123"]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.03)
    assert {arrival.tenant for arrival in make_arrivals(WorkloadConfig(**options), SCORPIO_8B)} == {""}


def test_a_trace_with_its_own_lengths_has_tenants_too(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(AZURE.replace("4808", "480"))
    config = WorkloadConfig(
        setup="scorpio-8b", workload="trace", trace=str(file), trace_lengths=True, tenant_shares="1"
    )
    assert [arrival.tenant for arrival in make_arrivals(config, SCORPIO_8B)] == ["1", "1"]


def test_shares_out_of_range() -> None:
    with pytest.raises(ConfigError, match="class_shares: got 2 shares for 6 classes"):
        make_arrivals(WorkloadConfig(setup="scorpio-8b", class_shares="1,2"), SCORPIO_8B)
    with pytest.raises(ConfigError, match="tenant_shares"):
        WorkloadConfig(setup="scorpio-8b", tenant_shares="1,-1")
    with pytest.raises(ConfigError, match="class_shares: got 1 shares for 0 classes"):
        make_arrivals(WorkloadConfig(class_shares="1"))


def test_objectives_and_predictions_without_a_setup() -> None:
    options = {"num_requests": 200, "request_rate": 5.0, "input_len": 64, "output_len": 400}
    bare = make_arrivals(WorkloadConfig(**options))
    assert {(arrival.slo, arrival.predicted_len, arrival.tenant) for arrival in bare} == {(None, None, "")}
    assert len({tuple(arrival.prompt_ids[:4]) for arrival in bare}) == 200, "no shared prefixes"
    classes = (Slo(0.5, 0.05, class_name="a"), Slo(None, None, class_name="b"))
    config = WorkloadConfig(predictor_rmse=50.0, class_shares="3,1", **options)
    arrivals = make_arrivals(config, classes=classes)
    assert sum(arrival.slo is classes[0] for arrival in arrivals) == pytest.approx(150, abs=25)
    errors = [arrival.predicted_len - arrival.output_len for arrival in arrivals if arrival.output_len > 300]
    assert statistics.fmean(error**2 for error in errors) ** 0.5 == pytest.approx(50, rel=0.3)


def test_classes_instead_of_those_of_the_setup() -> None:
    slo = Slo(0.5, 0.05, class_name="a")
    arrivals = make_arrivals(WorkloadConfig(setup="scorpio-8b", num_requests=20), SCORPIO_8B, (slo,))
    assert {arrival.slo for arrival in arrivals} == {slo}
    original = make_arrivals(WorkloadConfig(setup="scorpio-8b", num_requests=20), SCORPIO_8B)
    assert arrivals[0].output_len == original[0].output_len
