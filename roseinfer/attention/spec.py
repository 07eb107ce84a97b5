"""What one layer's attention computes, as plain data: known when a model is built, before any weight is read."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Causal attention of one layer: softmax(scale * q K^T) V.

    Query head h reads KV head h // (heads / kv_heads). `window`: the query at position i sees the keys at positions
    j with i - window < j <= i, as in `transformers`; None lets it see all up to its own. `cap`: scores are replaced
    by cap * tanh(score / cap); None leaves them. `sinks`: each head has one learned logit more in the denominator of
    its softmax, which has no value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    cap: float | None = None
    sinks: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        """Columns of a layer's packed projections: query heads, then keys, then values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def unsupported(specs: Sequence[AttentionSpec], *, longest_head: int | None = None) -> str | None:
    """What of these specs a backend without caps and sinks lacks, as the end of a sentence; None if nothing.

    longest_head: the backend's largest head_dim, None for any.
    """
    for spec in specs:
        if spec.cap is not None:
            return f"it does not cap scores, and the model caps them at {spec.cap:g}"
        if spec.sinks:
            return "it has no attention sinks, and the model has them"
        if longest_head is not None and spec.head_dim > longest_head:
            return f"it takes heads of up to {longest_head} dimensions, and the model's have {spec.head_dim}"
    return None
