"""`roseinfer calibrate` from end to end with the embedded model, and who reads what it writes."""

import json
from dataclasses import replace

import pytest

from roseinfer import LLM
from roseinfer.calibration.run import CONSTANTS, COPIES, Calibration
from roseinfer.cli import main as cli
from roseinfer.sched.cost.drafts import DraftCost
from roseinfer.sched.cost.file import read_cost
from roseinfer.sched.cost.offline_fit import Fit
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.cost.params import CostParams

SMALL = ["--threads", "1", "--num-kv-blocks", "64", "--max-num-seqs", "8", "--kv-offloading-size", "0.01"]
SWEEP = ["--decode-rows", "1,4", "--context-lens", "16,64", "--prompt-lens", "8,64", "--repeats", "2"]


def test_calibrate_then_simulate_and_serve(capsys, tmp_path) -> None:
    file = tmp_path / "cost.json"
    assert cli.main(["calibrate", "tiny", *SMALL, *SWEEP, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*CONSTANTS, *COPIES)) and "R2" in printed and "MAPE" in printed
    written = json.loads(file.read_text())
    assert written["machine"]["device"] == "cpu" and written["fit"]["samples"] >= 16
    params = read_cost(str(file))
    assert params.step_s + params.token_s > 0
    assert params.load_s > 0 < params.store_s and params.load_s != CostParams().load_s

    assert cli.main(["simulate", "--cost", str(file), "--num-requests", "4", "--output-len", "20"]) == 0
    assert "simulated s" in capsys.readouterr().out
    setup = ["simulate", "--setup", "scorpio-8b", "--rates", "5", "--requests", "20", "--policies", "fifo,slack"]
    assert cli.main([*setup, "--jobs", "1", "--cost", str(file)]) == 0
    with LLM("tiny", threads=1, num_kv_blocks=64, max_num_seqs=2, cost_model=str(file)) as llm:
        assert llm.engine.core.scheduler.policy.state.cost.params == CostModel(params).params
        assert len(llm.generate("def f(")[0].outputs[0].token_ids) > 0


def test_the_file_has_all_that_was_measured(tmp_path) -> None:
    params = CostParams(5e-3, 2e-5, 0.0, 1e-5, 3e-8, drafts=DraftCost(1e-3, 5e-5, 1e-5, 2e-5, 0.0))
    copies = {"load_s": 1e-6, "store_s": 2e-6}
    calibration = Calibration(Fit(params, 100, 0, 1.0, 0.01, 0.1, 0.1), {}, copies)
    file = tmp_path / "cost.json"
    file.write_text(json.dumps(calibration.as_json()))
    assert read_cost(str(file)) == replace(params, **copies)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["calibrate", "--repeats", "0"], "--repeats"),
        (["calibrate", "--recorded", "nowhere.jsonl"], "cannot read 'nowhere.jsonl': No such file"),
        (["simulate", "--cost", "nowhere.json"], "nowhere.json"),
        (["simulate", "--cost", "nowhere.json", "--step-ms", "4"], "--step-ms"),
    ],
)
def test_refused_by_name(argv, message, capsys) -> None:
    assert cli.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_cost_model_that_is_none_keeps_the_engine_from_starting(capsys) -> None:
    argv = ["generate", "tiny", "--prompt", "x", "--threads", "1", "--cost-model", "nowhere.json"]
    assert cli.main(argv) == 2
    assert "nowhere.json" in capsys.readouterr().err
