"""Checkpoints in NVFP4 as two tools store them: widened exactly, or refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.models.config import read_model_spec
from roseinfer.parallel.group import Share
from roseinfer.quant.nvfp4_scheme import Nvfp4Scheme
from roseinfer.quant.nvfp4_stored import Nvfp4Source
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.fp8_files import is_linear
from tests.helpers.int4_files import Tensors, state_quantization, write_tensors
from tests.helpers.loaded import load, logits
from tests.helpers.mxfp4_files import VALUES
from tests.helpers.weights import Named
from tests.models.test_quantization import MODELOPT_NVFP4, NVFP4
from tests.quant.test_int4_checkpoints import SIZES, in_floats, load_widened

NAME = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 24, 64


def draw(rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, torch.Tensor, float]:
    """Return codes [rows, columns] 0 to 15, scales [rows, columns / 16] in e4m3, and the scale of the matrix."""
    rng = np.random.default_rng(seed)
    scales = torch.from_numpy(rng.uniform(20, 448, (rows, columns // 16))).to(torch.float8_e4m3fn)
    return rng.integers(0, 16, (rows, columns)), scales, float(np.float32(rng.uniform(1e-5, 3e-5)))


def pack(codes: np.ndarray, scales: torch.Tensor, scale: float, tool: str) -> tuple[Tensors, torch.Tensor]:
    """Return a layer's tensors, and its matrix by the formula of the tool."""
    packed = torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))
    numbers = torch.from_numpy(VALUES[codes]).unflatten(1, (-1, 16))
    if tool == "modelopt":
        factors = scales.float() * torch.tensor(scale)
        tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(scale)}
        tensors["input_scale"] = torch.tensor(0.01)
    else:
        whole = torch.tensor([1 / scale])
        factors = scales.float() / whole
        tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": whole}
        tensors["input_global_scale"] = torch.tensor([100.0])
    return tensors, (numbers * factors[:, :, None]).flatten(1)


def source_of(tool: str, tensors: Tensors) -> Nvfp4Source:
    return Nvfp4Source(Named({f"{NAME}.{part}": tensor for part, tensor in tensors.items()}), Nvfp4Scheme(tool))


def read(source: Nvfp4Source, rows: Share, columns: Share) -> torch.Tensor:
    into = torch.empty(rows.width, columns.width)
    source.read(f"{NAME}.weight", into, shard=(rows, columns))
    return into


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_values_are_those_of_the_formula(tool: str) -> None:
    tensors, expected = pack(*draw(ROWS, COLUMNS), tool)
    source = source_of(tool, tensors)
    assert torch.equal(read(source, Share(0, ROWS, ROWS), Share(0, COLUMNS, COLUMNS)), expected)
    assert torch.equal(read(source, Share(5, 9, ROWS), Share(16, 32, COLUMNS)), expected[5:14, 16:48])
    held = source.stored(f"{NAME}.weight")
    assert held is not None and held.shape == (ROWS, COLUMNS)
    assert source._inner.asked == {f"{NAME}.{part}" for part in tensors}


@pytest.mark.parametrize("tool", ["compressed-tensors", "modelopt"])
def test_damage_is_named(tool: str) -> None:
    tensors, _ = pack(*draw(ROWS, COLUMNS), tool)
    rows, columns = Share(0, ROWS, ROWS), Share(0, COLUMNS, COLUMNS)
    with pytest.raises(UnsupportedModelError, match="cut at inputs 8 and 24, as tensor_parallel_size asks for"):
        read(source_of(tool, tensors), rows, Share(8, 16, COLUMNS))
    whole = "weight_scale_2" if tool == "modelopt" else "weight_global_scale"
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(UnsupportedModelError, match=f"{NAME}.{whole} is not positive"):
            read(source_of(tool, {**tensors, whole: torch.full_like(tensors[whole], value)}), rows, columns)
    scales = tensors["weight_scale"].clone()
    scales[2, 1] = float("nan")
    with pytest.raises(UnsupportedModelError, match=f"{NAME}.weight_scale holds NaN"):
        read(source_of(tool, {**tensors, "weight_scale": scales}), rows, columns)


@pytest.mark.parametrize(("tool", "config"), [("compressed-tensors", NVFP4), ("modelopt", MODELOPT_NVFP4)])
def test_a_checkpoint_computes_with_widened_weights(tmp_path: Path, tool: str, config: dict[str, Any]) -> None:
    """Check the widened weights, and the same rounded to eight bits."""
    save_reference(make_reference("qwen3-moe", **SIZES, moe_intermediate_size=64), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    narrow, wide = dict(tensors), dict(tensors)
    for number, name in enumerate(filter(is_linear, tensors)):
        layer = name.removesuffix(".weight")
        del narrow[name]
        packed, wide[name] = pack(*draw(*tensors[name].shape, number), tool)
        narrow |= {f"{layer}.{part}": tensor for part, tensor in packed.items()}
    write_tensors(tmp_path, narrow)
    state_quantization(tmp_path, config)
    model = load_widened(tmp_path)
    assert model.weights == "nvfp4, widened"
    assert read_model_spec(tmp_path).quantization == Nvfp4Scheme(tool, ("lm_head",))
    found = logits(model)
    rounded = [logits(load(tmp_path, quantization=kind)) for kind in ("fp8", "int8")]
    assert torch.equal(found, in_floats(tmp_path, wide))
    assert torch.equal(rounded[0], logits(load(tmp_path, quantization="fp8")))
    assert torch.equal(rounded[1], logits(load(tmp_path, quantization="int8")))
