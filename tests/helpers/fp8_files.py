"""Checkpoints whose linear layers are rounded to FP8 in each of the layouts there are, and the same widened again."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "in_proj_qkv",
    "in_proj_z",
    "out_proj",
)
Tensors = dict[str, torch.Tensor]
Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def is_linear(name: str) -> bool:
    return name.split(".")[-2] in LAYERS and name.endswith(".weight")


def by_block(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of blocks of 128 x 128, written out."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = weight[part].abs().max() / 448
            codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def by_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scales).to(torch.float8_e4m3fn), scales


def by_tensor(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().max() / 448
    return (weight / scale).to(torch.float8_e4m3fn), scale


def widened(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if scales.ndim == 2 and scales.shape[1] * 128 >= codes.shape[1] > 1 and scales.shape[0] != codes.shape[0]:
        spread = scales.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
        return codes.float() * spread
    return codes.float() * scales


def quantise(tensors: Tensors, scale: str, how: Rounding) -> tuple[Tensors, Tensors]:
    """A checkpoint in FP8 whose scales are called `scale`, and the same widened again."""
    narrow, wide = dict(tensors), dict(tensors)
    for name in filter(is_linear, tensors):
        codes, scales = how(tensors[name])
        narrow |= {name: codes, name.removesuffix("weight") + scale: scales}
        wide[name] = widened(codes, scales)
    return narrow, wide


def write(folder: Path, tensors: Tensors) -> None:
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
