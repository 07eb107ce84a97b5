"""RMSNorm of all queries of a token together, and of all its keys (OLMo 2)."""

from collections.abc import Callable, Sequence

import torch

from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.norm import RMSNorm
from roseinfer.parallel.group import share_of
from roseinfer.quant.base import WeightSource


def load_projection_norm(
    source: WeightSource, names: Sequence[str], spec: AttentionSpec, eps: float
) -> Callable[[torch.Tensor], None]:
    """Load the norms of queries and keys, and return a function that applies them to packed projections in place.

    spec: the whole layer's, of which this rank holds its share.
    """
    group, unit = source.build.group, spec.head_dim
    if group.size > 1:
        return SharedProjectionNorm(source, names, spec, eps)
    norms = RMSNorm(spec.heads * unit, eps), RMSNorm(spec.kv_heads * unit, eps)
    for norm, name in zip(norms, names, strict=True):
        norm.load(source, name)
    return ProjectionNorm(*norms, (spec.heads * unit, spec.kv_heads * unit))


class ProjectionNorm:
    """Norms of one rank, which holds all heads."""

    def __init__(self, queries: RMSNorm, keys: RMSNorm, widths: tuple[int, int]) -> None:
        self._queries, self._keys = queries, keys
        self._widths = widths

    def __call__(self, qkv: torch.Tensor) -> None:
        width, keys = self._widths
        for part, norm in ((qkv[:, :width], self._queries), (qkv[:, width : width + keys], self._keys)):
            part.copy_(norm(part))


class SharedProjectionNorm:
    """Norms of one of several ranks, each of which holds some heads: the ranks sum the squares of theirs."""

    def __init__(self, source: WeightSource, names: Sequence[str], spec: AttentionSpec, eps: float) -> None:
        self._group, self._eps = source.build.group, eps
        unit, dtype, device = spec.head_dim, source.build.dtype, source.build.device
        queries = share_of(self._group, spec.heads * unit, unit=unit)
        keys = share_of(self._group, spec.kv_heads * unit, unit=unit, repeat=True)
        self._widths = (queries.width, keys.width)
        # Of all ranks. With more ranks than KV heads, several hold the same head.
        counts = [self._group.size * width for width in self._widths]
        self._counts = torch.tensor(counts, dtype=torch.float32, device=device)
        self._weights = [torch.empty(width, dtype=dtype, device=device) for width in self._widths]
        for name, weight, share in zip(names, self._weights, (queries, keys), strict=True):
            source.read(f"{name}.weight", weight, shard=[share])

    def __call__(self, qkv: torch.Tensor) -> None:
        width, keys = self._widths
        parts = qkv[:, :width], qkv[:, width : width + keys]
        squares = torch.stack([part.to(torch.float32).square().sum(-1) for part in parts], -1)
        scales = torch.rsqrt(self._group.all_reduce(squares) / self._counts + self._eps)
        for part, weight, scale in zip(parts, self._weights, scales.split(1, -1), strict=True):
            part.copy_(part * scale * weight)
