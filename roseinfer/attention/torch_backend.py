"""Attention in plain PyTorch: the reference for tests of other backends, and the CPU's own backend.

`begin` computes once a step what all layers share: the rows of the store to write and to gather, the masks, and the
batch's pieces. One call of `Softmax.attend` (or a few) handles a piece.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, Protocol

import torch

from roseinfer.attention.batch import ForwardBatch, Paging
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_fp8 import narrow
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.paging import ContextReader, PagedRows, SlotWriter
from roseinfer.attention.softmax import Softmax
from roseinfer.attention.spec import AttentionSpec, unsupported
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.quant.cpu_matmul import SingleThread

# Decoding rows are attended together if their contexts share a power of two, starting at so many tokens. So no longer
# row is padded to more than twice its length.
_MIN_GROUP_TOKENS = 64
# The most bytes of K, and as many of V, that one piece gathers, except for a single row. They are read immediately and
# should still be in the cache. Measured on a CPU, where 64 MiB took twice the time of 4 MiB.
GATHER_BYTES = 4 << 20
# Up to so many bytes of K and V together, one CPU thread gathers and attends alone: tens of microseconds.
_ALONE_BYTES = 1 << 20
# Queries of a prompt chunk that attend at once. This bounds the mask; keys past the last query are left out.
_SLICE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class _Row:
    """Row `index` of the batch: `count` queries from packed token `start` on; the last one ends the context.

    Its queries see the keys from position `first` to `context`. Keys before `first` are not read.
    """

    index: int
    start: int
    count: int
    context: int
    first: int

    @property
    def seen(self) -> int:
        """Number of keys that the row reads."""
        return self.context - self.first


def unsupported_reason(specs: Sequence[AttentionSpec]) -> str | None:
    """Return what this backend lacks for these layers, as the end of a sentence; None if nothing."""
    return unsupported(specs)


class _Piece(Protocol):
    """Part of a batch. `tokens` selects its packed tokens, in the batch's order."""

    tokens: slice | torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        """Return the attention [t, heads, D] of the piece.

        layer: its index in its part of the store. q: the piece's own queries [t, heads, D]; k, v: the whole step's.
        """
        ...


class _Visible(NamedTuple):
    """Keys that a layer's queries see: `AttentionSpec.window` and `AttentionSpec.skips_first`."""

    window: int | None
    skips_first: bool

    @classmethod
    def of(cls, spec: AttentionSpec) -> "_Visible":
        return cls(spec.window, spec.skips_first)

    def first(self, position: int) -> int:
        """Return the position of the first key that the query at `position` sees."""
        first = 0 if self.window is None else max(0, position + 1 - self.window)
        return max(first, 1) if self.skips_first and position else first


class _Kind(NamedTuple):
    """Part of the store, KV group and visible keys: layers that agree in these share the work of `begin`."""

    part: int
    group: int
    visible: _Visible


class _Plan(NamedTuple):
    """Writing of a step's K and V for layers of one kind, and the pieces in which they attend."""

    writer: SlotWriter
    pieces: list[_Piece]


