"""Checkpoints of gpt-oss with experts in MXFP4, packed here: transformers saves experts as floats only."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.helpers.checkpoints import make_reference

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BETWEEN = (VALUES[:7] + VALUES[1:8]) / 2
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
# Widths that blocks of 32 divide.
_WIDTHS = {"hidden_size": 64, "intermediate_size": 96}
_MATRICES = ("gate_up_proj", "down_proj")


def packed(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks [.., K / 32, 16], neighbours in a byte, and scales [.., K / 32], of weights [.., K] near them."""
    blocks = weights.reshape(*weights.shape[:-1], -1, 32).astype(np.float32)
    exponents = np.floor(np.log2(np.abs(blocks).max(-1).clip(1e-30))).astype(np.int32) - 2
    scaled = np.ldexp(blocks, -exponents[..., None])
    codes = np.searchsorted(_BETWEEN, np.abs(scaled)).astype(np.uint8)  # the smaller of two that are as near
    codes |= ((scaled < 0) & (codes > 0)).astype(np.uint8) << 3
    found = codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).astype(np.uint8)
    return np.ascontiguousarray(found[0]), np.ascontiguousarray(found[1])


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers [.., K] of blocks and scales."""
    codes = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:-1], 32)
    with np.errstate(over="ignore"):
        numbers = np.ldexp(VALUES[codes], scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(*numbers.shape[:-2], -1).astype(np.float32)


def make_packable(**changes: Any) -> PreTrainedModel:
    return make_reference("gpt-oss", **{**_WIDTHS, **changes})


@torch.no_grad()
def round_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the experts' matrices, which are stored as [count, in, out], by numbers that MXFP4 holds."""
    for name, parameter in model.named_parameters():
        if name.endswith(_MATRICES):
            rounded = unpacked(*packed(parameter.transpose(1, 2).float().numpy()))
            parameter.copy_(torch.from_numpy(rounded).transpose(1, 2))
    return model


def pack_folder(folder: Path) -> Path:
    """Rewrite a saved model so that its experts are in MXFP4."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(_MATRICES)]:
        blocks, scales = packed(tensors.pop(name).transpose(1, 2).float().numpy())
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = torch.from_numpy(blocks), torch.from_numpy(scales)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTIZATION}))
    return folder
