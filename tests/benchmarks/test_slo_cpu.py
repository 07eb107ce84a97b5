"""benchmarks/slo_cpu.py: settings derived from the machine, and summaries of a run."""

import asyncio

import pytest

from benchmarks import slo_cpu
from tests.bench.slo_stub import stub


def test_objectives_are_the_papers_scaled_to_the_machine():
    classes = slo_cpu.scaled_classes("six", 6.0, 10.0)
    assert [entry["tpot"] for entry in classes] == [0.006] * 3 + [0.01] * 3
    assert [entry["ttft"] for entry in classes] == pytest.approx([0.1, 0.4, 0.6, 0.1, 0.2, 1.5])


def test_other_loads_scale_in_the_same_way():
    short, long = slo_cpu.scaled_classes("long", 6.0, 10.0)
    assert (short["share"], short["ttft"], short["tpot"]) == (9, pytest.approx(0.1), pytest.approx(0.006))
    assert (long["ttft"], long["tpot"]) == (pytest.approx(2.0), pytest.approx(0.01))
    assert (long["in_min"], long["in_len"]) == (1000, 1800) and "in_len" not in short
    loose, strict = slo_cpu.scaled_classes("strict", 6.0, 10.0)
    assert (loose["tpot"], strict["tpot"]) == (pytest.approx(0.02), pytest.approx(0.0044))


def test_loads_that_are_none():
    assert slo_cpu.parse(["--loads", "six,strict"]).loads == "six,strict"
    with pytest.raises(SystemExit):
        slo_cpu.parse(["--loads", "night"])


@pytest.mark.exhaustive
def test_a_load_has_its_own_capacity_and_rates():
    args = slo_cpu.parse(["--seconds", "0.1", "--loads", "long", "--rates", "200"])
    classes = slo_cpu.scaled_classes("long", 6000.0, 9000.0)
    with stub() as (url, asked):
        found = asyncio.run(slo_cpu.put_load("long", url, {"fifo": url}, classes, args))
    lengths = [len(body["prompt"]) for body, _ in asked]
    assert any(length >= 1000 for length in lengths) and sum(length <= 384 for length in lengths) > 80
    assert not any("slo" in body for body, _ in asked[: slo_cpu.CAPACITY_REQUESTS])
    assert found["capacity_req_s"] > 0 and [point["rate"] for point in found["points"]] == [200.0]


def test_sarathi_gets_as_many_tokens_as_last_a_tight_objective():
    shortest, longest = slo_cpu.PROMPTS
    alone = slo_cpu.Alone(0.002, 0.01, 0.01 + 1e-4 * (longest - shortest))
    assert slo_cpu.sarathi_budget(alone, 6.0) == 32
    assert slo_cpu.sarathi_budget(alone, 2.1) == slo_cpu.SMALLEST_BUDGET


def test_the_best_of_several_settings_counts():
    names = slo_cpu.contenders(["slack", "sarathi"], 16)
    assert list(names) == ["slack", "sarathi 16", "sarathi 32", "sarathi 64"]
    assert names["sarathi 32"][-2:] == ["--sarathi-token-budget", "32"]
    point = {"rate": 1.0, "seed": 0, "sent_late_ms": {"p99": 1.0}}
    slo = {"requests": 10, "accepted": 10, "goodput_window_req_s": 1.0, "goodput_req_s": 1.0, "rejected": 0}
    slo |= {"accepted_missed": 0, "missed": {"ttft": 0, "tpot": 0}}
    goods = {"sarathi 16": 3, "sarathi 32": 5, "sarathi 64": 4, "slack": 2}
    points = [{**point, "policy": name, "slo": {**slo, "good": good}} for name, good in goods.items()]
    assert [(row["policy"], row["adherence"]) for row in slo_cpu.merged(points)] == [
        ("sarathi 32", "0.500"),
        ("slack", "0.200"),
    ]


def test_every_policy_gets_the_same_loads(capsys):
    args = slo_cpu.parse(["--seconds", "0.1", "--seeds", "2"])
    easy = [{"name": "a", "ttft": 1000.0, "tpot": 1000.0}, {"name": "b", "ttft": 1e-9}]
    with stub() as (one, asked_one), stub() as (other, asked_other):
        urls = {"fifo": one, "slack": other}
        slo_cpu.WARM_UP_S = 0.02
        points = asyncio.run(slo_cpu.put_loads(urls, [100.0, 300.0], easy, args))
    prompts = [sorted(tuple(body["prompt"]) for body, _ in asked) for asked in (asked_one, asked_other)]
    assert prompts[0] == prompts[1] and len(set(prompts[0])) == len(prompts[0])
    assert [(p["rate"], p["policy"]) for p in points[:4]] == [
        (100.0, "fifo"),
        (100.0, "slack"),
        (300.0, "slack"),
        (300.0, "fifo"),
    ]
    rows = slo_cpu.merged(points)
    assert (rows[0]["policy"], rows[0]["req/s"], rows[0]["requests"]) == ("fifo", 100.0, 20)
    assert rows[0]["adherence"] == rows[1]["adherence"] and 0 < float(rows[0]["adherence"]) < 1
    assert rows[0]["by TTFT"] + round(20 * float(rows[0]["adherence"])) == 20
    assert "300.00 req/s, seed 1" in capsys.readouterr().out
