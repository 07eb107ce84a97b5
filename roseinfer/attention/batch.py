"""The tensors of one step, as models and attention see them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Packed tokens of R rows, T tokens in all. Row r owns tokens query_start[r] .. query_start[r + 1].

    input_ids, positions: [T] int64.
    query_start: [R + 1] int32. context_len: [R] int32 = tokens visible to the row's last query (start + count).
    block_tables: [R, B] int32, entries past a row's context are undefined.
    slots: [T] int64, where each token's K/V goes: block * block_size + offset, or -1 for "do not write".
    logits_at: [L] int64, the packed token indices whose logits are wanted.
    max_query, max_context: host-side maxima over the rows. `decode_only`: every row has exactly one query token.
    query_lens, context_lens: the same counts on the host, for backends that loop or plan on the CPU.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    block_tables: torch.Tensor
    slots: torch.Tensor
    logits_at: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    max_query: int
    max_context: int
    decode_only: bool
