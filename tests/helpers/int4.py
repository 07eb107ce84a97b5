"""Random weights in four bits, as kernels read them and widened."""

import torch

from roseinfer.kernels.linear.int4_codes import PackedInt4
from roseinfer.quant.int4_matmul import packed
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.nvfp4_weight import Nvfp4Weight

NVFP4 = 16  # columns in a group of weights that are in NVFP4


def four_bits(rows, columns, group, *, symmetric=False, device=None) -> Int4Weight | Nvfp4Weight:
    """Return random codes, scales, and in int4 offsets about the middle of the codes. group: `NVFP4` or int4's."""
    if group == NVFP4:
        return _nvfp4(rows, columns, device)
    weight = Int4Weight.empty(rows, columns, group, symmetric=symmetric, device=device)
    weight.codes.copy_(torch.randint(256, weight.codes.shape, dtype=torch.uint8))
    weight.scales.copy_((0.5 + torch.rand(weight.scales.shape)) * columns**-0.5 / 5)
    if weight.offsets is not None:
        weight.offsets.copy_(weight.scales * (4 + 8 * torch.rand(weight.scales.shape, device=device)))
    return weight


def _nvfp4(rows, columns, device) -> Nvfp4Weight:
    """Return scales from 0 to 448, of which some are subnormal numbers, and factors of three matrices."""
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8).to(device)
    scales = 448 * torch.rand(rows, columns // 16)
    scales = torch.where(torch.rand_like(scales) < 0.1, scales * 2.0**-14, scales).to(torch.float8_e4m3fn).to(device)
    factors = torch.tensor([1.0, 1.7, 0.6]) * columns**-0.5 / 700
    return Nvfp4Weight(codes, scales, factors[torch.arange(rows) * 3 // rows].to(device))


def four_bits_case(device, rows, columns, group, *, symmetric=False) -> tuple[PackedInt4, torch.Tensor]:
    """Return a random weight, and the same in float32."""
    weight = four_bits(rows, columns, group, symmetric=symmetric, device=device)
    return packed(weight), weight.widen(torch.float32)
