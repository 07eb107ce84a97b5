"""The one interface of every attention implementation."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore


class AttentionBackend(Protocol):
    """Causal attention of a step's packed tokens over the paged KV store, scaled by 1 / sqrt(head_dim)."""

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        """Prepare what all layers of the coming forward pass share. Called once a step, before `forward`."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        """Norm and turn queries and keys as `heads` says, write K and V at the batch's slots, then attend.

        qkv: [T, (heads + 2 * kv_heads) * D], a layer's packed projections, query heads first; may be overwritten.
        Query head h reads KV head h // (heads / kv_heads). Returns [T, heads * D]. Slots of -1 are not written. Each
        row sees its own blocks up to its query's position and nothing else.
        """
        ...


@runtime_checkable
class PlannedAttention(AttentionBackend, Protocol):
    """A backend whose host divides the work of a captured decode step anew before each replay."""

    def begin_graph(self, batch: ForwardBatch, store: KVStore) -> None:
        """`begin` for a step of decodes that is captured; called once before the capture and once within."""
        ...

    def plan_graph(self, rows: int, context_lens: Sequence[int]) -> None:
        """Before each replay of the step captured with `rows` rows, of which the first have these contexts."""
        ...
