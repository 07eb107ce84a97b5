"""Preparation of a layer's projections for attention on a GPU."""

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.kernels.attention.heads import store_heads


def store_qkv(
    qkv: torch.Tensor,
    heads: HeadTransform,
    kv: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_scales: KVScales | None = None,
) -> None:
    """Norm and rotate queries in place, and keys on their way into the cache with the values.

    kv: `KVStore.layer`. kv_scales: for a layer of codes. slots, positions: [T] int64, see `Paging` and `ForwardBatch`.
    """
    spec = heads.spec
    angles, q_weight, k_weight, eps = rotation_arguments(heads)
    sizes = (spec.heads, spec.kv_heads, spec.head_dim)
    store_heads(qkv, *sizes, *kv, slots, positions, angles, q_weight, k_weight, eps, kv_scales)


def rotation_arguments(
    heads: HeadTransform,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, float]:
    """Return the kernels' arguments for norm and rotation: table of angles, weights of queries and keys, epsilon."""
    angles = None if heads.rotary is None else heads.rotary.cos_sin
    if heads.norms is None:
        return angles, None, None, 0.0
    return angles, heads.norms.query, heads.norms.key, heads.norms.eps
