"""Preparation of a layer's projections for attention without a KV store."""

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.kernels.common.availability import has_triton


def split_qkv(
    qkv: torch.Tensor, heads: HeadTransform, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [T, heads, D], keys and values [T, kv_heads, D], after norm and rotation.

    qkv: packed projections, which may be overwritten; the results may be parts of it. positions: [T] int64.
    """
    if not has_triton(qkv.device):
        return heads.split(qkv, positions)
    from roseinfer.attention.store_qkv import turn_qk

    turn_qk(qkv, heads, positions)
    return HeadTransform(heads.spec).split(qkv, positions)
