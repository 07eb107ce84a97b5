"""Experts that a GPU keeps in int4, as a checkpoint stores them or rounded."""

import torch

from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS, reordered
from roseinfer.quant.int4_matmul import half_scales
from roseinfer.quant.int4_weight import Int4Weight


def keeps(columns: int) -> bool:
    """Return True if the kernels multiply by experts of so many columns in int4."""
    return columns % BLOCK_ELEMENTS == 0


def expert_codes(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales for a `Stack`: [N, K / 2] uint8 and [N, K / group] int32.

    Raises `UnsupportedModelError` for scales that the kernels do not support.
    """
    codes = reordered(weight.codes.unflatten(1, (-1, BLOCK_ELEMENTS // 2))).flatten(1)
    return codes, torch.stack(half_scales(weight), 2).view(torch.int32)[:, :, 0].contiguous()
