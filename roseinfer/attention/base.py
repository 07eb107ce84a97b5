"""The one interface of every attention implementation, and what it is built from.

What a backend can do besides `forward` is said by the protocols that it implements, never by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec

# Integers of an entry of a map of chunks, of which the first is -1 in those that only fill it up.
CHUNK_FIELD_COUNT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a backend is built for: `specs` of the model's layers in order, and what it sizes its buffers by.

    kv_dtype: the dtype of K and V in the store. max_rows, max_tokens: rows and tokens of a step at most. max_model_len:
    tokens of a context at most.
    """

    specs: tuple[AttentionSpec, ...]
    max_rows: int
    max_tokens: int
    max_model_len: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device


class AttentionBackend(Protocol):
    """Causal attention of a step's packed tokens over the paged KV store, as each layer's `AttentionSpec` says."""

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        """Prepare what all layers of the coming forward pass share. Called once a step, before `forward`."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        """Norm and turn queries and keys as `heads` says, write K and V at the batch's slots, attend as its spec says.

        qkv: [T, (heads + 2 * kv_heads) * D], a layer's packed projections, query heads first; may be overwritten.
        `heads.spec` is the layer's of the `AttentionShape` that the backend was built from. Returns [T, heads * D].
        Slots of -1 are not written. Each row sees its own blocks up to its query's position and nothing else.
        """
        ...


@runtime_checkable
class GraphableAttention(AttentionBackend, Protocol):
    """A backend whose steps can be captured in CUDA graphs.

    It reads what changes between replays from the device; a table there describes the prompt chunks of a step. `begin`
    is called once before each capture and once within it.
    """

    def map_chunks(
        self, tokens: int, first_row: int, query_lens: Sequence[int], context_lens: Sequence[int], room: int
    ) -> np.ndarray:
        """Return the map [g, CHUNK_FIELD_COUNT] int32 of the chunk rows from `first_row` on.

        tokens: those that the step was captured with. room: entries that the map should not exceed.
        """
        ...

    def max_chunks(self, tokens: int, rows: int) -> int:
        """Entries that the map of such a step has room for."""
        ...
