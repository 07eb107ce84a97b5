"""What every GPU backend does with a layer's projections before it attends."""

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.kernels.heads import store_heads


def store_qkv(
    qkv: torch.Tensor,
    heads: HeadTransform,
    kv: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_scales: KVScales | None = None,
) -> None:
    """Norm and turn queries in place, keys on their way into the cache with the values.

    kv: `KVStore.layer`. kv_scales: if it holds codes. slots, positions: [T] int64, see `Paging` and `ForwardBatch`.
    """
    spec, norms, rotary = heads.spec, heads.norms, heads.rotary
    store_heads(
        qkv,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        *kv,
        slots,
        positions,
        None if rotary is None else rotary.cos_sin,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.eps,
        kv_scales,
    )
