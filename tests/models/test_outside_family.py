"""A family of another package, whose file is the example of docs/how-to/add-a-model.md."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from roseinfer.core.errors import ConfigError
from roseinfer.models.config import read_model_spec
from roseinfer.models.families import family_of, register
from tests.docs.blocks import blocks
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, reference_logits, save_reference
from tests.helpers.loaded import load

EXAMPLE = next(block.text for block in blocks() if block.page.endswith("add-a-model.md"))


def install(folder: Path, name: str, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write what pip installs of a package with the example as its only module and one entry point."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "tall.py").write_text(EXAMPLE)
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[roseinfer.families]\ntall = {entry}\n")
    monkeypatch.syspath_prepend(folder)


def assert_runs_as(architecture: str, folder: Path) -> None:
    """Run a checkpoint of transformers' Llama under another architecture, and compare its logits."""
    reference = make_reference("llama-bias")
    save_reference(reference, folder)
    config = json.loads((folder / "config.json").read_text())
    for key in ("attention_bias", "mlp_bias"):
        del config[key]
    config |= {"architectures": [architecture], "model_type": "tall", "use_bias": True, "mlp_type": "gated"}
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(folder)
    model = load(folder, spec)
    runner, tokens = HandRunner(model), list(range(1, 60))
    row = HandRow(tokens=tokens, table=runner.blocks.table(len(tokens)), start=0, count=len(tokens))
    torch.testing.assert_close(runner.run([row])[0], reference_logits(reference, tokens), rtol=0, atol=1e-4)


def test_an_entry_point_adds_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "found_families", "found_families.tall:FAMILY", monkeypatch)
    assert_runs_as("TallForCausalLM", tmp_path)


def test_a_program_registers_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "given_families", "given_families.tall:FAMILY", monkeypatch)
    family = import_module("given_families.tall").FAMILY
    register(replace(family, architectures=("RegisteredForCausalLM",)))
    assert_runs_as("RegisteredForCausalLM", tmp_path)


@pytest.mark.parametrize(
    "entry, problem", [("broken_families.short:FAMILY", "No module named"), ("broken_families.tall:read_tall", "not a")]
)
def test_an_unusable_entry_point_is_named(
    entry: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "broken_families", entry, monkeypatch)
    with pytest.raises(ConfigError, match=f"family tall .*{problem}"):
        family_of("UnheardOfForCausalLM")
