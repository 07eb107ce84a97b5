"""Interface of attention backends, and the data that they are built from.

A backend declares what it can do besides `forward` by the protocols that it implements, never by its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec

# Integers of an entry in a map of chunks. The first one is -1 in entries that only pad the map.
CHUNK_FIELD_COUNT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Requirements of a backend: `specs` of the model's layers, in order, and the sizes of its buffers.

    kv_dtype: dtype of K and V in the store. max_rows, max_tokens: the most rows and tokens of a step. max_model_len:
    the most tokens of a context.
    """

    specs: tuple[AttentionSpec, ...]
    max_rows: int
    max_tokens: int
    max_model_len: int
    block_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device


class ShortRows(NamedTuple):
    """Limits of steps of a few short rows: the number of rows, and the tokens of each."""

    rows: int
    tokens: int


class AttentionBackend(Protocol):
    """Causal attention of a step's packed tokens over the paged KV store, by each layer's `AttentionSpec`."""

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        """Prepare the data that all layers of the next forward pass share. Called once a step, before `forward`."""
        ...

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        """Apply `heads` to queries and keys, write K and V at the batch's slots, and attend.

        qkv: [T, (heads + 2 * kv_heads) * D], a layer's packed projections, query heads first; may be overwritten.
        `heads.spec` is the layer's spec in the backend's `AttentionShape`. Returns [T, heads * D]. Slots of -1 are not
        written. Each row sees its own blocks up to its query's position and nothing else.
        """
        ...

    def write(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> None:
        """Write K and V as `forward` does, and nothing else."""
        ...


@runtime_checkable
class GraphableAttention(AttentionBackend, Protocol):
    """Backend whose steps can be captured in CUDA graphs.

    It reads from the device what changes between replays; a table there describes the prompt chunks of a step. `begin`
    is called once before each capture and once within it.
    """

    def map_chunks(
        self, tokens: int, first_row: int, query_lens: Sequence[int], context_lens: Sequence[int], room: int
    ) -> np.ndarray:
        """Return the map [g, CHUNK_FIELD_COUNT] int32 of the chunk rows from `first_row` on.

        tokens: those that the step was captured with. room: entries that the map should not exceed.
        """
        ...

    def max_chunks(self, tokens: int, rows: int, divided: bool, crowded: bool) -> int:
        """Return the number of entries that the map of such a step has room for.

        divided: if contexts are divided. crowded: if most rows may be short chunks, such as tokens with their drafts.
        """
        ...

    def may_divide(self, tokens: int) -> bool:
        """Return True if the map of such a step may divide contexts. Then the step is captured in two forms."""
        ...

    def is_divided(self, chunk_map: np.ndarray) -> bool:
        """Return True if the map divides a context, which only the form for divided contexts computes."""
        ...

    def short_rows(self, tokens: int) -> ShortRows | None:
        """Return the rows of a captured step of so many tokens for which the backend needs no map; None for no rows.

        Such a step's batch has a `max_query` of at most their tokens, no `chunk_map`, and any such rows on the device.
        """
        ...
