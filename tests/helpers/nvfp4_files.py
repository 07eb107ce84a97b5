"""Weights in NVFP4, packed here as two tools pack them, and the same widened."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.helpers.fp8_files import is_linear
from tests.helpers.int4_files import Tensors, state_quantization, write_tensors
from tests.helpers.mxfp4_files import VALUES
from tests.models.test_quantization import MODELOPT_NVFP4, NVFP4

TOOLS = {"compressed-tensors": NVFP4, "modelopt": MODELOPT_NVFP4}


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


def quantise_nvfp4(folder: Path, tool: str) -> Tensors:
    """Replace the linear layers of a checkpoint by drawn ones, as that tool stores them; return all tensors widened."""
    tensors = load_file(folder / "model.safetensors")
    narrow, wide = dict(tensors), dict(tensors)
    for number, name in enumerate(filter(is_linear, tensors)):
        del narrow[name]
        packed, wide[name] = pack(*draw(*tensors[name].shape, number), tool)
        narrow |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in packed.items()}
    write_tensors(folder, narrow)
    state_quantization(folder, TOOLS[tool])
    return wide
