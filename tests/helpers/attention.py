"""Building blocks of attention for tests."""

import torch

from roseinfer.attention.base import AttentionShape
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec


def spec_of(heads: int, kv_heads: int, head_dim: int, **more: object) -> AttentionSpec:
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **more)  # type: ignore[arg-type]


def shape_of(*specs: AttentionSpec, device: torch.device, **more: object) -> AttentionShape:
    sizes = {"max_rows": 12, "max_tokens": 1024, "max_model_len": 256, "block_size": 16, "dtype": torch.float32}
    more.setdefault("kv_dtype", more.get("dtype", torch.float32))
    return AttentionShape(specs=specs, device=device, **{**sizes, **more})  # type: ignore[arg-type]


def store_of(
    num_blocks: int,
    num_layers: int,
    block_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVStore:
    """A store whose layers are alike."""
    return KVStore(num_blocks, block_size, [spec_of(kv_heads, kv_heads, head_dim)] * num_layers, dtype, device)
