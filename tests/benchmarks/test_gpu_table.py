"""benchmarks/gpu_table.py and report.py: a small model with a real server, failing servers, and the page."""

import argparse
import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks import bounds, gpu_result, gpu_rows, gpu_table, model_folders, report
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.models.config import read_model_spec
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.cases import cases

pytestmark = pytest.mark.long

CLASSES = Path(report.__file__).parent / "results" / "slo-h200.json"
VOCAB = 30_016  # clients draw ids below 30,000
SMALL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "n_positions": 1024,
    "vocab_size": VOCAB,
    "eos_token_id": 0,
}
SERVER_ARGS = "--threads 1 --num-kv-blocks 3000 --api-workers 1"
# Client with known results.
CANNED_CLIENT = """
import argparse, json, sys
parser = argparse.ArgumentParser()
for name in ("--url", "--model", "--json", "--num", "--label"):
    parser.add_argument(name)
args, rest = parser.parse_known_args()
if args.label.startswith({failing!r}):
    sys.exit("no idea")
p = {{"p50": 2.0, "p99": 4.0}}
summary = {{"requests": 3, "ok": 3, "failed": 0, "rejected": 0, "short": 0, "out_tok_s": 24644.0,
           "ttft_ms": p, "tpot_ms": p, "itl_ms": p, "errors": {{}}}}
json.dump({{"summary": summary, "args": rest}}, open(args.json, "w"))
"""


@pytest.fixture(scope="module")
def modules():
    return {"table": gpu_table, "result": gpu_result, "rows": gpu_rows, "folders": model_folders, "report": report}


