"""Preparation of a layer's projections for attention on a GPU."""

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.kernels.attention.heads import store_heads, turn_heads


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
    sizes = (spec.heads, spec.kv_heads, spec.head_dim)
    store_heads(qkv, *sizes, *kv, slots, positions, heads.preparation, kv_scales)


def turn_qk(qkv: torch.Tensor, heads: HeadTransform, positions: torch.Tensor) -> None:
    """Norm and rotate queries and keys in place, for attention without a cache."""
    spec, preparation = heads.spec, heads.preparation
    if preparation.is_none:
        return
    if preparation.q_weight is None and preparation.queries_cos_sin is preparation.keys_cos_sin:
        turn_heads(qkv, spec.heads + spec.kv_heads, spec.head_dim, positions, preparation)
        return
    turn_heads(qkv, spec.heads, spec.head_dim, positions, preparation)
    keys = qkv[:, spec.heads * spec.head_dim :]
    turn_heads(keys, spec.kv_heads, spec.head_dim, positions, heads.key_preparation)
