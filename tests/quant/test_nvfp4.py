"""Checkpoints in NVFP4 as two tools store them: widened exactly, or refused by name."""

from pathlib import Path

import pytest
import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.parallel.group import Share
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.nvfp4_stored import Nvfp4Source
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.int4_files import Tensors
from tests.helpers.loaded import load, logits
from tests.helpers.nvfp4_files import TOOLS, draw, pack, quantise_nvfp4
from tests.helpers.weights import Named
from tests.quant.test_int4_checkpoints import SIZES, in_floats, load_widened

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 24, 64


def source_of(tool: str, tensors: Tensors) -> Nvfp4Source:
    return Nvfp4Source(Named({f"{NAME}.{part}": tensor for part, tensor in tensors.items()}), Nvfp4Scheme(tool))


def read(source: Nvfp4Source, rows: Share, columns: Share) -> torch.Tensor:
    into = torch.empty(rows.width, columns.width)
    source.read(f"{NAME}.weight", into, shard=(rows, columns))
    return into


@pytest.mark.parametrize("tool", TOOLS)
def test_values_are_those_of_the_formula(tool: str) -> None:
    tensors, expected = pack(*draw(ROWS, COLUMNS), tool)
    source = source_of(tool, tensors)
    assert torch.equal(read(source, Share(0, ROWS, ROWS), Share(0, COLUMNS, COLUMNS)), expected)
    assert torch.equal(read(source, Share(5, 9, ROWS), Share(16, 32, COLUMNS)), expected[5:14, 16:48])
    held = source.stored(f"{NAME}.weight")
    assert held is not None and held.shape == (ROWS, COLUMNS)
    assert source._inner.asked == {f"{NAME}.{part}" for part in tensors}


@pytest.mark.parametrize("tool", TOOLS)
def test_damage_is_named(tool: str) -> None:
    tensors, _ = pack(*draw(ROWS, COLUMNS), tool)
    rows, columns = Share(0, ROWS, ROWS), Share(0, COLUMNS, COLUMNS)
    with pytest.raises(UnsupportedModelError, match="cut at inputs 8 and 24, as tensor_parallel_size asks for"):
        read(source_of(tool, tensors), rows, Share(8, 16, COLUMNS))
    whole = "weight_scale_2" if tool == "modelopt" else "weight_global_scale"
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(UnsupportedModelError, match=f"{NAME}.{whole} is not positive"):
            read(source_of(tool, {**tensors, whole: torch.full_like(tensors[whole], value)}), rows, columns)
    for value in (float("nan"), -1.0):
        scales = tensors["weight_scale"].clone()
        scales[2, 1] = value
        with pytest.raises(UnsupportedModelError, match=f"{NAME}.weight_scale holds NaN or negative numbers"):
            read(source_of(tool, {**tensors, "weight_scale": scales}), rows, columns)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_checkpoint_computes_with_widened_weights(tmp_path: Path, tool: str) -> None:
    """Check the widened weights, and the same rounded to eight bits."""
    save_reference(make_reference("qwen3-moe", **SIZES, moe_intermediate_size=64), tmp_path)
    wide = quantise_nvfp4(tmp_path, tool)
    model = load_widened(tmp_path)
    assert model.weights == "nvfp4, widened"
    assert read_model_spec(tmp_path).quantization == Nvfp4Scheme(tool, ("lm_head",))
    found = logits(model)
    rounded = [logits(load(tmp_path, quantization=kind)) for kind in ("fp8", "int8")]
    assert torch.equal(found, in_floats(tmp_path, wide))
    assert torch.equal(rounded[0], logits(load(tmp_path, quantization="fp8")))
    assert torch.equal(rounded[1], logits(load(tmp_path, quantization="int8")))
