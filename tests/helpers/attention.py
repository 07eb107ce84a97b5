"""What attention is built from, for tests."""

import torch

from roseinfer.attention.base import AttentionShape
from roseinfer.attention.spec import AttentionSpec


def spec_of(heads: int, kv_heads: int, head_dim: int, **more: object) -> AttentionSpec:
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, **more)  # type: ignore[arg-type]


def shape_of(*specs: AttentionSpec, device: torch.device, **more: object) -> AttentionShape:
    sizes = {"max_rows": 12, "max_tokens": 1024, "max_model_len": 256, "block_size": 16, "dtype": torch.float32}
    return AttentionShape(specs=specs, device=device, **{**sizes, **more})  # type: ignore[arg-type]
