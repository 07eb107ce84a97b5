"""Preparation of a layer's projections for attention on a GPU."""

from dataclasses import replace

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.kernels.attention.heads import HeadPreparation, store_heads, turn_heads


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
    store_heads(qkv, *sizes, *kv, slots, positions, preparation_of(heads), kv_scales)


def turn_qk(qkv: torch.Tensor, heads: HeadTransform, positions: torch.Tensor) -> None:
    """Norm and rotate queries and keys in place, for attention without a cache."""
    spec, preparation = heads.spec, preparation_of(heads)
    if preparation.is_none:
        return
    queries, keys = preparation.queries_cos_sin, preparation.keys_cos_sin
    if preparation.q_weight is None and queries is keys:
        turn_heads(qkv, spec.heads + spec.kv_heads, spec.head_dim, positions, preparation)
        return
    turn_heads(qkv, spec.heads, spec.head_dim, positions, preparation)
    preparation = replace(preparation, queries_cos_sin=keys, q_weight=preparation.k_weight)
    turn_heads(qkv[:, spec.heads * spec.head_dim :], spec.kv_heads, spec.head_dim, positions, preparation)


def preparation_of(heads: HeadTransform) -> HeadPreparation:
    """Return the kernels' arguments for norm and rotation."""
    norms, rotary = heads.norms, heads.rotary
    return HeadPreparation(
        queries_cos_sin=None if rotary is None else rotary.queries_cos_sin,
        keys_cos_sin=None if rotary is None else rotary.cos_sin,
        pairs=None if rotary is None else rotary.pairs,
        q_weight=None if norms is None else norms.query,
        k_weight=None if norms is None else norms.key,
        eps=0.0 if norms is None else norms.eps,
        norm_after=norms is not None and norms.after_rotation,
    )
