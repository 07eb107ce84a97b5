"""Loads with objectives: requests and counts, with a server whose answers are scripted."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from roseinfer.bench.arrivals import draw, load_classes
from roseinfer.bench.attainment import as_text, attainment
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.exchange import error_field
from roseinfer.bench.open_loop import LoadOutcome, run
from roseinfer.bench.open_loop_report import summarise
from roseinfer.bench.slo_classes import LoadClass, read_classes
from roseinfer.cli import main as cli
from roseinfer.core.errors import ConfigError
from tests.bench.slo_stub import REFUSAL, stub

# Limits beyond any machine's speed, in both directions.
EVER, NEVER = 1000.0, 1e-9
CLASSES = [
    {"name": "easy", "share": 3, "ttft": EVER, "tpot": EVER},
    {"name": "late", "ttft": NEVER, "tpot": EVER},
    {"name": "slow", "ttft": EVER, "tpot": EVER, "e2e": NEVER, "body": {"slo": {"class": "slow"}}},
    {"name": "refused", "ttft": 0.5, "headers": {"x-slo-ttft-ms": "500"}},
    {"name": "limited", "ttft": EVER, "body": {"kind": "limited"}},
    {"name": "cut", "ttft": EVER, "body": {"kind": "cut"}},
]


@pytest.fixture
def classes(tmp_path: Path) -> str:
    file = tmp_path / "classes.json"
    file.write_text(json.dumps(CLASSES))
    return str(file)


def load(url: str, classes: str, **options: Any) -> OpenLoopConfig:
    given = {"model": "m", "num": 80, "procs": 1, "in_len": 9, "in_min": 3, "out_len": 6, "out_min": 2, "vocab": 300}
    return OpenLoopConfig(url=url, slo_classes=classes, **{**given, **options})


def test_what_became_of_each_class(classes: str) -> None:
    with stub() as (url, asked):
        config = load(url, classes)
        found = attainment(run(config), read_classes(classes))
    assert len(asked) == 80 == found["requests"], "nothing is tried twice"
    counts = {name: entry["requests"] for name, entry in found["classes"].items()}
    assert set(counts) == {entry["name"] for entry in CLASSES} and counts["easy"] == max(counts.values())
    easy, late, slow = (found["classes"][name] for name in ("easy", "late", "slow"))
    assert (easy["good"], easy["adherence"], easy["accepted_missed"]) == (counts["easy"], 1.0, 0)
    assert late["missed"] == {"ttft": counts["late"], "tpot": 0, "e2e": 0} and late["adherence"] == 0
    assert slow["missed"] == {"ttft": 0, "tpot": 0, "e2e": counts["slow"]}
    refused, limited, cut = (found["classes"][name] for name in ("refused", "limited", "cut"))
    assert (
        refused["rejected_by_code"] == {"429 slo_unattainable (seats)": counts["refused"]} and refused["accepted"] == 0
    )
    assert limited["rejected_by_code"] == {"429 rate_limit_exceeded": counts["limited"]}
    assert (cut["cut_off"], cut["good"], cut["accepted_missed"]) == (counts["cut"], 0, counts["cut"])
    assert found["rejected"] == counts["refused"] + counts["limited"]
    assert found["good"] == counts["easy"] and found["adherence"] == counts["easy"] / 80
    missed = counts["late"] + counts["slow"] + counts["cut"]
    assert (found["accepted_missed"], found["accepted"]) == (missed, missed + counts["easy"])
    assert found["goodput_req_s"] > 0 and found["goodput_window_req_s"] is None, "a burst takes no time to arrive"


def test_the_same_load_for_a_server_that_knows_no_objectives(classes: str) -> None:
    sent = {}
    with stub() as (url, asked):
        for told in (True, False):
            asked.clear()
            run(load(url, classes, send_objectives=told))
            sent[told] = sorted(asked, key=lambda entry: (entry[0]["prompt"], entry[0]["max_tokens"]))
    work = {told: [(body["prompt"], body["max_tokens"]) for body, _ in entries] for told, entries in sent.items()}
    assert work[True] == work[False]
    assert not any("slo" in body or "kind" in body or "x-slo-ttft-ms" in headers for body, headers in sent[False])
    told = [body["slo"] for body, _ in sent[True] if "slo" in body]
    assert {"ttft_ms": 1e3 * EVER, "tpot_ms": 1e3 * EVER} in told and {"class": "slow"} in told


def test_classes_do_not_change_the_work_and_seeds_do(classes: str) -> None:
    def work(**options: Any) -> list[tuple[float, list[int], int]]:
        config = load("http://localhost", **{"classes": classes, "workload": "poisson", **options})
        planned = draw(config, load_classes(config))
        assert all(3 <= len(p.prompt_ids) <= 9 and 2 <= p.output_len <= 6 for p in planned)
        return [(p.at_s, p.prompt_ids, p.output_len) for p in planned]

    assert work() == work(send_objectives=False)
    bare = OpenLoopConfig(
        workload="poisson", num=80, in_len=9, in_min=3, out_len=6, out_min=2, vocab=300, procs=1, model="m"
    )
    assert [(p.at_s, p.prompt_ids, p.output_len) for p in draw(bare)] == work()
    assert not {tuple(ids) for _, ids, _ in work(seed=1)} & {tuple(ids) for _, ids, _ in work(seed=2) if len(ids) > 3}


def test_classes_may_have_lengths_of_their_own(tmp_path: Path) -> None:
    own = [
        {"name": "long", "ttft": 9, "in_min": 500, "in_len": 900, "out_len": 7},
        {"name": "short", "ttft": 1, "share": 3, "out_min": 1, "out_len": 2},
    ]
    file = tmp_path / "own.json"
    file.write_text(json.dumps(own))
    assert read_classes(str(file))[0].prompts == (500, 900) and read_classes(str(file))[0].outputs == (7, 7)
    config = load("http://localhost", str(file), workload="poisson")
    planned = draw(config, load_classes(config))
    for name, prompts, outputs in (("long", range(500, 901), {7}), ("short", range(3, 10), {1, 2})):
        group = [p for p in planned if p.slo is not None and p.slo.name == name]
        assert len(group) > 10 and all(len(p.prompt_ids) in prompts for p in group)
        assert {p.output_len for p in group} == outputs
    assert [p.prompt_ids for p in planned] == [p.prompt_ids for p in draw(config, load_classes(config))]
    assert "in_len" not in planned[0].slo.body


def outcome(number: int, name: str, chunks: list[float], tokens: int, **more: Any) -> LoadOutcome:
    given = {"due_s": 1.0 * number, "start_s": 1.0 * number, "end_s": 1.0 * number + 9, "status": 200, "ok": True}
    return LoadOutcome(number, 5, 3, name, output_tokens=tokens, chunk_s=chunks, **{**given, **more})


def test_figures_by_hand() -> None:
    classes = [LoadClass("a", ttft_s=0.5, tpot_s=0.25, e2e_s=1.0), LoadClass("b", ttft_s=0.5)]
    outcomes = [
        outcome(0, "a", [0.5, 0.6, 1.0], 3),  # exactly at the limits
        outcome(1, "a", [0.6, 1.2], 3),  # beyond both limits
        outcome(2, "b", [0.1, 9.0], 3),
        LoadOutcome(3, 5, 3, "b", due_s=3, start_s=3, end_s=4, status=503, error="full", code="queue_full"),
        LoadOutcome(4, 5, 3, "b", due_s=4, start_s=4, end_s=21, error="TimeoutError()"),
    ]
    found = attainment(outcomes, classes)
    assert found["classes"]["a"]["missed"] == {"ttft": 1, "tpot": 1, "e2e": 1}
    assert (found["good"], found["accepted"], found["accepted_missed"]) == (2, 3, 1)
    assert (found["rejected"], found["failed"], found["cut_off"]) == (1, 1, 0)
    assert (found["adherence"], found["offered_req_s"]) == (2 / 5, 5 / 4)
    assert (found["goodput_req_s"], found["goodput_window_req_s"]) == (2 / 21, 2 / 4)
    assert found["classes"]["a"]["tpot_ms"]["p50"] == pytest.approx(275)
    assert found["classes"]["b"]["limits_ms"] == {"ttft": 500.0}
    text = as_text(found)
    assert "0.400" in text and "window 0.50" in text
    assert summarise(outcomes, classes)["errors"] == {"503 queue_full": 1, "TimeoutError()": 1}


def test_requests_without_objectives_are_counted_apart() -> None:
    classes = [LoadClass("a", ttft_s=0.5), LoadClass("free")]
    outcomes = [
        outcome(0, "a", [0.5, 0.6, 1.0], 3),
        outcome(1, "a", [0.6, 0.7, 1.0], 3),
        outcome(2, "free", [7.0, 7.5, 8.0], 3),
        outcome(3, "free", [0.1], 1),  # cut off
        LoadOutcome(4, 5, 3, "free", due_s=4, start_s=4, end_s=4, status=503, error="full", code="queue_full"),
    ]
    found = attainment(outcomes, classes)
    assert (found["requests"], found["good"], found["adherence"]) == (2, 1, 1 / 2)
    assert (found["rejected"], found["accepted"], found["accepted_missed"]) == (0, 2, 1)
    assert (found["offered_req_s"], found["goodput_window_req_s"]) == (5 / 4, 1 / 4)
    free = found["best_effort"]
    assert (free["requests"], free["finished"], free["rejected"]) == (3, 1, 1)
    assert (free["adherence"], free["good"], free["accepted_missed"]) == (None, 0, 0)
    assert free["ttft_ms"]["p50"] == pytest.approx(7000.0)
    assert "Best effort: 1 of 3 finished, TTFT ms p50 7000.000" in as_text(found)
    assert attainment(outcomes[:2], classes)["best_effort"] is None


def test_one_token_has_no_tpot() -> None:
    single = LoadOutcome(0, 5, 1, "a", status=200, ok=True, output_tokens=1, chunk_s=[0.1])
    assert attainment([single], [LoadClass("a", tpot_s=NEVER)])["good"] == 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (json.dumps(REFUSAL), "slo_unattainable"),
        ('{"error": {"code": null}}', None),
        ('{"error": "no"}', None),
        ("[1]", None),
        ("busy", None),
    ],
)
def test_the_code_of_an_error(text: str, code: str | None) -> None:
    assert error_field(text, "code") == code


def test_classes_of_a_server(tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text("[classes.chat]\nttft_ms = 500\ntpot_ms = 50\n[classes.batch]\n")
    chat, batch = read_classes(str(file))
    assert chat == LoadClass("chat", 1.0, 0.5, 0.05, inf, {"slo": {"class": "chat"}})
    assert (batch.ttft_s, batch.tpot_s, batch.body) == (inf, inf, {"slo": {"class": "batch"}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "is not a list of classes"),
        ('[{"ttft": 1}]', "entry 0"),
        ('[{"name": "a", "ttft": 0}]', "a.ttft"),
        ('[{"name": "a", "share": -1}]', "a.share"),
        ('[{"name": "a", "ttft_ms": 1}]', "unknown key 'a.ttft_ms'"),
        ('[{"name": "a", "body": []}]', "a.body"),
        ('[{"name": "a", "in_min": 5}]', "a: in_len must be a positive number of tokens"),
        ('[{"name": "a", "out_min": 5, "out_len": 4}]', "a: out_len must be"),
        ('[{"name": "a", "out_len": 0}]', "a: out_len must be"),
        ('[{"name": "a", "in_len": 1.5}]', "a: in_len must be"),
        ('[{"name": "a"}, {"name": "a"}]', "twice"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "classes.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_classes(str(file))


def test_the_command(tmp_path: Path, classes: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    argv = ["--model", "m", "--num", "30", "--procs", "2", "--workload", "poisson", "--rate", "300", "--vocab", "300"]
    argv += ["--input-len", "9", "--input-len-min", "3", "--output-len", "6", "--output-len-min", "2"]
    with stub() as (url, _):
        assert cli.main(["bench", "serve", "--url", url, *argv, "--slo-classes", classes, "--json", str(file)]) == 0
        assert cli.main(["bench", "serve", "--url", url, *argv, "--slo-classes", str(tmp_path / "no.json")]) == 2
    printed = capsys.readouterr()
    assert "adherence" in printed.out and "slo_unattainable" in printed.out and "--slo-classes" in printed.err
    slo = json.loads(file.read_text())["summary"]["slo"]
    assert slo["goodput_window_req_s"] == pytest.approx(slo["adherence"] * slo["offered_req_s"])