class TorchAttention:
    """`AttentionBackend` for any device, dtype, block size and grouping of heads."""

    def __init__(self, specs: Sequence[AttentionSpec], dtype: torch.dtype) -> None:
        """specs: of the model's layers. dtype: of queries."""
        self._specs = tuple(specs)
        self._dtype = dtype
        self._bands = {visible: _Band(visible, dtype) for visible in map(_Visible.of, specs)}
        self._store: KVStore | None = None
        self._paged: list[PagedRows] = []
        self._kinds: list[_Kind] = []
        self._plans: dict[_Kind, _Plan] = {}

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        if self._store is not store:
            self._store = store
            self._paged = [PagedRows(part, self._dtype) for part in store.parts]
            kinds = zip(store.places, store.group_of, self._specs, strict=True)
            self._kinds = [_Kind(place.part, group, _Visible.of(spec)) for place, group, spec in kinds]
        self._positions = batch.positions
        self._plans = {kind: self._plan(kind, batch) for kind in dict.fromkeys(self._kinds)}

    def _plan(self, kind: _Kind, batch: ForwardBatch) -> _Plan:
        paged, paging = self._paged[kind.part], batch.paging[kind.group]
        return _Plan(SlotWriter(paging.slots, paged), _split(batch, paging, paged, self._bands[kind.visible]))

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        q, k, v = heads.split(qkv, self._positions)
        return self.attend(layer, q, k, v, heads.kv_scales, heads.sinks).reshape(qkv.shape[0], -1)

    def write(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> None:
        assert self._store is not None, "begin comes before write"
        _, k, v = heads.split(qkv, self._positions)
        if self._store.dtype == CODES:
            self._write_codes(layer, k, v, heads.kv_scales)
        else:
            self._plans[self._kinds[layer]].writer.write(self._store.places[layer].plane, k, v)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_scales: KVScales | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write K and V [T, kv_heads, D], then attend with q [T, heads, D]; all may be strided views.

        kv_scales: of a store of codes, None for 1.0. sinks: [heads], for a layer that has them. Returns [T, heads, D],
        possibly a strided view.
        """
        assert self._store is not None, "begin comes before attend"
        spec = self._specs[layer]
        assert spec.sinks == (sinks is not None), "the layer's spec says whether it has sinks"
        softmax = Softmax(spec.scale, sinks)
        if self._store.dtype == CODES:
            return self._attend_codes(layer, q, k, v, kv_scales, softmax)
        self._plans[self._kinds[layer]].writer.write(self._store.places[layer].plane, k, v)
        return self._attend(layer, q, k, v, softmax)

    def _attend_codes(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scales: KVScales | None,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Attend over a store of codes. Scales are applied to queries and sums instead of gathered keys and values."""
        codes = self._write_codes(layer, k, v, scales)
        # A prompt must see its own tokens rounded, as later steps do.
        widen = self._paged[self._kinds[layer].part].widen
        assert widen is not None
        k, v = (widen(x, torch.empty(x.shape, dtype=self._dtype, device=x.device)) for x in codes)
        if scales is None:
            return self._attend(layer, q, k, v, softmax)
        group = self._specs[layer].group
        key, value = (scale.repeat_interleave(group)[:, None] for scale in scales)
        return (self._attend(layer, (q * key).to(q.dtype), k, v, softmax) * value).to(q.dtype)

    def _write_codes(self, layer: int, k: torch.Tensor, v: torch.Tensor, scales: KVScales | None) -> list[torch.Tensor]:
        assert self._store is not None
        kind, plane = self._kinds[layer], self._store.places[layer].plane
        codes = [narrow(x, scale) for x, scale in zip((k, v), scales or (None, None), strict=True)]
        self._plans[kind].writer.write(plane, *(x.view(torch.uint8) for x in codes))
        return codes

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        assert self._store is not None
        plane = self._store.places[layer].plane
        pieces = self._plans[self._kinds[layer]].pieces
        if len(pieces) == 1:
            return pieces[0].attend(plane, q, k, v, softmax)
        out = q.new_empty(q.shape)
        for piece in pieces:
            out[piece.tokens] = piece.attend(plane, q[piece.tokens], k, v, softmax)
        return out


def _split(batch: ForwardBatch, paging: Paging, paged: PagedRows, band: "_Band") -> list[_Piece]:
    """Split the batch into pieces, for layers of the band's kind."""
    rows = _rows(batch, band.visible)
    whole = [row for row in rows if row.count > 1 and row.context == row.count and not band.hides(row.count)]
    chunks = [row for row in rows if row.count > 1 and (row.context > row.count or band.hides(row.count))]
    if chunks:
        band.cover(max(row.context for row in chunks), paged.rows.device)
    return [
        *(_Decoding(batch, paging, group, paged, band.visible) for group in _decoding_groups(rows, paged)),
        *(_WholePrompts(group) for group in _prompt_groups(whole)),
        *(_Chunk(batch, paging, row, paged, band) for row in chunks),
    ]


class _Decoding:
    """Rows with one query each, padded to the largest number of visible keys and masked."""

    def __init__(
        self, batch: ForwardBatch, paging: Paging, rows: list[_Row], paged: PagedRows, visible: _Visible
    ) -> None:
        device = batch.context_len.device
        self.tokens = _selection([row.start for row in rows], device)
        selected = _selection([row.index for row in rows], device)
        ends, longest = batch.context_len[selected], max(row.seen for row in rows)
        ragged = any(row.seen < longest for row in rows)
        tables = _tables(paging, batch.table_rows[selected], max(row.context for row in rows), paged)
        # A row longer than the window sees a whole window, and no row sees more.
        first = (ends - longest).clamp_(min=0) if any(row.first for row in rows) else None
        if first is not None and visible.skips_first:
            first = torch.maximum(first, (ends > 1).to(first.dtype))
        lengths = ends if first is None else ends - first
        self._reader = ContextReader(paged, tables, first, lengths, longest, ragged)
        gathered = 2 * len(rows) * longest * paged.rows.shape[1] * paged.dtype.itemsize
        self._threads = SingleThread() if device.type == "cpu" and gathered <= _ALONE_BYTES else nullcontext()
        self._mask = None
        if ragged:
            hidden = torch.arange(longest, device=device) >= lengths[:, None]
            mask = torch.zeros(hidden.shape, dtype=paged.dtype, device=device)
            self._mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        rows, heads, dim = q.shape
        with self._threads:
            keys, values = self._reader.read(layer)
            # Query heads that share a KV head are passed as several queries, so that K and V need not be repeated.
            grouped = q.view(rows, keys.shape[1], -1, dim)
            out = softmax.attend(grouped, keys, values, self._mask)
        return out.reshape(rows, heads, dim)


class _WholePrompts:
    """Neighbouring rows of equal length without a prefix: K and V are the step's own, nothing is gathered."""

    def __init__(self, rows: list[_Row]) -> None:
        self._split = (len(rows), rows[0].count)
        self.tokens: slice | torch.Tensor = slice(rows[0].start, rows[-1].start + rows[-1].count)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        keys, values = self._batched(k[self.tokens]), self._batched(v[self.tokens])
        out = softmax.attend(self._batched(q), keys, values, causal=True)
        return out.transpose(1, 2).reshape(q.shape)

    def _batched(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(0, self._split).transpose(1, 2)


class _Chunk:
    """One row of several queries with a prefix, or longer than the window; attended a slice of queries at a time."""

    def __init__(self, batch: ForwardBatch, paging: Paging, row: _Row, paged: PagedRows, band: "_Band") -> None:
        self.tokens: slice | torch.Tensor = slice(row.start, row.start + row.count)
        self._position = row.context - row.count
        self._first = row.first
        self._band = band
        one = slice(row.index, row.index + 1)
        ends, tables = batch.context_len[one], _tables(paging, batch.table_rows[one], row.context, paged)
        first = ends - row.seen if row.first else None
        lengths = ends if first is None else ends - first
        self._reader = ContextReader(paged, tables, first, lengths, row.seen, ragged=False)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax: Softmax) -> torch.Tensor:
        keys, values = self._reader.read(layer)
        queries = q.transpose(0, 1)[None]
        out = q.new_empty(q.shape)
        for first in range(0, q.shape[0], _SLICE_TOKENS):
            last = min(first + _SLICE_TOKENS, q.shape[0])
            position = self._position + first
            mask = self._band.mask(position, last - first)
            end = self._position + last - self._first
            visible = slice(end - mask.shape[1], end)
            attended = softmax.attend(queries[:, :, first:last], keys[:, :, visible], values[:, :, visible], mask)
            out[first:last] = attended[0].transpose(0, 1)
        return out


class _Band:
    """Causal masks for any offset, for layers of one kind, as parts of one matrix that is cached between steps.

    Row i of the matrix is a query, column `edge` + j the key j positions after the first query.
    """

    def __init__(self, visible: _Visible, dtype: torch.dtype) -> None:
        self.visible = visible
        self._dtype = dtype
        self._matrix: torch.Tensor | None = None
        self._edge = 0

    def hides(self, context: int) -> bool:
        """Return True if some query of a whole prompt of `context` tokens does not see all keys before it."""
        return self.visible.first(context - 1) > 0

    def cover(self, context: int, device: torch.device) -> None:
        """Prepare masks on this device for contexts of up to `context` tokens."""
        window = self.visible.window
        needed = context if window is None else min(context, window)
        if self._matrix is not None and needed <= self._edge:
            return
        self._edge = 1 << (needed - 1).bit_length()
        shape = (_SLICE_TOKENS, self._edge + _SLICE_TOKENS)
        full = torch.full(shape, float("-inf"), dtype=self._dtype, device=device)
        self._matrix = full.triu(self._edge + 1)
        if window is not None:
            self._matrix += full.tril_(self._edge - window)

    def mask(self, position: int, queries: int) -> torch.Tensor:
        """Return the mask [queries, keys]: query i, at `position` + i, sees its visible keys up to its own position.

        The last key is the last query's own, the first one the first key that the first query sees.
        """
        before = position - self.visible.first(position)
        assert self._matrix is not None and before <= self._edge
        part = self._matrix[:queries, self._edge - before : self._edge + queries]
        if self.visible.skips_first and not position:
            part = part.clone()
            part[1:, 0] = float("-inf")
        # CUDA's kernels read masks in aligned vectors, and a part may begin at any offset.
        return part.clone() if part.is_cuda else part


def _rows(batch: ForwardBatch, visible: _Visible) -> list[_Row]:
    counts, contexts = batch.query_lens, batch.context_lens
    starts = accumulate(counts, initial=0)
    if visible == (None, False):
        firsts = [0] * len(counts)
    else:
        firsts = [visible.first(context - count) for count, context in zip(counts, contexts, strict=True)]
    return [_Row(*row) for row in zip(range(len(counts)), starts, counts, contexts, firsts, strict=False)]


def _tables(paging: Paging, table_rows: torch.Tensor, longest: int, paged: PagedRows) -> torch.Tensor:
    """Return the block tables [n, B] of some rows, as wide as their longest context needs."""
    width = -(-longest // paged.block_size)
    return paging.tables[:, :width].index_select(0, table_rows)


def _decoding_groups(rows: list[_Row], paged: PagedRows) -> list[list[_Row]]:
    """Group rows of one query by the power of two of their visible keys; split groups that would gather too much."""
    token_bytes = paged.rows.shape[1] * paged.dtype.itemsize
    by_size: dict[int, list[_Row]] = {}
    for row in rows:
        if row.count == 1:
            by_size.setdefault((max(row.seen, _MIN_GROUP_TOKENS) - 1).bit_length(), []).append(row)
    groups = []
    for size, members in by_size.items():
        most = max(1, GATHER_BYTES // (token_bytes << size))
        groups += [members[i : i + most] for i in range(0, len(members), most)]
    return groups


def _prompt_groups(rows: list[_Row]) -> list[list[_Row]]:
    """Group neighbours of equal length, adjacent in the batch, among whole prompts."""
    runs = groupby(enumerate(rows), key=lambda place: (place[1].count, place[1].index - place[0]))
    return [[row for _, row in run] for _, run in runs]


def _selection(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """Return an index for ascending `indices`: a slice, which copies nothing, if there are no gaps."""
    if indices[-1] - indices[0] == len(indices) - 1:
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices, dtype=torch.int64, device=device)
