"""What happens to a layer's queries and keys between their projection and attention: norm and rotation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.rotary import Rotary, rotate
from roseinfer.quant.base import WeightSource, read_new


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head (Qwen3): one weight [D] for queries, one for keys.

    `both`: [heads + kv_heads, D], the two repeated per head, so that queries and keys are normed in one go.
    """

    query: torch.Tensor
    key: torch.Tensor
    both: torch.Tensor
    eps: float

    @classmethod
    def load(cls, source: WeightSource, query_name: str, key_name: str, spec: AttentionSpec, eps: float) -> "HeadNorms":
        query = read_new(source, f"{query_name}.weight", spec.head_dim)
        key = read_new(source, f"{key_name}.weight", spec.head_dim)
        return cls(query, key, torch.cat((query.expand(spec.heads, -1), key.expand(spec.kv_heads, -1))), eps)


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """What one layer does with its projections: what its attention computes, and what queries and keys undergo before.

    norms: None where the model has none. rotary: None for learned positions.
    """

    spec: AttentionSpec
    norms: HeadNorms | None = None
    rotary: Rotary | None = None

    def split(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D] of packed projections; q and k normed and turned."""
        heads, kv_heads, head_dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        turned = heads + kv_heads
        by_head = qkv.view(qkv.shape[0], turned + kv_heads, head_dim)
        qk, v = by_head[:, :turned], by_head[:, turned:]
        if self.norms is not None:
            qk = F.rms_norm(qk, (head_dim,), None, self.norms.eps) * self.norms.both
        if self.rotary is not None:
            qk = rotate(qk, self.rotary.angles(positions))
        return qk[:, :heads], qk[:, heads:], v
