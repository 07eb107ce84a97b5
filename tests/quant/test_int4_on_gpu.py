"""Checkpoints in four bits on a GPU, which keeps them, against the same weights in floats."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import load_model
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.gguf_files import metadata_of, quantised, tensors_of, write
from tests.helpers.int4_files import DISORDERED, MAKERS, Int4Maker, quantise_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
TOKENS = [(7 * number) % 96 for number in range(40)]
# Activations and results are rounded to 16 bits: twice what a CPU's products in these dtypes differ by.
MAX_RELATIVE_ERRORS = {"bfloat16": 0.03, "float16": 0.005}


def logits(path: Path, device: str, dtype: str, **options: Any) -> torch.Tensor:
    """Return logits of a prompt cut into chunks of different lengths: each has a kernel of its own."""
    spec = read_model_spec(path)
    model = load_model(path, spec, dtype=dtype, device=torch.device(device), load_format="auto", seed=0, **options)
    if device == "cuda":
        assert model.weights.startswith("int4 in groups of") and "widened" not in model.weights
    runner = HandRunner(model)
    table = runner.blocks.table(len(TOKENS))
    found, start = [], 0
    for count in (1, 7, 12, 20):
        found += runner.run([HandRow(tokens=TOKENS, table=table, start=start, count=count)])
        start += count
    return torch.cat(found)


def check(path: Path) -> None:
    expected = logits(path, "cpu", "float32")
    for dtype, error in MAX_RELATIVE_ERRORS.items():
        found = logits(path, "cuda", dtype)
        assert (found - expected).norm() / expected.norm() < error


@pytest.mark.parametrize("maker", [*MAKERS, *DISORDERED], ids=lambda maker: f"{maker.name}{maker in DISORDERED}")
def test_checkpoints(tmp_path: Path, maker: Int4Maker) -> None:
    save_reference(make_reference("qwen2", **SIZES), tmp_path)
    quantise_folder(tmp_path, maker)
    check(tmp_path)


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_K"])
def test_gguf_files(tmp_path: Path, encoding: str) -> None:
    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, str]:
        layer = name.startswith("blk.") and values.ndim == 2
        return (quantised(encoding, values.shape), encoding) if layer else (values, "F32")

    reference = make_reference("llama", **SIZES)
    check(write(tmp_path / "m.gguf", metadata_of(reference, 99), tensors_of(reference, encode)))
