"""Tensors of one step, as models and attention see them."""

from dataclasses import dataclass

import torch

from roseinfer.quant.base import AdapterRows
from roseinfer.state.batch import StateBatch


@dataclass(frozen=True, slots=True)
class Paging:
    """Storage of a step's tokens in the layers of one KV group.

    tables: [S, B] int32, the block tables of all seats. Entries past a row's context are undefined.

    slots: [T] int64, the destination of each token's K and V: block * block_size + offset, or -1 for "do not write".
    """

    tables: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Packed tokens of R rows, T tokens in all. Row r owns tokens query_start[r] .. query_start[r + 1].

    The first `num_decodes` rows have exactly one token each, the rows after them more. A batch that is captured for
    short rows has 0 there, `max_query` tokens a row at the most, and possibly rows without a token.

    input_ids, positions: [T] int64.
    query_start: [R + 1] int32. context_len: [R] int32 = tokens visible to the row's last query (start + count).
    table_rows: [R] int32, row r's block tables are those of seat table_rows[r].
    paging: of each KV group; a layer's is paging[store.group_of[layer]].
    logits_at: [L] int64, the packed token indices whose logits are wanted.
    max_query: the most tokens of a row, on the host.
    query_lens, context_lens: the same counts on the host, for backends that loop or plan on the CPU. In a batch that
    is captured in a CUDA graph they are placeholders: only what is on the device changes between replays.
    decode_len [R] int32 and chunk_map [G, CHUNK_FIELD_COUNT] int32 (from the backend's `map_chunks`) are set if the
    batch is captured for steps that mix decodes and chunks; the device then knows which rows are which. decode_len is
    the context of decoding rows, which come first, and 0 for the others. divided: chunk_map may divide contexts.
    states: slots of the rows; None for models without states. adapters: of the rows; None if no row has one.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    table_rows: torch.Tensor
    paging: tuple[Paging, ...]
    logits_at: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    max_query: int
    num_decodes: int
    decode_len: torch.Tensor | None = None
    chunk_map: torch.Tensor | None = None
    divided: bool = False
    states: StateBatch | None = None
    adapters: AdapterRows | None = None

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)
