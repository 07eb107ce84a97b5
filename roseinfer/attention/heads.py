"""Norm and rotation of a layer's queries and keys, between their projection and attention."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F

from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.rope import Rotary
from roseinfer.attention.spec import AttentionSpec
from roseinfer.kernels.attention.heads import HeadPreparation
from roseinfer.quant.base import WeightSource, read_new


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head (Qwen3): one weight [D] for queries, one for keys.

    both: [heads + kv_heads, D], the two weights repeated for each head, so that one norm serves queries and keys.
    after_rotation: heads are rotated first (Hunyuan).
    """

    query: torch.Tensor
    key: torch.Tensor
    both: torch.Tensor
    eps: float
    after_rotation: bool = False

    @classmethod
    def load(
        cls,
        source: WeightSource,
        names: tuple[str, str],
        spec: AttentionSpec,
        eps: float,
        *,
        offset: float = 0.0,
        after_rotation: bool = False,
    ) -> "HeadNorms":
        """Load the norms called `names`. offset: added to the weights, in float32."""
        dtype = torch.float32 if offset else None
        query, key = (read_new(source, f"{name}.weight", spec.head_dim, dtype=dtype) + offset for name in names)
        both = torch.cat((query.expand(spec.heads, -1), key.expand(spec.kv_heads, -1)))
        return cls(query, key, both, eps, after_rotation)

    def __call__(self, qk: torch.Tensor) -> torch.Tensor:
        """Normalise every head of qk [T, heads + kv_heads, D]."""
        wide = qk.to(self.both.dtype)  # float32 with an offset: the product is rounded once
        return (F.rms_norm(wide, wide.shape[-1:], None, self.eps) * self.both).to(qk.dtype)


@dataclass(frozen=True)
class HeadTransform:
    """Transformation of one layer's projections: its attention, and what precedes it for queries and keys.

    norms: None if the model has none. rotary: None for learned positions. kv_scales: the checkpoint's scales for K and
    V in FP8, or None. sinks: [heads] float32, for a layer that has them.
    """

    spec: AttentionSpec
    norms: HeadNorms | None = None
    rotary: Rotary | None = None
    kv_scales: KVScales | None = None
    sinks: torch.Tensor | None = None

    @cached_property
    def preparation(self) -> HeadPreparation:
        """Arguments of kernels for norm and rotation, computed once: a layer has the same in each step."""
        norms, rotary = self.norms, self.rotary
        return HeadPreparation(
            queries_cos_sin=None if rotary is None else rotary.queries_cos_sin,
            keys_cos_sin=None if rotary is None else rotary.cos_sin,
            pairs=None if rotary is None else rotary.pairs,
            q_weight=None if norms is None else norms.query,
            k_weight=None if norms is None else norms.key,
            eps=0.0 if norms is None else norms.eps,
            norm_after=norms is not None and norms.after_rotation,
        )

    @cached_property
    def key_preparation(self) -> HeadPreparation:
        """`preparation` of keys for a kernel that takes one kind of head: with the keys' weight and table."""
        both = self.preparation
        return replace(both, queries_cos_sin=both.keys_cos_sin, q_weight=both.k_weight)

    def split(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split packed projections into q [T, heads, D], k and v [T, kv_heads, D]; norm and rotate q and k."""
        heads, kv_heads, head_dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        turned = heads + kv_heads
        by_head = qkv.view(qkv.shape[0], turned + kv_heads, head_dim)
        if self.norms is None and self.rotary is None:
            q, k, v = by_head.split_with_sizes((heads, kv_heads, kv_heads), 1)
            return q, k, v
        qk, v = by_head[:, :turned], by_head[:, turned:]
        if self.norms is not None and not self.norms.after_rotation:
            qk = self.norms(qk)
        if self.rotary is not None:
            qk = self.rotary.rotate(qk, positions, heads)
        if self.norms is not None and self.norms.after_rotation:
            qk = self.norms(qk)
        return qk[:, :heads], qk[:, heads:], v
