"""Workloads described in files: what they come to, and what is refused."""

import json
from pathlib import Path

import pytest

from roseinfer.cli import main as cli
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import PeriodicStalls
from roseinfer.sched.cost.file import cost_as_json
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.distributions import (
    Bimodal,
    Empirical,
    Fixed,
    Gamma,
    LogNormal,
    OnOff,
    Pareto,
    Replayed,
    Steps,
    Uniform,
)
from roseinfer.sim.length_hints import MisleadingHints, NoHints, NoisyHints
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.workload import SharedPrefixes, TrafficClass
from roseinfer.sim.workload_file import WorkloadFile, read_workload

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "workloads").glob("*.toml"))
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,110,27\n"
    "2023-11-16 18:17:05.0319600,120,7\n"
)
FULL = """
requests = 50
rate = 4.0
arrivals = { process = "gamma", cv = 2 }
hints = { kind = "noisy", rmse = 100 }

[machine]
step_ms = 10
token_us = 50
pair_ns = 2
row_us = 60
context_ns = 30
chunk_context_ns = 40
noise = 0.1
stalls = { every_s = 20, lasts_s = 1.5 }
slowdown = [{ at_s = 30, factor = 1.5 }, { at_s = 60, factor = 1 }]
max_model_len = 9000
num_kv_blocks = 700
block_size = 32
enable_prefix_caching = false
max_num_seqs = 64

[classes.a]
share = 3
ttft_ms = 500
tpot_ms = 50
e2e_ms = 10000
prompts = { law = "lognormal", median = 70, sigma = 1.35, low = 4, high = 1024 }
outputs = { law = "pareto", least = 16, alpha = 1.5, high = 800 }
arrivals = { process = "onoff", on_s = 5, off_s = 15 }
tenant = "t"
priority = -2
hints = { kind = "liars", share = 0.5, factor = 0.1, rmse = 50 }
prefix = { tokens = 20, share = 0.5, number = 3 }

[classes.b]
prompts = { law = "bimodal", low = [8, 40], high = [500, 1000], share_high = 0.3 }
outputs = { law = "trace", file = "azure.csv", column = "output" }
arrivals = { process = "steps", factors = [1, 3] }
hints = { kind = "absent" }

[classes.c]
prompts = { law = "uniform", low = 3, high = 9 }
outputs = { law = "fixed", value = 5 }
arrivals = { process = "trace", file = "azure.csv" }
"""
SMALL = """
[classes.a]
ttft_ms = 1000
prompts = { law = "uniform", low = 3, high = 9 }
outputs = { law = "fixed", value = 5 }
"""


def read(folder: Path, text: str) -> WorkloadFile:
    (folder / "azure.csv").write_text(AZURE)
    (folder / "load.toml").write_text(text)
    return read_workload(str(folder / "load.toml"))


def test_all_that_a_file_may_say(tmp_path: Path) -> None:
    found = read(tmp_path, FULL)
    workload, machine = found.workload, found.machine
    assert (found.requests, workload.rate, workload.process, workload.hints) == (50, 4.0, Gamma(2), NoisyHints(100))
    assert machine.cost.values() == pytest.approx((0.010, 50e-6, 2e-9, 60e-6, 30e-9, 40e-9))
    assert (machine.noise, machine.stalls) == (0.1, PeriodicStalls(20, 1.5))
    assert machine.slowdown == ((30.0, 1.5), (60.0, 1.0))
    assert (machine.max_model_len, machine.num_blocks, machine.block_size) == (9000, 700, 32)
    assert (machine.prefix_caching, workload.distinct, workload.context) == (False, False, 9000)
    assert found.scheduler == {"max_num_seqs": 64}
    a, b, c = workload.classes
    assert a == TrafficClass(
        "a",
        LogNormal(70, 1.35, 4, 1024),
        Pareto(16, 1.5, 800),
        Slo(0.5, 0.05, 10.0, "a"),
        3,
        OnOff(5, 15),
        "t",
        -2,
        MisleadingHints(0.5, 0.1, 50),
        SharedPrefixes(20, 0.5, 3),
    )
    assert (b.prompts, b.outputs) == (Bimodal((8, 40), (500, 1000), 0.3), Empirical([10, 27, 7]))
    assert (b.process, b.hints, b.slo) == (Steps((1.0, 3.0)), NoHints(), Slo(class_name="b"))
    assert (c.prompts, c.outputs) == (Uniform(3, 9), Fixed(5))
    assert isinstance(c.process, Replayed) and c.process.recorded_s == pytest.approx([0.0, 0.052, 1.052])
    arrivals = workload.requests(15, 0)
    assert {arrival.slo for arrival in arrivals} == {a.slo, b.slo, c.slo}
    assert {arrival.predicted_len for arrival in arrivals if arrival.slo is b.slo} == {None}


