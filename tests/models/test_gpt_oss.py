"""Checkpoints of gpt-oss: damaged tensors, and other formats of weights than the checkpoint's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.quant.int8_product import unsupported_reason
from roseinfer.quant.select import choose_format
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import reference_logits, save_reference
from tests.helpers.loaded import load
from tests.helpers.mxfp4_files import make_packable, pack_folder, round_experts

CPU = torch.device("cpu")
TOKENS = list(range(1, 41))
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return pack_folder(save_reference(round_experts(make_packable()), tmp_path))


def logits(folder: Path, **options: Any) -> torch.Tensor:
    spec = read_model_spec(folder)
    model = load(folder, spec, **options)
    runner = HandRunner(model)
    return runner.run([HandRow(tokens=TOKENS, table=runner.blocks.table(len(TOKENS)), start=0, count=len(TOKENS))])[0]


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(path) | changes).items() if tensor is not None}
    save_file(tensors, path, {"format": "pt"})


def test_a_scale_that_stands_for_nan_is_refused(folder: Path) -> None:
    scales = load_file(folder / "model.safetensors")[SCALES]
    scales[2, 5, 1] = 255
    change(folder, {SCALES: scales})
    with pytest.raises(UnsupportedModelError, match=f"tensor {SCALES} holds NaN"):
        logits(folder)


@pytest.mark.parametrize(("shape", "told"), [(None, "is missing"), ((6, 64, 2), r"is \[6, 64, 2\], config.json says")])
def test_missing_and_misshaped_scales_are_named(shape: tuple[int, ...] | None, told: str, folder: Path) -> None:
    change(folder, {SCALES: None if shape is None else torch.full(shape, 120, dtype=torch.uint8)})
    with pytest.raises(UnsupportedModelError, match=f"tensor {SCALES} {told}"):
        logits(folder)


def test_drawn_weights_need_no_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert logits(folder, load_format="dummy").isfinite().all()


@pytest.mark.skipif(unsupported_reason() is not None, reason="this machine has no products in int8")
def test_int8_rounds_the_widened_experts(tmp_path: Path) -> None:
    """All experts are chosen, since else rounding decides now and then which are."""
    reference = round_experts(make_packable(num_experts_per_tok=6))
    folder = pack_folder(save_reference(reference, tmp_path))
    expected = reference_logits(reference, TOKENS)
    error = (logits(folder, quantization="int8") - expected).norm() / expected.norm()
    assert 0 < error < 0.25


def test_other_formats_are_refused(folder: Path) -> None:
    scheme = read_model_spec(folder).quantization
    assert choose_format(None, scheme, CPU, torch.bfloat16).stored_as == "mxfp4, widened"
    assert choose_format("floats", scheme, torch.device("cuda"), torch.bfloat16).stored_as == "mxfp4, widened"
    with pytest.raises(ConfigError, match="quantization fp8 is for weights that are floats"):
        choose_format("fp8", scheme, torch.device("cuda"), torch.bfloat16)
