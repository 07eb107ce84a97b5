"""Tensors of a checkpoint in MXFP4."""

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.mxfp4_codes import BLOCK_ELEMENTS, MAX_SCALE, reordered
from roseinfer.parallel.group import Share
from roseinfer.quant.base import WeightSource

BLOCKS, SCALES = "_blocks", "_scales"  # endings of the names of tensors
_BYTES = BLOCK_ELEMENTS // 2


def read_mxfp4(
    source: WeightSource, name: str, experts: Share, rows: Share, blocks: Share
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [experts, rows, blocks * 16] in the order of `mxfp4_codes`, and scales [experts, rows, blocks].

    They are stored as [experts, rows, blocks, 16] and [experts, rows, blocks]. Raises `UnsupportedModelError` naming a
    tensor that holds NaN.
    """
    shape, device = (experts.width, rows.width, blocks.width), source.build.device
    stored = torch.empty((*shape, _BYTES), dtype=torch.uint8, device=device)
    scales = torch.empty(shape, dtype=torch.uint8, device=device)
    source.read(f"{name}{BLOCKS}", stored, shard=(experts, rows, blocks, Share(0, _BYTES, _BYTES)))
    source.read(f"{name}{SCALES}", scales, shard=(experts, rows, blocks))
    if bool((scales == MAX_SCALE).any()):
        raise UnsupportedModelError(f"tensor {name}{SCALES} holds NaN")
    return reordered(stored).flatten(-2), scales