def test_what_need_not_be_said(tmp_path: Path) -> None:
    found = read(tmp_path, SMALL)
    assert (found.requests, found.workload.rate, found.scheduler) == (None, 0.0, {})
    assert found.workload.distinct and found.machine.prefix_caching


def test_a_setups_machine_and_what_is_otherwise(tmp_path: Path) -> None:
    found = read(tmp_path, '[machine]\nsetup = "scorpio-8b"\nnoise = 0.2\nmax_num_seqs = 9\n' + SMALL)
    assert found.machine.cost == SCORPIO_8B.machine.cost and found.machine.noise == 0.2
    assert found.machine.num_blocks == 20_000 and not found.workload.distinct
    assert found.scheduler == {"max_num_seqs": 9, "max_num_batched_tokens": 2048}


def test_the_files_that_it_names_are_beside_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "cost.json").write_text(json.dumps(cost_as_json(CostParams(1.0, 2.0, 3.0, 4.0, 5.0))))
    found = read(tmp_path / "sub", '[machine]\ncost = "cost.json"\n' + SMALL)
    assert found.machine.cost == CostParams(1.0, 2.0, 3.0, 4.0, 5.0)


PROMPTS = 'prompts = { law = "uniform", low = 3, high = 9 }'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[classes.a]", "[klasses.a]", "classes: is missing"),
        ("[classes.a]", "[classes]", r"classes.ttft_ms: must be a table, got 1000"),
        ("ttft_ms = 1000", "ttft = 1", "classes.a.ttft: is unknown; use prompts, outputs, ttft_ms"),
        (
            "ttft_ms = 1000",
            "ttft_ms = 1e13",
            "classes.a.ttft_ms: must be a number above 0 and at most 1e.12, got 10000000000000",
        ),
        ("\n[classes.a]", "rate = 1e-300\n[classes.a]", "rate: must not be so close to 0, got 1e-300"),
        (
            "\n[classes.a]",
            "[machine]\nstalls = { every_s = 1e-4, lasts_s = 1e-5 }\n[classes.a]",
            "machine.stalls.every_s: must be a number of at least 0.001, got 0.0001",
        ),
        (
            "\n[classes.a]",
            "[machine]\nslowdown = [{ at_s = 1, factor = 1e308 }]\n[classes.a]",
            "machine.slowdown.0..factor: must be a number of at least 1e-06 and at most 1e.06, got 1e.308",
        ),
        (
            "ttft_ms = 1000",
            "arrivals = { process = 'steps', factors = [1e308] }",
            "classes.a.arrivals.factors: must be a list of numbers within .1e-06, 1e.06., got .1e.308.",
        ),
        ("ttft_ms = 1000", "ttft_ms = 0", "classes.a.ttft_ms: must be a number above 0, got 0"),
        ("ttft_ms = 1000", "ttft_ms = nan", "classes.a.ttft_ms: must be a number above 0, got nan"),
        ("ttft_ms = 1000", "share = true", "classes.a.share: must be a number above 0, got True"),
        ("ttft_ms = 1000", "tenant = 3", "classes.a.tenant: must be a string, got 3"),
        ("ttft_ms = 1000", "priority = 0.5", "classes.a.priority: must be an integer, got 0.5"),
        ("ttft_ms = 1000", "prefix = { tokens = 0 }", "classes.a.prefix.tokens: must be an integer of at least 1"),
        (
            "ttft_ms = 1000",
            "prefix = { tokens = 9, share = 2 }",
            "prefix.share: must be a number above 0 and at",
        ),
        (
            "ttft_ms = 1000",
            "prefix = { tokens = 9, share = 0.5, in_front = true }",
            "prefix.in_front: cannot be combined with share",
        ),
        ("ttft_ms = 1000", "prefix = { tokens = 9, in_front = 1 }", "prefix.in_front: must be true or false, got 1"),
        (
            "ttft_ms = 1000",
            "prefix = { tokens = 9, zipf = -1 }",
            "prefix.zipf: must be a number of at least 0 and at most 10, got -1",
        ),
        ("ttft_ms = 1000", 'hints = { kind = "true" }', "hints.kind: must be one of absent, exact, noisy"),
        ("ttft_ms = 1000", 'hints = { kind = "noisy" }', "classes.a.hints.rmse: is missing"),
        ("ttft_ms = 1000", 'hints = { kind = "exact", rmse = 3 }', "hints.rmse: is unknown; use kind$"),
        (
            "ttft_ms = 1000",
            'arrivals = { process = "gamma", cv = 1e-300 }',
            "arrivals.cv: must be a number of at least 0.001 and at most 1000, got 1e-300",
        ),
        (
            "ttft_ms = 1000",
            'arrivals = { process = "steps", factors = [1, 0] }',
            "factors: must be a list of numbers within",
        ),
        ("ttft_ms = 1000", 'arrivals = { process = "trace", file = "no.csv" }', "arrivals.file: no such file"),
        (PROMPTS, "", "classes.a.prompts: is missing"),
        (PROMPTS, "prompts = 5", "classes.a.prompts: must be a table, got 5"),
        ("low = 3, high = 9", "low = 3, high = 2", "classes.a.prompts.high: must not be below low, 3, got 2"),
        ("low = 3, high = 9", "low = 3.5, high = 9", "prompts.low: must be an integer of at least 1, got 3.5"),
        (PROMPTS, 'prompts = { law = "zipf" }', "prompts.law: must be one of fixed, uniform, lognormal, pareto"),
        (
            PROMPTS,
            'prompts = { law = "pareto", least = 9, alpha = 1, high = 5 }',
            "a.prompts: fewer than 1% of",
        ),
        (PROMPTS, 'prompts = { law = "lognormal", median = 9, sigma = 0.1, low = 50 }', "fewer than 1% of the lengths"),
        (
            PROMPTS,
            'prompts = { law = "bimodal", low = [2, 1], high = [3, 4], share_high = 0 }',
            "low: must be .short",
        ),
        (PROMPTS, 'prompts = { law = "trace", file = "azure.csv", column = "x" }', "column: must be one of prompt"),
        ("\n[classes.a]", "rate = -1\n[classes.a]", "rate: must be a number of at least 0, got -1"),
        ("\n[classes.a]", "requests = 0\n[classes.a]", "requests: must be an integer of at least 1, got 0"),
        ("\n[classes.a]", "seed = 0\n[classes.a]", "seed: is unknown; use machine, classes, requests"),
        ("\n[classes.a]", "[machine]\nspeed = 2\n[classes.a]", "machine.speed: is unknown; use .*setup, cost"),
        ("\n[classes.a]", "[machine]\nsetup = 'x'\n[classes.a]", "machine.setup: must be one of scorpio-8b, moe-30b"),
        (
            "\n[classes.a]",
            "[machine]\nsetup = 'scorpio-8b'\nrow_us = 1\n[classes.a]",
            "row_us: the setup already sets",
        ),
        ("\n[classes.a]", "[machine]\nnoise = -1\n[classes.a]", "machine.noise: must be within"),
        ("\n[classes.a]", f"rate = {10**400}\n[classes.a]", "rate: must be a number of at least 0, got 1000"),
        ("\n[classes.a]", "[machine]\nblock_size = 24\n[classes.a]", "machine.block_size: must be a power of two"),
        (
            "\n[classes.a]",
            "[machine]\nstep_ms = 0\ntoken_us = 0\n[classes.a]",
            "machine: step_ms and token_us must",
        ),
        ("\n[classes.a]", "[machine]\nnoise = 'a'\n[classes.a]", "machine.noise: must be a number, got 'a'"),
        ("\n[classes.a]", "[machine]\nblock_size = 1.5\n[classes.a]", "machine.block_size: must be a number, got 1.5"),
        ("\n[classes.a]", "[machine]\nstalls = { every_s = 1, lasts_s = 2 }\n[classes.a]", "lasts_s: must be below"),
        ("\n[classes.a]", "[machine]\nslowdown = [{ at_s = 1 }]\n[classes.a]", r"slowdown\[0\].factor: is missing"),
        ("\n[classes.a]", "[machine\n", "is not TOML"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_table_and_key(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(ConfigError, match=message) as raised:
        read(tmp_path, SMALL.replace(old, new))
    assert "load.toml" in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml cannot be read"):
        read_workload(str(tmp_path / "no.toml"))


# --- the command ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_run(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--policies", "fifo,slack", "--requests", "10", "--jobs", "1", "--json", str(out)]
    assert cli.main(["simulate", "--workload", str(path), *flags]) == 0
    found = read_workload(str(path))
    points, rate = json.loads(out.read_text())["points"], found.workload.rate
    assert [(point["policy"], point["rate"]) for point in points] == [("fifo", rate), ("slack", rate)]
    names = {of.name for of in found.workload.classes}
    assert points[0]["classes"].keys() <= names and points[0]["requests"] in (9, 10, 11)
    printed = capsys.readouterr().out
    assert all(name in printed for name in points[0]["classes"])


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 6


def test_rates_seeds_capacity_and_knowledge_go_with_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "load.toml", tmp_path / "out.json"
    file.write_text(SMALL.replace("1000", "40") + "[machine]\nstep_ms = 10\ntoken_us = 1000\n")
    base = ["simulate", "--workload", str(file), "--requests", "30", "--jobs", "1", "--json", str(out)]
    assert cli.main([*base, "--rates", "2,5", "--seeds", "2", "--lengths", "oracle", "--slowdown", "1.1"]) == 0
    points = json.loads(out.read_text())["points"]
    assert [(point["rate"], len(point["seeds"])) for point in points] == [(2.0, 2), (5.0, 2)]
    assert cli.main([*base, "--capacity", "--policies", "fifo"]) == 0
    assert "class a (TTFT 40 ms) is the limit" in capsys.readouterr().out
    assert cli.main(base) != 0
    assert "rates" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--input-len=900", "--cost=x.json", "--noise=0.1", "--setup=scorpio-8b", "--cv=2"])
def test_what_the_file_settles_is_no_option(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "load.toml").write_text(SMALL)
    assert cli.main(["simulate", "--workload", str(tmp_path / "load.toml"), "--rates", "1", flag]) != 0
    told = capsys.readouterr().err.replace("-", "_")
    assert (
        flag.partition("=")[0].removeprefix("--").replace("-", "_") in told.replace("-", "_")
        and "which sets it" in told
    )


def test_a_prefix_that_requests_share_is_computed_once(tmp_path: Path) -> None:
    """1,000 tokens at 1 ms each: with the prefix in the cache a prompt takes 10."""
    text = """
    [machine]
    step_ms = 1
    token_us = 1000
    [classes.a]
    ttft_ms = 500
    prompts = { law = "fixed", value = 1000 }
    outputs = { law = "fixed", value = 1 }
    """
    out = tmp_path / "out.json"
    kept = {}
    for name, prefix in (("shared", "prefix = { tokens = 990 }\n"), ("own", "")):
        (tmp_path / "load.toml").write_text(text + prefix)
        flags = ["--workload", str(tmp_path / "load.toml"), "--rates", "0.5", "--requests", "20", "--jobs", "1"]
        assert cli.main(["simulate", *flags, "--scheduling-policy", "fifo", "--json", str(out)]) == 0
        kept[name] = json.loads(out.read_text())["points"][0]["adherence"]
    assert kept["own"] == 0 and kept["shared"] >= 0.95


def test_errors_name_keys_as_the_file_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "load.toml").write_text(SMALL + "[machine]\nblock_size = 24\n")
    assert cli.main(["simulate", "--workload", str(tmp_path / "load.toml"), "--rates", "1"]) != 0
    assert "load.toml: machine.block_size: must be a power of two up to 256, got 24" in capsys.readouterr().err


def test_another_value_of_the_option_is_refused() -> None:
    assert cli.main(["simulate", "--workload", "weekly"]) != 0
