"""Experts that a GPU keeps in MXFP4, read from a checkpoint or drawn."""

import torch

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS, round_mxfp4
from roseinfer.kernels.experts.mxfp4_weights import MAX_WIDENED_SCALE
from roseinfer.kernels.experts.tiles import Stack
from roseinfer.parallel.group import RankGroup, Share
from roseinfer.quant.base import ExpertNames, ExpertShape, WeightPiece, WeightSource
from roseinfer.quant.cuda_experts import CudaExperts, check_device
from roseinfer.quant.experts import expert_pieces, read_router, read_router_bias
from roseinfer.quant.mxfp4 import BLOCKS, read_mxfp4
from roseinfer.quant.plain import read_bias, read_weight

_MAX_FLOAT16_SCALE = 127 + 13  # of 6, the largest code


def load_mxfp4_experts(source: WeightSource, shape: ExpertShape, names: ExpertNames) -> CudaExperts:
    """Load the experts of one layer. Raises `ConfigError` for an unsupported GPU, dtype or group, and
    `UnsupportedModelError` for unsupported sizes.
    """
    build = source.build
    check_device(build.device, build.dtype)
    if shape.hidden % BLOCK_ELEMENTS or shape.width % BLOCK_ELEMENTS:
        raise UnsupportedModelError(
            f"experts of width {shape.width} in a model of width {shape.hidden} are not supported in mxfp4: both have "
            f"to be multiples of {BLOCK_ELEMENTS}"
        )
    share, padded = padded_share(build.group, shape.width)
    router, router_bias = read_router(source, shape, names, build.dtype), read_router_bias(source, shape, names)
    stacked = names.stacked
    if stacked is not None and source.stored(f"{stacked.gate_up}{BLOCKS}") is not None:
        gate_up, down = _read(source, shape, names, share, padded)
    else:
        gate_up, down = _draw(source, shape, names, share, padded)
    _check_scales(build.dtype, gate_up, down)
    return CudaExperts(router, gate_up, down, shape, router_bias)


def _check_scales(dtype: torch.dtype, *stacks: Stack) -> None:
    for stack in stacks:
        assert stack.scales is not None
        largest = int(stack.scales.max())
        if dtype is torch.float16 and largest > _MAX_FLOAT16_SCALE:
            raise ConfigError("dtype float16 does not hold the experts' numbers in mxfp4; use bfloat16")
        if largest > MAX_WIDENED_SCALE:
            raise UnsupportedModelError(
                f"experts in mxfp4 with scales above 2^{MAX_WIDENED_SCALE - 127} are not supported"
            )


def padded_share(group: RankGroup, width: int) -> tuple[Share, int]:
    """Return this rank's part of the experts' width in whole blocks, and the largest part of a rank, to which zeros
    pad the others. gpt-oss has 90 blocks: 23 for each of four ranks, and 21 for the last one.
    """
    blocks = width // BLOCK_ELEMENTS
    most = -(-blocks // group.size)
    start = min(group.rank * most, blocks)
    held = min(most, blocks - start)
    if held == 0:
        raise ConfigError(
            f"tensor_parallel_size: experts in mxfp4 of {blocks} blocks cannot be divided among {group.size} processes"
        )
    return Share(start * BLOCK_ELEMENTS, held * BLOCK_ELEMENTS, width), most * BLOCK_ELEMENTS


def _read(
    source: WeightSource, shape: ExpertShape, names: ExpertNames, share: Share, padded: int
) -> tuple[Stack, Stack]:
    """Read gate and up, whose rows alternate, and down."""
    stacked, build = names.stacked, source.build
    assert stacked is not None
    experts, hidden = _whole(shape.count), _whole(shape.hidden)
    rows = Share(2 * share.start, 2 * share.width, 2 * share.whole)
    parts = [*read_mxfp4(source, stacked.gate_up, experts, rows, _blocks(hidden))]
    up_bias = down_bias = None
    if shape.bias:
        bias = torch.empty(shape.count, rows.width, dtype=build.dtype, device=build.device)
        source.read(f"{stacked.gate_up}_bias", bias, shard=(experts, rows))
        up_bias = _gate_first(bias, padded)
    codes, scales = (_gate_first(part, padded) for part in parts)
    gate_up = Stack(codes, scales, up_bias)
    codes, scales = read_mxfp4(source, stacked.down, experts, hidden, _blocks(share))
    if shape.bias and build.group.rank == 0:
        down_bias = torch.empty(shape.count, shape.hidden, dtype=build.dtype, device=build.device)
        source.read(f"{stacked.down}_bias", down_bias)
    elif shape.bias:
        source.skip(f"{stacked.down}_bias")
    down = Stack(_filled(codes, padded // 2), _filled(scales, padded // BLOCK_ELEMENTS), down_bias)
    return gate_up, down


def _draw(
    source: WeightSource, shape: ExpertShape, names: ExpertNames, share: Share, padded: int
) -> tuple[Stack, Stack]:
    """Round experts that are floats, one after the other."""
    gate_up, down = expert_pieces(source, shape, share, names)
    found = []
    for number in range(shape.count):
        both = read_weight(source, gate_up[2 * number : 2 * number + 2]).unflatten(0, (2, share.width))
        of_down = read_weight(source, [down[number]])
        found.append(
            (
                *(_filled(part, padded, 1).flatten(0, 1) for part in round_mxfp4(both)),
                *(_filled(part, part.shape[1] * padded // share.width) for part in round_mxfp4(of_down)),
            )
        )
    codes, scales, down_codes, down_scales = (torch.stack(parts) for parts in zip(*found, strict=True))
    return (
        Stack(codes, scales, _stacked_bias(source, gate_up, shape, padded)),
        Stack(down_codes, down_scales, _stacked_bias(source, down, shape, shape.hidden)),
    )


def _stacked_bias(
    source: WeightSource, pieces: list[WeightPiece], shape: ExpertShape, width: int
) -> torch.Tensor | None:
    """Read biases [count, n * width] of n matrices of each expert, padded with zeros."""
    bias = read_bias(source, pieces)
    if bias is None:
        return None
    return _filled(bias.view(len(pieces), -1), width).reshape(shape.count, -1)


def _gate_first(alternating: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows [count, 2 * width, ..], the gate's and then up's, of rows [count, .., ..] that alternate."""
    return torch.cat([_filled(alternating[:, first::2], width, 1) for first in (0, 1)], 1)


def _filled(part: torch.Tensor, size: int, dim: int = -1) -> torch.Tensor:
    """Return `part`, contiguous, with zeros up to `size` in a dimension."""
    if part.shape[dim] == size:
        return part.contiguous()
    shape = list(part.shape)
    shape[dim] = size - part.shape[dim]
    return torch.cat((part, part.new_zeros(shape)), dim)


def _whole(width: int) -> Share:
    return Share(0, width, width)


def _blocks(share: Share) -> Share:
    return Share(*(value // BLOCK_ELEMENTS for value in (share.start, share.width, share.whole)))
