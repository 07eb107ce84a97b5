"""Experts that a GPU keeps in NVFP4, as a checkpoint stores them or rounded."""

import torch

from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS, reordered
from roseinfer.kernels.experts.tiles import Stack
from roseinfer.kernels.linear.nvfp4_codes import kernel_parts
from roseinfer.quant.nvfp4_weight import Nvfp4Weight


def keeps(columns: int) -> bool:
    """Return True if the kernels multiply by experts of so many columns in NVFP4."""
    return columns % BLOCK_ELEMENTS == 0


def expert_stack(weight: Nvfp4Weight, bias: torch.Tensor | None) -> Stack:
    """Return matrices of experts, one after the other, as a `Stack` without the dimension of experts."""
    codes, uppers, factors = kernel_parts(weight.codes, weight.scales, weight.factors)
    codes = reordered(codes.unflatten(1, (-1, BLOCK_ELEMENTS // 2))).flatten(1)
    return Stack(codes, uppers.view(torch.int16), bias, factors)
