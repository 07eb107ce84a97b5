"""The KV store as one row for each token, layer and K or V, so that one index operation reads or writes many rows.

Row numbers for all layers are computed once a step. A layer then takes two writes and one gather.
"""

import torch

from roseinfer.attention.kv_fp8 import CodeWidener
from roseinfer.kernels.common.fp8_codes import CODES


class PagedRows:
    """`rows`: [num_blocks * num_layers * 2 * block_size, kv_heads * D], a view of one of `KVStore.parts`.

    Plane 2 * layer holds a layer's K and plane 2 * layer + 1 its V. Gathered rows go to one buffer that all pieces of a
    step share: page faults in fresh memory of this size would cost a CPU several times the copy itself. Rows in FP8 are
    bytes (codes), which are widened after the gather.
    """

    def __init__(self, part: torch.Tensor, dtype: torch.dtype) -> None:
        """dtype: of gathered rows."""
        self.dtype = dtype
        self.widen = CodeWidener(dtype, part.device) if part.dtype == CODES else None
        if self.widen is not None:
            part = part.view(torch.uint8)
        blocks, layers, _, block_size, self.kv_heads, self.head_dim = part.shape
        self.layers = layers
        self.rows = part.view(blocks * layers * 2 * block_size, self.kv_heads * self.head_dim)
        self.block_size = block_size
        self._rows_per_block = 2 * layers * block_size
        self._plane_starts = torch.arange(2 * layers, device=self.rows.device)[:, None] * block_size
        self._buffers = {kind: torch.empty(0, dtype=kind, device=part.device) for kind in (self.rows.dtype, dtype)}
        self._block_of = self._offset_of = self._plane_starts.new_empty(0)

    def of_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the row numbers [2 * layers, n] of slots [n] int64, none of them negative (see `Paging.slots`)."""
        first = slots + slots // self.block_size * (self._rows_per_block - self.block_size)
        return first + self._plane_starts

    def of_contexts(
        self, tables: torch.Tensor, first: torch.Tensor | None, lengths: torch.Tensor, longest: int, ragged: bool
    ) -> torch.Tensor:
        """Return the row numbers [2 * layers, n * longest] of n sequences with block tables [n, B], padded if `ragged`.

        They cover lengths [n] tokens of each sequence from position first [n] on; None: from 0. Padding repeats a
        sequence's own first row, since an earlier owner's data in a block may be infinite or NaN.
        """
        if first is None:
            block_of, offset_of = self._positions(longest)
            rows = tables.index_select(1, block_of).to(torch.int64).mul_(self._rows_per_block).add_(offset_of)
        else:
            within = torch.arange(longest, device=first.device)
            positions = first[:, None].long() + torch.where(within < lengths[:, None], within, 0)
            blocks = tables.gather(1, positions // self.block_size).to(torch.int64)
            rows = blocks.mul_(self._rows_per_block).add_(positions % self.block_size)
        if ragged and first is None:
            inside = torch.arange(longest, device=rows.device) < lengths[:, None]
            rows = torch.where(inside, rows, rows[:, :1])
        return rows.flatten() + self._plane_starts

    def buffer(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [tokens, kv_heads * D] for gathered rows or in the rows' dtype; all buffers share memory."""
        numbers = tokens * self.rows.shape[1]
        if len(self._buffers[dtype]) < numbers:
            self._buffers[dtype] = torch.empty(numbers, dtype=dtype, device=self.rows.device)
        return self._buffers[dtype][:numbers].view(tokens, -1)

    def _positions(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block table's entry and the offset in the block for each position below `longest`."""
        if self._block_of.shape[0] < longest:
            positions = torch.arange(1 << (longest - 1).bit_length(), device=self.rows.device)
            self._block_of, self._offset_of = positions // self.block_size, positions % self.block_size
        return self._block_of[:longest], self._offset_of[:longest]


class SlotWriter:
    """Writer of a step's K and V to its slots [T], see `Paging`."""

    def __init__(self, slots: torch.Tensor, paged: PagedRows) -> None:
        self._target = paged.rows
        self._tokens = None
        if bool((slots < 0).any()):
            self._tokens = (slots >= 0).nonzero().flatten()
            slots = slots[self._tokens]
        self._rows = paged.of_slots(slots).unbind()

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v [T, kv_heads, D], codes as bytes. layer: its index in the part."""
        if self._tokens is not None:
            k, v = k[self._tokens], v[self._tokens]
        self._target.index_copy_(0, self._rows[2 * layer], k.flatten(1))
        self._target.index_copy_(0, self._rows[2 * layer + 1], v.flatten(1))


class ContextReader:
    """Reader of the visible contexts of n sequences as dense K and V, padded to the longest.

    tables: [n, B] block tables. It gathers lengths [n] tokens of each sequence from position first [n] on (None: from
    0); both are on the device. `longest` and `ragged` (not all equal) come from lengths on the host.
    """

    def __init__(
        self,
        paged: PagedRows,
        tables: torch.Tensor,
        first: torch.Tensor | None,
        lengths: torch.Tensor,
        longest: int,
        ragged: bool,
    ) -> None:
        count = tables.shape[0]
        rows = paged.of_contexts(tables, first, lengths, longest, ragged)
        self._source, self._widen = paged.rows, paged.widen
        self._rows = rows.view(paged.layers, 2 * count * longest).unbind()
        self._gathered = paged.buffer(2 * count * longest, paged.rows.dtype)
        self._wide = paged.buffer(2 * count * longest, paged.dtype)
        dense = self._wide.view(2, count, longest, paged.kv_heads, paged.head_dim).transpose(2, 3)
        self._keys, self._values = dense.unbind()

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the part's layer, [n, kv_heads, longest, D] each; valid until the part is read again."""
        torch.index_select(self._source, 0, self._rows[layer], out=self._gathered)
        if self._widen is not None:
            self._widen(self._gathered, self._wide)
        return self._keys, self._values
