"""Random weights in four bits, as kernels read them and widened."""

import torch

from roseinfer.kernels.linear.int4_codes import PackedInt4
from roseinfer.quant.int4_matmul import packed
from roseinfer.quant.int4_weight import Int4Weight


def int4_weight(rows, columns, group, *, symmetric=False, device=None) -> Int4Weight:
    """Return random codes, scales, and offsets about the middle of the codes."""
    weight = Int4Weight.empty(rows, columns, group, symmetric=symmetric, device=device)
    weight.codes.copy_(torch.randint(256, weight.codes.shape, dtype=torch.uint8))
    weight.scales.copy_((0.5 + torch.rand(weight.scales.shape)) * columns**-0.5 / 5)
    if weight.offsets is not None:
        weight.offsets.copy_(weight.scales * (4 + 8 * torch.rand(weight.scales.shape, device=device)))
    return weight


def int4_case(device, rows, columns, group, *, symmetric=False) -> tuple[PackedInt4, torch.Tensor]:
    """Return a random weight, and the same in float32."""
    weight = int4_weight(rows, columns, group, symmetric=symmetric, device=device)
    return packed(weight), weight.widen(torch.float32)
