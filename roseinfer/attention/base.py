"""The one interface of every attention implementation."""

from typing import Protocol

import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.kv_store import KVStore


class AttentionBackend(Protocol):
    """Causal attention of a step's packed tokens over the paged KV store, scaled by 1 / sqrt(head_dim)."""

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        """Prepare what all layers of the coming forward pass share. Called once a step, before `forward`."""
        ...

    def forward(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write K and V at the batch's slots (-1: not at all), then attend.

        q: [T, heads, D]. k, v: [T, kv_heads, D]; query head h reads KV head h // (heads / kv_heads). Any of the three
        may be a strided view with dense last dimension. Returns [T, heads, D]. Each row sees its own blocks up to
        its query's position and nothing else. The result may be a strided view too.
        """
        ...
