"""Perplexity benchmark on the embedded model."""

import json
from math import exp
from pathlib import Path

import pytest
import torch

from benchmarks.perplexity import FLOATS, PerplexityConfig, documentation, main, measure, windows_of
from roseinfer.core.errors import ConfigError
from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import load_model
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.batches import HandRunner
from tests.helpers.held_out import TINY, all_logits, loss_of


def test_the_loss_is_that_of_the_logits() -> None:
    config = PerplexityConfig(windows=3, window=40, device="cpu")
    found = measure(config, FLOATS)
    prompts = windows_of(Tokenizer.from_folder(TINY).encode(documentation()), 3, 40)
    assert [len(ids) for ids in prompts] == [40, 40, 40] and len({tuple(ids) for ids in prompts}) == 3
    options = {"dtype": "float32", "device": torch.device("cpu"), "load_format": "auto", "seed": 0}
    model = load_model(TINY, read_model_spec(TINY), **options)
    expected = loss_of(all_logits(HandRunner(model, num_blocks=64), prompts), prompts)
    assert found.tokens == 3 * 39
    assert found.loss == pytest.approx(expected, rel=1e-4) and found.perplexity == pytest.approx(exp(found.loss))


def test_windows_are_spread_over_the_text() -> None:
    assert windows_of(range(11), 3, 2) == [[0, 1], [3, 4], [6, 7]]
    with pytest.raises(ConfigError, match="more than the text's 11"):
        windows_of(range(11), 6, 2)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    argv = ["tiny", "--windows", "2", "--window", "30", "--ways", "fp8", "--device", "cpu", "--json", str(file)]
    assert main(argv) == 0
    assert "change %" in capsys.readouterr().out
    floats, rounded = json.loads(file.read_text())["ways"]
    assert (floats["way"], rounded["way"]) == ("floats", "fp8")
    assert 0 < abs(rounded["loss"] / floats["loss"] - 1) < 0.05
