"""`ForwardBatch`es written by hand, for tests of models and attention."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from roseinfer.attention.batch import ForwardBatch, Paging
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.models.base import CausalLM
from roseinfer.state.batch import StateBatch, StateRow
from roseinfer.state.store import StateStore


@dataclass(frozen=True, kw_only=True)
class HandRow:
    """Compute tokens[start : start + count] of a sequence that owns `table`; K/V is written from `write_from` on."""

    tokens: Sequence[int]
    table: Sequence[int]
    start: int
    count: int
    write_from: int = 0

    @property
    def state(self) -> StateRow:
        """The sequence's slot for states is the number of its first block."""
        return StateRow(self.table[0], self.start, self.count)


class Blocks:
    """Hands out block ids in a shuffled order, so that tables are scattered over the store."""

    def __init__(self, num_blocks: int, block_size: int, seed: int = 0) -> None:
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._block_size = block_size

    def table(self, tokens: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-tokens // self._block_size))]


def make_batch(rows: Sequence[HandRow], block_size: int, device: str | torch.device = "cpu") -> ForwardBatch:
    """All rows want the logits of all their tokens. Unused table entries point nowhere."""

    def tensor(values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    query_lens = [row.count for row in rows]
    context_lens = [row.start + row.count for row in rows]
    width = max(len(row.table) for row in rows)
    positions = [p for row in rows for p in range(row.start, row.start + row.count)]
    slots = [
        row.table[p // block_size] * block_size + p % block_size if p >= row.write_from else -1
        for row in rows
        for p in range(row.start, row.start + row.count)
    ]
    tables = [[*row.table, *[-(10**6)] * (width - len(row.table))] for row in rows]
    return ForwardBatch(
        input_ids=tensor([t for row in rows for t in row.tokens[row.start : row.start + row.count]]),
        positions=tensor(positions),
        query_start=tensor([0, *accumulate(query_lens)], torch.int32),
        context_len=tensor(context_lens, torch.int32),
        table_rows=tensor(list(range(len(rows))), torch.int32),
        paging=(Paging(tensor(tables, torch.int32), tensor(slots)),),
        logits_at=tensor(list(range(len(positions)))),
        query_lens=query_lens,
        context_lens=context_lens,
        max_query=max(query_lens),
        num_decodes=query_lens.count(1),
    )


class HandRunner:
    """A model, a store and blocks: what a test needs to compute rows."""

    def __init__(self, model: CausalLM, *, block_size: int = 16, num_blocks: int = 64) -> None:
        self.model = model
        self.blocks = Blocks(num_blocks, block_size)
        self.store = KVStore(num_blocks, block_size, model.attention, model.dtype, model.device)
        # Blocks are reused without being cleared, so nothing may depend on what is left in them.
        for part in self.store.parts:
            part.fill_(float("nan"))
        self.attention = TorchAttention(model.attention, model.dtype)
        self.states = StateStore(num_blocks, model.state_specs(), model.device) if model.state_specs() else None
        for tensor in () if self.states is None else self.states.tensors:
            tensor.fill_(float("nan"))

    @torch.inference_mode()
    def run(self, rows: Sequence[HandRow]) -> list[torch.Tensor]:
        """Logits [count, vocab] of each row, on the CPU."""
        batch = make_batch(rows, self.store.block_size, self.model.device)
        if self.states is not None:
            batch = replace(batch, states=StateBatch.of(self.states, [row.state for row in rows]))
        self.attention.begin(batch, self.store)
        hidden = self.model.forward(batch, self.attention)
        logits = self.model.logits(hidden[batch.logits_at]).float()
        return list(logits.cpu().split(batch.query_lens))
