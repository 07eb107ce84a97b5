"""Checkpoints with parts for other inputs: their text model runs, and the log names what is left out."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.engine.options import make_engine_config
from roseinfer.runner.build import build_runner
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference
from tests.helpers.loaded import load

NEWER = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}


def rename(folder: Path, prefixes: dict[str, str]) -> set[str]:
    """Rename the tensors of a checkpoint by the prefixes of their names; return the new names."""
    tensors = load_file(folder / "model.safetensors")

    def renamed(name: str) -> str:
        old = next((old for old in prefixes if name.startswith(old)), "")
        return prefixes.get(old, "") + name.removeprefix(old)

    tensors = {renamed(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return set(tensors)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefixes", [{}, NEWER], ids=["older names", "newer names"])
@pytest.mark.parametrize("family", ["mistral3", "gemma3-vision"])
def test_both_generations_of_files(family: str, prefixes: dict[str, str], tied: bool, tmp_path: Path) -> None:
    reference = make_reference(family, tie_word_embeddings=tied)
    save_reference(reference, tmp_path)
    names = rename(tmp_path, prefixes)
    assert any(name.startswith("language_model.model.") for name in names) is not bool(prefixes)
    assert any("vision_tower" in name for name in names)
    if family == "mistral3":  # the checkpoint decides: its config differs between versions of transformers
        config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = load(tmp_path)
    runner, tokens = HandRunner(model), list(range(1, 50))
    row = HandRow(tokens=tokens, table=runner.blocks.table(len(tokens)), start=0, count=len(tokens))
    torch.testing.assert_close(runner.run([row])[0], reference_logits(reference, tokens), rtol=0, atol=1e-4)


def test_other_unknown_tensors_are_an_error(tmp_path: Path) -> None:
    save_reference(make_reference("mistral3"), tmp_path)
    rename(tmp_path, {"vision_tower.": "audio_tower."})
    with pytest.raises(UnsupportedModelError, match=r"unexpected tensor audio_tower"):
        load(tmp_path)


def test_the_log_names_the_tower(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_reference(make_reference("mistral3"), tmp_path)
    config = make_engine_config(model=str(tmp_path), num_kv_blocks=64, threads=1, device="cpu")
    with caplog.at_level(logging.INFO, "roseinfer"):
        build_runner(config, tmp_path).runner.close()
    assert [record.getMessage() for record in caplog.records if "left out" in record.getMessage()] == [
        "the checkpoint's vision tower is left out: requests with images are rejected"
    ]
