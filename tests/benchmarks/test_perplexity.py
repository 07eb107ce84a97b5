"""Perplexity benchmark on the embedded model."""

import json
import shutil
from math import exp
from pathlib import Path

import pytest

from benchmarks.perplexity import FLOATS, PerplexityConfig, documentation, main, measure, windows_of
from roseinfer.core.errors import ConfigError
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.batches import HandRunner
from tests.helpers.held_out import TINY, all_logits, loss_of
from tests.helpers.int4_files import AWQ, Int4Maker, awq, quantise_folder, write_tensors
from tests.helpers.loaded import load


def test_the_loss_is_that_of_the_logits() -> None:
    config = PerplexityConfig(windows=3, window=40, device="cpu")
    found = measure(config, FLOATS)
    prompts = windows_of(Tokenizer.from_folder(TINY).encode(documentation()), 3, 40)
    assert [len(ids) for ids in prompts] == [40, 40, 40] and len({tuple(ids) for ids in prompts}) == 3
    model = load(TINY)
    expected = loss_of(all_logits(HandRunner(model, num_blocks=64), prompts), prompts)
    assert found.tokens == 3 * 39
    assert found.loss == pytest.approx(expected, rel=1e-4) and found.perplexity == pytest.approx(exp(found.loss))


def test_weights_in_four_bits(tmp_path: Path) -> None:
    """Compare a checkpoint of AWQ's layout with its widened weights: they have the same perplexity, a little more than
    that of the model.
    """
    narrow, floats = (Path(shutil.copytree(TINY, tmp_path / name)) for name in ("narrow", "floats"))
    maker = Int4Maker("awq", {**AWQ, "group_size": 64}, awq, 64, rounds=True)
    write_tensors(floats, quantise_folder(narrow, maker))
    before, kept, wide = (
        measure(PerplexityConfig(model=str(folder), windows=2, window=64, device="cpu"), FLOATS).loss
        for folder in (TINY, narrow, floats)
    )
    assert kept == wide and 0 < kept / before - 1 < 0.1


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
