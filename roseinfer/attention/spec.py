"""Definition of one layer's attention, as plain data that is known before any weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal attention of one layer: softmax(scale * q K^T) V.

    Query head h reads KV head h // (heads / kv_heads). window: the query at position i sees the keys at positions j
    with i - window < j <= i, as in `transformers`; None for all keys up to its own. cap: scores become cap * tanh(score
    / cap); None for no cap. sinks: each head has one learned logit more in the denominator of its softmax, without a
    value. skips_first: only the query at position 0 sees the key at position 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: bool = False
    skips_first: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        """Columns of a layer's packed projections: query heads, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def unsupported(specs: Sequence[AttentionSpec], *, longest_head: int | None = None) -> str | None:
    """Return what a backend without caps lacks for these specs, as the end of a sentence; None if nothing.

    longest_head: the backend's largest head_dim, None for any.
    """
    for spec in specs:
        if spec.cap is not None:
            return f"it does not cap scores, and the model caps them at {spec.cap:g}"
        if longest_head is not None and spec.head_dim > longest_head:
            return f"it takes heads of up to {longest_head} dimensions, and the model's have {spec.head_dim}"
    return None
