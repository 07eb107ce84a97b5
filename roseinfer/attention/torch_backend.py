"""Attention in plain PyTorch: the reference that other backends are tested against, and the CPU's own.

What all layers share is worked out once a step in `begin`: the rows of the store to write and to gather, the masks,
and how the batch splits into pieces, each of which one call of scaled_dot_product_attention (or a few) can take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.paging import ContextReader, PagedRows, SlotWriter
from roseinfer.attention.spec import AttentionSpec, unsupported

# Decoding rows are attended together when their contexts share a power of two, counted from this many tokens on, so
# that no longer row is padded to more than twice its length.
_SHORT_CONTEXT = 64
# Bytes of K, and as many of V, that one piece gathers at most (but for a single row): what is gathered is read at
# once and should still be in the cache. Measured on a CPU, where 64 MiB took twice the time of 4 MiB.
_GATHER_BYTES = 4 << 20
# Queries of a prompt chunk that attend at once. It bounds the mask, and keys past its last query are left out.
_SLICE = 256


@dataclass(frozen=True, slots=True)
class _Row:
    """Row `index` of the batch: `count` queries from packed token `start` on, seeing `context` tokens at the end."""

    index: int
    start: int
    count: int
    context: int


def why_not(specs: Sequence[AttentionSpec]) -> str | None:
    """What of these layers this backend cannot compute, as the end of a sentence; None if nothing."""
    return unsupported(specs, windows=False)


class _Piece(Protocol):
    """Part of a batch. `tokens` selects its packed tokens, in the batch's order."""

    tokens: slice | torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q: the piece's own queries [t, heads, D]; k, v: those of the whole step. Returns [t, heads, D]."""
        ...


class TorchAttention:
    """`AttentionBackend` for any device, dtype, block size and grouping of heads. specs: of the model's layers."""

    def __init__(self, specs: Sequence[AttentionSpec]) -> None:
        self._band = _Band()
        self._pieces: list[_Piece] = []
        self._paged: PagedRows | None = None

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        if self._paged is None or self._paged.store is not store:
            self._paged = PagedRows(store)
        paged = self._paged
        self._positions = batch.positions
        self._writer = SlotWriter(batch, paged)
        rows = _rows(batch)
        chunks = [row for row in rows if row.count > 1 and row.context > row.count]
        if chunks:
            self._band.cover(max(row.context for row in chunks), store.data)
        self._pieces = [
            *(_Decoding(batch, group, paged) for group in _decoding_groups(rows, paged)),
            *(_WholePrompts(group) for group in _prompt_groups(rows)),
            *(_Chunk(batch, row, paged, self._band) for row in chunks),
        ]

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        return self.attend(layer, *heads.split(qkv, self._positions)).reshape(qkv.shape[0], -1)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Write K and V [T, kv_heads, D], then attend with q [T, heads, D]; all may be strided views.

        Returns [T, heads, D], which may be a strided view too.
        """
        self._writer.write(layer, k, v)
        if len(self._pieces) == 1:
            return self._pieces[0].attend(layer, q, k, v)
        out = q.new_empty(q.shape)
        for piece in self._pieces:
            out[piece.tokens] = piece.attend(layer, q[piece.tokens], k, v)
        return out


class _Decoding:
    """Rows with one query each, padded to the longest context and masked."""

    def __init__(self, batch: ForwardBatch, rows: list[_Row], paged: PagedRows) -> None:
        device = batch.context_len.device
        self.tokens = _selection([row.start for row in rows], device)
        selected = _selection([row.index for row in rows], device)
        lengths, longest = batch.context_len[selected], max(row.context for row in rows)
        ragged = any(row.context < longest for row in rows)
        tables = _tables(batch, selected, longest, paged)
        self._reader = ContextReader(paged, tables, lengths, longest, ragged)
        self._mask = None
        if ragged:
            hidden = torch.arange(longest, device=device) >= lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=paged.rows.dtype, device=device)
            self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._reader.read(layer)
        rows, heads, dim = q.shape
        # The query heads that share a KV head stand in for several queries, so K and V need no repeating.
        grouped = q.view(rows, keys.shape[1], -1, dim)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return out.reshape(rows, heads, dim)


class _WholePrompts:
    """Neighbouring rows of equal length without a prefix: K and V are the step's own, nothing is gathered."""

    def __init__(self, rows: list[_Row]) -> None:
        self._split = (len(rows), rows[0].count)
        self.tokens: slice | torch.Tensor = slice(rows[0].start, rows[-1].start + rows[-1].count)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._batched(k[self.tokens]), self._batched(v[self.tokens])
        grouped = q.shape[1] != k.shape[1]
        out = scaled_dot_product_attention(self._batched(q), keys, values, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).reshape(q.shape)

    def _batched(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, self._split).transpose(1, 2)