@pytest.fixture(scope="module")
def models(modules, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    modules["folders"].make_tokenizer(VOCAB).save(str(folder / "tokenizer.json"))
    return folder.parent


def run(modules, monkeypatch, out: Path, *argv: str) -> tuple[int, dict]:
    monkeypatch.setattr(sys, "argv", ["gpu_table.py", "--out", str(out), "--models", "gpt2", *argv])
    status = modules["table"].main()
    return status, json.loads((out / "gpu.json").read_text())


def test_rows_as_the_client_takes_them(modules):
    """Every row's arguments are options of the client; seeds shift together."""
    same65 = next(row for row in modules["rows"].ROWS if row.name == "same65")
    assert same65.load() == OpenLoopConfig(num=512, cycle="65", out_len=2, procs=8, same_prompt=True, seed=1)
    assert same65.flags(1000)[-2:] == ["--seed", "1001"] and same65.flags(1000).count("--seed") == 1
    keys = [row.key for row in modules["rows"].ROWS]
    assert len(keys) == len(set(keys)) == 52
    ordered = bounds.chosen(["qwen3-8b-fp8", "gpt2"], ["seq1", "hol"])
    assert [row.key for row in ordered] == ["qwen3-8b-fp8 seq1", "gpt2 seq1", "gpt2 hol"]
    draws = {
        repr([(f.name, getattr(row.load(), f.name)) for f in fields(OpenLoopConfig)]) for row in modules["rows"].ROWS
    }
    assert len(draws) == 10, "large models share their workloads, but for those of slow ones"


def test_gain_and_reached(modules):
    gain, reached = modules["rows"].gain, modules["rows"].reached
    assert gain("output_tok_s", 30.0, 20.0) == 1.5 and gain("ttft_p50_ms", 30.0, 60.0) == 2.0
    assert gain("tpot_p50_ms", 1.0, 0.0) is None and gain("output_tok_s", None, 1.0) is None
    assert reached("output_tok_s", 2, 2) and not reached("output_tok_s", 1.9, 2)
    assert reached("itl_p99_ms", 2, 2) and not reached("itl_p99_ms", 2.1, 2) and not reached("itl_p99_ms", None, 2)


def test_a_vocabulary_that_the_config_leaves_to_a_default(modules, tmp_path, monkeypatch):
    made = []
    make = modules["folders"].make_tokenizer
    monkeypatch.setattr(modules["folders"], "make_tokenizer", lambda size: made.append(size) or make(300))
    folder = modules["folders"].write_folder("gemma-3-27b", tmp_path)
    assert made == [262_208] and read_model_spec(folder).num_layers == 62


@cases("name", ["gpt2"], exhaustive=["qwen3-0.6b"])
def test_every_id_of_a_made_tokenizer_is_text(modules, tmp_path, name):
    folder = modules["folders"].write_folder(name, tmp_path)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.vocab_size == vocab and tokenizer.special_ids == {0}
    assert len({tokenizer.token_bytes(id) for id in range(vocab)}) == vocab
    assert tokenizer.decode(tokenizer.encode("def f(): é")) == "def f(): é"


def test_folders_say_how_weights_are_kept(modules, tmp_path, monkeypatch):
    """A folder that several models share is written once."""
    made = []
    make = modules["folders"].make_tokenizer
    monkeypatch.setattr(modules["folders"], "make_tokenizer", lambda size: made.append(size) or make(300))
    names = [modules["folders"].write_folder(name, tmp_path).name for name in ("qwen3-8b", "qwen3-8b-fp8-kv")]
    blocks = modules["folders"].write_folder("qwen3-8b-fp8", tmp_path)
    assert names == ["qwen3-8b", "qwen3-8b"] and blocks.name == "qwen3-8b-fp8" and made == [151_936] * 2
    read = {name: json.loads((tmp_path / name / "config.json").read_text()) for name in ("qwen3-8b", "qwen3-8b-fp8")}
    assert read["qwen3-8b-fp8"].pop("quantization_config")["weight_block_size"] == [128, 128]
    assert read["qwen3-8b-fp8"] == read["qwen3-8b"]


def test_a_models_options_reach_its_server(modules):
    args = argparse.Namespace(server_args="--seed 3")
    sweep = modules["table"].Sweep(args, [])
    run = modules["table"].ModelRun(sweep, "qwen3-8b-fp8-kv", Path("folder"))
    words = run.facts["command"]
    assert words[:5] == ["roseinfer", "serve", "qwen3-8b", "--served-model-name", "qwen3-8b-fp8-kv"]
    assert words[-6:] == ["--quantization", "fp8", "--kv-cache-dtype", "fp8", "--seed", "3"]


@pytest.mark.exhaustive
def test_a_table_of_one_row(modules, models, tmp_path, monkeypatch, capsys):
    """Our own client, a real server, and defaults for everything else."""
    arguments = "--num 16 --cycle 65,1 --out-len 4 --procs 2"
    rows = [replace(row, arguments=arguments) for row in gpu_rows.ROWS if row.name == "hol"]
    monkeypatch.setattr(bounds, "ROWS", rows)
    argv = ["--rows", "hol", "--models-dir", str(models), "--server-args", SERVER_ARGS, "--commit", "abc", "--restart"]
    status, result = run(modules, monkeypatch, tmp_path, *argv)
    assert status == 0, capsys.readouterr().out
    (row,) = result["rows"]
    (ran,) = row["runs"]
    assert (ran["ok"], ran["failed"], ran["short"], row["error"]) == (16, 0, 0, None)
    assert all(value > 0 for value in row["figures"].values())
    assert row["gain_over_peer"]["output_tok_s"] == pytest.approx(row["figures"]["output_tok_s"] / 12_322)
    assert row["share_of_card"]["ttft_p50_ms"] == pytest.approx(
        row["bound"]["card"]["ttft_p50_ms"] / row["figures"]["ttft_p50_ms"]
    )
    server = result["servers"]["gpt2"]
    assert server["start_s"][0] > 0 and server["restart_s"] > 0 and server["kv_blocks"] == 3000
    assert server["startup_phases_s"]["load"] > 0 and "--gpu-memory-utilization" in server["command"]
    assert result["commit"] == "abc" and result["versions"]["torch"] and result["hardware"]["cores"]
    assert str(tmp_path) not in json.dumps(result)
    printed = capsys.readouterr().out
    assert "gpt2 hol" in printed and "x peer" in printed


def test_another_client_and_repetitions(modules, models, tmp_path, monkeypatch, capsys):
    """A client that fails on one row costs that row."""
    client = tmp_path / "client.py"
    client.write_text(CANNED_CLIENT.format(failing="gpt2 burst65"))
    argv = ["--rows", "hol", "burst65", "--models-dir", str(models), "--server-args", SERVER_ARGS]
    status, result = run(modules, monkeypatch, tmp_path, *argv, "--client", str(client), "--repeat", "2")
    assert status == 1
    hol, burst = result["rows"]
    assert [ran["seed"] for ran in hol["runs"]] == [0, 1000] and hol["figures"]["output_tok_s"] == 24644.0
    assert hol["gain_over_peer"]["output_tok_s"] == 2.0 and hol["reached"] == {
        "output_tok_s": True,
        "ttft_p50_ms": True,
    }
    assert (
        burst["runs"] == []
        and "no idea" in burst["error"]
        and burst["reached"] == {"ttft_p50_ms": False, "ttft_p99_ms": False}
    )
    assert len(result["servers"]["gpt2"]["start_s"]) == 1, "the server was not to blame"
    assert "no idea" in capsys.readouterr().out


def test_a_server_that_never_comes_up(modules, tmp_path, monkeypatch, capsys):
    """Two attempts; the error is kept; all rows report it."""
    (tmp_path / "models" / "gpt2").mkdir(parents=True)
    argv = ["--rows", "hol", "burst65", "same65", "--models-dir", str(tmp_path / "models")]
    status, result = run(modules, monkeypatch, tmp_path, *argv)
    assert status == 1
    assert all("server" in row["error"] and row["figures"] == {} for row in result["rows"])
    errors = result["servers"]["gpt2"]["errors"]
    assert len(errors) == 3 and any("config.json" in line for line in errors[0]["log_tail"])
    assert "failed twice" in capsys.readouterr().out


def test_no_time_left(modules, tmp_path, monkeypatch, capsys):
    status, result = run(modules, monkeypatch, tmp_path, "--rows", "hol", "--time-limit", "0")
    assert status == 1 and "no time" in result["rows"][0]["error"]


def test_without_folders(modules):
    plain = modules["table"].without_folders
    assert (
        plain("/a/b/c.json") == "c.json"
        and plain("--x=/a/b c/d /e") == "--x=b c/d e"
        and plain("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    )


def made_up(modules) -> dict:
    """Return a result in which all rows have figures, every other one better than its targets."""
    rows = []
    for number, row in enumerate(modules["rows"].ROWS):
        factor = 2.0 if number % 2 else 0.5
        peer = dict.fromkeys(modules["rows"].FIGURES, 1.0) | row.peer
        figures = {name: value * factor if name == "output_tok_s" else value / factor for name, value in peer.items()}
        counts = {"requests": 2, "ok": 2, "failed": 0, "rejected": 0, "short": 0}
        runs = [{"seed": 0, "figures": figures, **counts, "errors": {}}]
        limits = [rates.name for rates in bounds.all_rates(row.model)]
        allowed = {limit: dict.fromkeys(figures, 1.0) for limit in limits}
        rows.append(modules["result"].row_result(row, allowed, runs, None))
    rows[2] = {
        **rows[2],
        "runs": [],
        "figures": {},
        "error": "ServerError: gone",
        "gain_over_peer": {},
        "share_of_card": {},
    }
    return {
        "date": "2026-01-02 03:04 UTC",
        "command": "python -m benchmarks.gpu_table --out out",
        "commit": "abc",
        "seed": 0,
        "repeat": 1,
        "hardware": {"gpu": "NVIDIA Made-Up", "cores": 3},
        "versions": {"python": "3.12"},
        "client": ["roseinfer", "bench", "serve"],
        "peer": modules["rows"].PEER,
        "servers": {"gpt2": {"command": ["roseinfer", "serve", "gpt2"], "start_s": [12.5], "restart_s": 3.25}},
        "rows": rows,
    }


def test_page(modules, tmp_path, monkeypatch):
    source = tmp_path / "made-up.json"
    source.write_text(json.dumps(made_up(modules)))
    (tmp_path / "made-up.notes.toml").write_text('["gpt2 seq1"]\nbound = "the host"\nprofile = "plan 40%"\n')
    monkeypatch.setattr(
        sys, "argv", ["report.py", str(source), "--out", str(tmp_path / "docs"), "--classes", str(CLASSES)]
    )
    bars = modules["report"].bars
    monkeypatch.setattr(modules["report"], "bars", lambda *rows: dict([*bars(*rows).items()][:9]))  # drawing takes long
    modules["report"].main()
    text = (tmp_path / "docs" / "gpu.md").read_text()
    assert text.startswith("# roseinfer on one NVIDIA Made-Up\n") and str(tmp_path) not in text
    assert "| gpt2 seq1 | TPOT p50 ms | 2.92 | 0.7 | no | 1.46 | 0.5 | 1 | 0.342 |" in text
    assert "| gpt2 hol | output tok/s | 24,644 | 22,000 | yes | 12,322 | 2 | 1 | 24,644 |" in text
    assert "(85 / 170)" in text and "| gpt2 | 12.5 | 3.25 | - |" in text
    assert "| llama-3.1-8b shared | 5,950 / 11,900 | 2,634 / 1,317 | 4,168 / 2,084 | 2 / - |" in text
    assert "| slack | 25 | 0.962 |" in text, "classes of objectives, from their own file"
    assert "ServerError: gone" in text
    missed = text.split("## Rows not reached")[1].split("## Commands")[0]
    assert "Bound: the host" in missed and "plan 40%" in missed and "### gpt2 hol" not in missed
    assert missed.count("No profile has been recorded yet.") == missed.count("###") - 1
    for name in ("gpu-peer.png", "gpu-card.png"):
        assert (tmp_path / "docs" / "img" / name).read_bytes().startswith(b"\x89PNG")


def test_newer_rows_take_the_place_of_older_ones(modules, tmp_path, monkeypatch):
    """Other rows of a model stay, with their machine, and all are in the table's order."""
    monkeypatch.setattr(modules["report"], "draw", lambda *picture: None)
    old, new = made_up(modules), made_up(modules)
    new["rows"] = [row for row in new["rows"] if row["model"] == "qwen3-0.6b" and row["row"] != "seq1"]
    new |= {"commit": "def", "servers": {}, "hardware": {"gpu": "Another"}}
    older, newer = tmp_path / "old.json", tmp_path / "new.json"
    older.write_text(json.dumps(old))
    newer.write_text(json.dumps(new))
    modules["report"].write([older, newer], tmp_path)
    text = (tmp_path / "gpu.md").read_text()
    assert "`old.json` and `new.json`" in text
    assert "| qwen3-0.6b nano rag poisson | def |" in text and "; qwen3-0.6b seq1; " in text
    assert "Setup 1: gpu NVIDIA Made-Up," in text and "Setup 2: gpu Another," in text
    figures = text.split("## Every figure")[1].split("##")[0]
    assert figures.count("| qwen3-0.6b nano |") == 1
    assert figures.index("gpt2 hol") < figures.index("qwen3-0.6b nano") < figures.index("qwen3-8b nano")


def test_bars_leave_out_what_arrivals_set(modules):
    bars = modules["report"].bars(made_up(modules)["rows"], "gain_over_peer")
    assert bars["gpt2 hol: output tok/s"] == 2.0 and "qwen3-8b poisson: output tok/s" not in bars
    assert not any(label.startswith("gpt2 burst65") for label in bars)
    assert all(math.isfinite(value) for value in bars.values())
