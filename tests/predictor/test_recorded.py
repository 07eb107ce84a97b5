"""A recorded run as data: what counts as an output's length, and what is left out."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.cli import main as cli
from roseinfer.core.errors import ConfigError
from roseinfer.predictor.config import TrainConfig
from roseinfer.predictor.data import MIN_ROWS, TrainingRows, read_rows
from roseinfer.predictor.model import LengthPredictor
from roseinfer.predictor.train import train

SETUP: dict[str, Any] = {"setup": {"vocab_size": 4096}}
STEP: dict[str, Any] = {"step": 0, "rows": [["a:0", 0, 4]], "duration_s": 0.1}


def request(name: str, prompt: list[int], n: int = 1, **params: Any) -> dict[str, Any]:
    return {"request": name, "step": 0, "prompt_ids": prompt, "params": {"max_tokens": 50, **params}, "n": n}


def end(name: str, tokens: int, reason: str = "stop") -> dict[str, Any]:
    return {"end": name, "tokens": tokens, "reason": reason, "ttft_s": 0.1, "latency_s": 1.0}


def many(count: int = MIN_ROWS) -> list[dict[str, Any]]:
    lines = [(request(f"m-{i}", [9, i]), end(f"m-{i}:0", 5)) for i in range(count)]
    return [line for pair in lines for line in pair]


def read(tmp_path: Path, *lines: Any, **options: Any) -> TrainingRows:
    file = tmp_path / "run.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_rows(str(file), lambda text: [ord(letter) for letter in text], **options)


def test_outputs_that_ended_by_themselves(tmp_path) -> None:
    lines = [
        request("a", [1, 2]),
        STEP,
        request("b-0", [3], n=2),
        STEP,
        end("b-0:1", 8),
        end("a:0", 4),
        end("b-0:0", 9),
    ]
    rows = read(tmp_path, SETUP, *lines, *many())
    assert rows.bad == [] and rows.left_out == {} and rows.remarks() == []
    pairs = list(zip(rows.prompts, rows.lengths, strict=True))
    assert pairs[:3] == [([3], 8), ([1, 2], 4), ([3], 9)], "each sample of a prompt is a row"
    assert len(rows) == MIN_ROWS + 3 and not any(rows.cut)


def test_what_is_left_out_is_counted_by_reason(tmp_path) -> None:
    lines = [request(name, [1]) for name in "abcdef"]
    lines += [
        {"abort": ["a:0"], "step": 3},
        end("a:0", 4, "abort"),
        end("b:0", 0, "rejected"),
        end("c:0", 9, "timeout"),
    ]
    lines += [request("g", [1], ignore_eos=True), end("g:0", 50, "length"), end("d:0", 3, "error"), end("e:0", 0)]
    rows = read(tmp_path, *lines, *many())
    assert len(rows) == MIN_ROWS
    expected = {"abort": 1, "rejected": 1, "timeout": 1, "ignore_eos": 1, "error": 1, "stop": 1, "unfinished": 1}
    assert rows.left_out == expected
    assert "1 abort, 1 error, 1 ignore_eos" in rows.remarks()[0]


def test_outputs_that_max_tokens_cut_are_marked(tmp_path) -> None:
    rows = read(tmp_path, request("a", [1]), end("a:0", 50, "length"), *many())
    assert rows.cut == [True] + [False] * MIN_ROWS and rows.lengths[0] == 50
    assert rows.remarks() == [f"1 of {MIN_ROWS + 1} outputs were cut by max_tokens: counted as longer"]
    row = {"prompt": "ab", "output_len": 50}
    rows = read(tmp_path, row | {"finish_reason": "length"}, row | {"finish_reason": "stop"}, row, *many())
    assert rows.cut[:3] == [True, False, False], "plain rows may say so too"


def test_rows_that_were_all_cut_are_none_to_learn_from(tmp_path) -> None:
    lines = [(request(f"{i}", [1]), end(f"{i}:0", 50, "length")) for i in range(200)]
    with pytest.raises(ConfigError, match=r"has 0 rows to learn from; 50 .*; 200 of 200 outputs were cut"):
        read(tmp_path, *[line for pair in lines for line in pair])


@pytest.mark.parametrize(
    "line",
    [
        {"request": "a", "prompt_ids": [1]},
        {"request": "a", "prompt_ids": [1], "params": None, "n": 1},
        {"end": "nobody:0", "tokens": 3, "reason": "stop"},
        {"end": 3, "tokens": 3, "reason": "stop"},
    ],
)
def test_a_line_that_makes_no_sense_is_named(line: dict[str, Any], tmp_path) -> None:
    rows = read(tmp_path, line, *many())
    assert len(rows) == MIN_ROWS
    assert len(rows.bad) == 1 and rows.bad[0].startswith("line 1: no line of a recorded run")


def test_token_ids_of_another_vocabulary(tmp_path) -> None:
    with pytest.raises(ConfigError, match="token id 4096 is outside the vocabulary of 4096"):
        read(tmp_path, *[{"prompt_token_ids": [1, 4096], "output_len": 3}] * 60, vocab_size=4096)
    lines = [request("a", [5000]), end("a:0", 5), *many()]
    rows = read(tmp_path, *lines, vocab_size=4096)
    assert len(rows) == MIN_ROWS and "token id 5000" in rows.bad[0]
    assert len(read(tmp_path, *lines)) == MIN_ROWS + 1


@pytest.mark.exhaustive
def test_cut_outputs_are_learnt_as_longer_than_that() -> None:
    """All prompts are alike; half the outputs of 90 were cut at 20. Left out or believed, they would draw it down."""
    rows = TrainingRows()
    for i in range(600):
        long = i % 3 > 0
        cut = long and i % 2 == 0
        rows.add([7, 8, 9], 20 if cut else 90 if long else 10, cut)
    said = train(rows, TrainConfig(epochs=30, longest=100)).predictor.predict([7, 8, 9])
    mean = np.mean([90, 90, 10])
    assert said == pytest.approx(mean, abs=6)
    rows.cut = [False] * len(rows)
    believed = train(rows, TrainConfig(epochs=30, longest=100)).predictor.predict([7, 8, 9])
    assert believed < mean - 15


def test_the_command_learns_from_what_an_engine_recorded(tmp_path, capsys) -> None:
    recording, out = tmp_path / "run.jsonl", tmp_path / "predictor"
    prompts = [[5 + i, 6, 7] for i in range(90)]
    some_tokens = tuple(range(0, 4096, 4))
    with LLM("tiny", num_kv_blocks=400, threads=1, record=str(recording)) as llm:
        params = SamplingParams(max_tokens=12, temperature=1.0, stop_token_ids=some_tokens)
        done = llm.generate(prompts, params)
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    reasons = [completion.outputs[0].finish_reason for completion in done]
    rows = read_rows(str(recording), str.split)
    assert rows.bad == [] and rows.left_out == {"ignore_eos": 1}
    assert sorted(rows.prompts) == prompts and sum(rows.cut) == reasons.count("length") > 0
    assert sorted(rows.lengths) == sorted(len(completion.outputs[0].token_ids) for completion in done)
    assert cli.main(["train-predictor", str(recording), "--out", str(out), "--epochs", "1"]) == 0
    assert f"{sum(rows.cut)} of 90 outputs were cut" in capsys.readouterr().out
    assert LengthPredictor.load(str(out)).predict([5, 6, 7]) <= 12