class _Chunk:
    """One row of several queries behind a prefix, a slice of the queries at a time."""

    def __init__(self, batch: ForwardBatch, row: _Row, paged: PagedRows, band: "_Band") -> None:
        self.tokens: slice | torch.Tensor = slice(row.start, row.start + row.count)
        self._prefix = row.context - row.count
        self._band = band
        one = slice(row.index, row.index + 1)
        lengths, tables = batch.context_len[one], _tables(batch, one, row.context, paged)
        self._reader = ContextReader(paged, tables, lengths, row.context, ragged=False)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self._reader.read(layer)
        queries = q.transpose(0, 1)[None]
        grouped = q.shape[1] != k.shape[1]
        out = q.new_empty(q.shape)
        for first in range(0, q.shape[0], _SLICE):
            last = min(first + _SLICE, q.shape[0])
            visible = self._prefix + last
            attended = scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, :visible],
                values[:, :, :visible],
                attn_mask=self._band.mask(self._prefix + first, last - first),
                enable_gqa=grouped,
            )
            out[first:last] = attended[0].transpose(0, 1)
        return out


class _Band:
    """Causal masks for any offset, as windows of one matrix that is kept between steps."""

    def __init__(self) -> None:
        self._matrix: torch.Tensor | None = None
        self._edge = 0

    def cover(self, context: int, like: torch.Tensor) -> None:
        """Make contexts of up to `context` tokens possible, with masks in the dtype and on the device of `like`."""
        if self._matrix is not None and context <= self._edge and self._matrix.dtype == like.dtype:
            return
        self._edge = 1 << (context - 1).bit_length()
        shape = (_SLICE, self._edge + _SLICE)
        full = torch.full(shape, float("-inf"), dtype=like.dtype, device=like.device)
        self._matrix = full.triu_(self._edge + 1)

    def mask(self, position: int, queries: int) -> torch.Tensor:
        """[queries, position + queries]: query i, at `position` + i, sees the keys up to its own position."""
        assert self._matrix is not None and position + queries <= self._edge
        window = self._matrix[:queries, self._edge - position : self._edge + queries]
        # CUDA's kernels read masks in aligned vectors, and a window begins anywhere.
        return window.clone() if window.is_cuda else window


def _rows(batch: ForwardBatch) -> list[_Row]:
    counts, contexts = batch.query_lens, batch.context_lens
    starts = accumulate(counts, initial=0)
    return [_Row(*row) for row in zip(range(len(counts)), starts, counts, contexts, strict=False)]


def _tables(batch: ForwardBatch, rows: slice | torch.Tensor, longest: int, paged: PagedRows) -> torch.Tensor:
    """Block tables [n, B] of some rows, as wide as the longest of their contexts needs."""
    width = -(-longest // paged.store.block_size)
    return batch.tables[:, :width].index_select(0, batch.table_rows[rows])


def _decoding_groups(rows: list[_Row], paged: PagedRows) -> list[list[_Row]]:
    """Rows of one query by the power of two of their context, split where a group would gather too much."""
    token_bytes = paged.rows.shape[1] * paged.rows.itemsize
    by_size: dict[int, list[_Row]] = {}
    for row in rows:
        if row.count == 1:
            by_size.setdefault((max(row.context, _SHORT_CONTEXT) - 1).bit_length(), []).append(row)
    groups = []
    for size, members in by_size.items():
        most = max(1, _GATHER_BYTES // (token_bytes << size))
        groups += [members[i : i + most] for i in range(0, len(members), most)]
    return groups


def _prompt_groups(rows: list[_Row]) -> list[list[_Row]]:
    """Neighbours of equal length among the rows of several queries that start at position 0."""
    runs = groupby(rows, key=lambda row: (row.count, row.context))
    return [list(run) for (count, context), run in runs if count > 1 and count == context]


def _selection(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """An index for `indices`, which ascend: a slice, which copies nothing, if there are no gaps."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, dtype=torch.int64, device=device)
