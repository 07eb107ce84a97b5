"""Attention by this project's own kernels: one for decoding rows, one for prompt chunks."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from roseinfer.attention.base import CHUNK_FIELD_COUNT, AttentionShape, ShortRows
from roseinfer.attention.batch import ForwardBatch, Paging
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec, unsupported
from roseinfer.attention.store_qkv import store_qkv
from roseinfer.core.support import FP8_KV
from roseinfer.kernels.attention.decode import DecodeWorkspace, decode_attention, plan_decode
from roseinfer.kernels.attention.decode_config import choose_decode_config
from roseinfer.kernels.attention.decode_few import (
    MAX_QUERIES,
    MAX_TOKENS,
    FewWorkspace,
    decode_few,
    few_pays,
    most_rows,
    verify_few,
)
from roseinfer.kernels.attention.prefill import (
    MAX_SMALL_STEP_TOKENS,
    PrefillConfig,
    choose_prefill_config,
    prefill_attention,
    queries_per_block,
)
from roseinfer.kernels.attention.prefill_bulk import BLOCK_M, BulkPages, bulk_supports, prefill_bulk
from roseinfer.kernels.attention.prefill_shares import (
    IN_BULK,
    PARTS,
    Division,
    PrefillWorkspace,
    map_blocks,
    merge_parts,
)
from roseinfer.kernels.attention.wide_contexts import WideContexts, widen_contexts
from roseinfer.kernels.common.availability import multiprocessors
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.kernels.common.side_stream import SideStream

# A captured step's map of chunks has room for full blocks of its tokens, and for so many chunks that end a block early,
# if the step is not crowded. More room would cost every replay: skipping 256 empty entries takes a multiprocessor 6 us.
_MAX_SHORT_CHUNKS = 32
# It also has room for so many undivided chunks besides as many parts as fit the workspace.
_MAX_UNDIVIDED_CHUNKS = 8
# Queries times keys of a head from which `in_bulk` pays: a prompt of 2,000 tokens, or 1,000 after 2,000.
_MIN_BULK_PAIRS = 2_000_000
# Share of the multiprocessors for decodes beside the chunks of a large step, which run as two programs for each
# multiprocessor. H200, heads as in Qwen3-8B, 230 decodes of 1,090 tokens beside 1,818 tokens of two prompts: 298 us a
# layer with all multiprocessors, 287 with 116 of 132. In smaller steps, and with K and V in FP8, all are faster.
_DECODE_SHARE = 0.88
# Tokens of K and V in FP8 that are widened at once: 128 MiB with heads as in Qwen3-8B. Longer contexts are widened in
# registers, for one block of queries after another.
_WIDE_TOKENS = 32_768
# The largest head_dim that the kernels' tiles are laid out for.
_MAX_HEAD_DIM = 256


def unsupported_reason(specs: Sequence[AttentionSpec], device: torch.device, kv_dtype: torch.dtype) -> str | None:
    """Return what the kernels lack for these layers, as the end of a sentence; None if nothing.

    kv_dtype: dtype of K and V in the store.
    """
    found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if kv_dtype == CODES and found is not None and not FP8_KV.runs_on(found):
        return f"K and V in FP8 need a GPU of compute capability 8.9 or newer, and this one's is {found[0]}.{found[1]}"
    if len({replace(spec, window=None, skips_first=False) for spec in specs}) > 1:
        return "its map of prompt chunks serves all layers of a step, and the heads of the model's layers differ"
    return unsupported(specs, longest_head=_MAX_HEAD_DIM)


class TritonAttention:
    """`GraphableAttention` for CUDA GPUs. Layers may differ only in their windows and in `skips_first`.

    In a mixed step the kernel for chunks runs beside the one for decodes. (H200, heads as in Qwen3-8B: 60 decodes of
    100 to 900 tokens and 128 tokens of a prompt take 48 us a layer instead of 57.) Nothing waits for the device. A
    batch of decodes only, or one with its `chunk_map`, is read from the device alone, so a CUDA graph can capture it,
    `begin` included.
    """

    def __init__(self, shape: AttentionShape, *, bulk: bool | None = None) -> None:
        """bulk: use `prefill_bulk` for large steps; default: if it supports all layers on this GPU."""
        self._shape = shape
        self._spec = shape.specs[0]  # for what all layers share
        # All layers of one window share the division of a step's decodes into shares. Layers that skip the first key
        # attend in steps of decodes only.
        specs = {spec.window: spec for spec in shape.specs if not spec.skips_first}
        self._workspaces = {window: _workspace(spec, shape) for window, spec in specs.items()}
        skipping = {spec.window: spec for spec in shape.specs if spec.skips_first}
        self._skipping = {window: _workspace(spec, shape) for window, spec in skipping.items()}
        self._plans = self._workspaces
        one = torch.ones(self._spec.kv_heads, device=shape.device)
        self._ones = KVScales(one, one)  # so that one kernel serves layers with and without scales
        self._side = SideStream(shape.device)
        self._bulk = _copies_in_bulk(shape) if bulk is None else bulk
        self._wide = _wide_contexts(shape) if self._bulk and shape.kv_dtype == CODES else None
        self._beside = self._workspaces  # for decodes beside the chunks of large steps
        if self._bulk and self._wide is None:
            self._beside = {window: _workspace(spec, shape, _DECODE_SHARE) for window, spec in specs.items()}
        self._prefill_config = self._config_for(1)
        self._division, self._parts = _division(shape, self._prefill_config)
        self._few_workspace = _few_workspace(self._spec, shape)
        self._few = 0  # the most tokens of a row, in a step of few tokens and no longer row
        self._divides = False  # whether the step's map divides contexts
        self._block_map: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._batch: ForwardBatch | None = None
        self._store: KVStore | None = None
        self._group_of: tuple[int, ...] = ()
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []  # K and V of each layer of the store
        self._pages: list[BulkPages] = []  # the same for the copy engine
        self._takes_bulk = self._takes_tiles = False  # the kernels that the step's chunks need

    def map_chunks(
        self,
        tokens: int,
        first_row: int,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        room: int | None = None,
    ) -> np.ndarray:
        """Return the `chunk_map` entries [g, 4] int32 for the chunk rows of a step of `tokens` tokens, padding
        included.

        Chunk rows are `first_row` and following. See `map_blocks`.
        """
        division = self._division if self.may_divide(tokens) else None
        found = map_blocks(first_row, query_lens, context_lens, self._queries(tokens), division, room)
        if not self._bulk or tokens <= MAX_SMALL_STEP_TOKENS:
            return found
        if self._wide is not None:  # widening once is so much faster that chunks need not run beside decodes
            self._wide.place(found, first_row, context_lens)
        elif in_bulk(first_row, query_lens, context_lens):
            found[:, PARTS] = IN_BULK
        return found

    def max_chunks(self, tokens: int, rows: int, divided: bool = False, crowded: bool = False) -> int:
        """Return the number of entries in the `chunk_map` of a captured step. divided: if it divides contexts.

        A shorter map is padded with -1. Maps of up to 32 chunks always fit; crowded: those of any number of chunks do.
        """
        short = min(rows, tokens // 2 if crowded else _MAX_SHORT_CHUNKS)  # a chunk has at least two tokens
        blocks = tokens // self._queries(tokens) + short
        if not divided:
            return blocks
        return max(blocks, min(self._division.slots + _MAX_UNDIVIDED_CHUNKS, tokens + min(rows, tokens)))

    def may_divide(self, tokens: int) -> bool:
        return tokens <= MAX_SMALL_STEP_TOKENS and self._division.may_divide(self._shape.max_model_len)

    def is_divided(self, chunk_map: np.ndarray) -> bool:
        return len(chunk_map) > 0 and bool(chunk_map[0, PARTS] > 1)  # divided blocks come first

    def short_rows(self, tokens: int) -> ShortRows | None:
        if not 1 < tokens <= min(MAX_TOKENS, self._shape.max_tokens):
            return None
        rows = min(tokens, self._shape.max_rows, most_rows(self._spec.kv_heads))
        return ShortRows(rows, min(tokens, MAX_QUERIES))

    def begin(self, batch: ForwardBatch, store: KVStore) -> None:
        self._batch = batch
        if store is not self._store:
            self._store, self._group_of = store, store.group_of
            self._caches = [store.layer(i) for i in range(len(self._shape.specs))]
            if self._bulk:
                wide = self._wide
                self._pages = [BulkPages.of(*kv) if wide is None else wide.pages for kv in self._caches]
            self._load_kernels(batch)
        self._few = self._queries_of_few(batch)
        if not self._few:
            self._divide(batch)
            if self._skipping and batch.decode_len is None and batch.num_decodes == batch.num_rows:
                # Here, since layers' kernels rely on plans that are older than the step's first layer.
                for workspace in self._skipping.values():
                    plan_decode(batch.context_len, batch.num_rows, workspace)

    def _queries_of_few(self, batch: ForwardBatch) -> int:
        """Return the most queries of a row for the kernels of few tokens; 0 for the other kernels."""
        tokens, rows = batch.input_ids.shape[0], batch.num_rows
        if batch.decode_len is not None or batch.chunk_map is not None:
            return 0
        if batch.num_decodes == rows:
            return int(few_pays(rows, self._spec.kv_heads))
        limits = self.short_rows(tokens)
        fits = limits is not None and rows <= limits.rows and batch.max_query <= limits.tokens
        return batch.max_query if fits else 0

    def _divide(self, batch: ForwardBatch) -> None:
        """Divide a step's chunks and decodes among programs, for all layers."""
        tokens, decodes = batch.input_ids.shape[0], batch.num_decodes
        self._prefill_config = self._config_for(tokens)
        self._lengths = batch.context_len if batch.decode_len is None else batch.decode_len
        self._block_map = batch.chunk_map
        small = tokens <= MAX_SMALL_STEP_TOKENS
        self._divides = batch.divided
        kinds = {True, False}  # a captured step learns it from the map, when it is replayed
        if self._block_map is None and decodes < len(batch.query_lens):
            blocks = self.map_chunks(tokens, decodes, batch.query_lens[decodes:], batch.context_lens[decodes:])
            self._divides = self.is_divided(blocks)
            kinds = {bool(blocks[0, PARTS] == IN_BULK)}
            self._block_map = _upload(blocks, batch.context_len.device)
        self._takes_bulk = self._bulk and not small and True in kinds
        self._takes_tiles = not self._bulk or small or False in kinds
        self._plans = self._workspaces if self._block_map is None or small else self._beside
        if decodes:
            for workspace in self._plans.values():
                plan_decode(self._lengths, decodes, workspace)

    def forward(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> torch.Tensor:
        batch, spec = self._batch, heads.spec
        assert batch is not None, "begin comes before forward"
        kv, paging = self._caches[layer], batch.paging[self._group_of[layer]]
        scales = (heads.kv_scales or self._ones) if self._shape.kv_dtype == CODES else None
        if self._few:
            return self._attend_few(qkv, heads, kv, paging, scales)
        store_qkv(qkv, heads, kv, paging.slots, batch.positions, scales)
        q = qkv.view(qkv.shape[0], -1, spec.head_dim)[:, : spec.heads]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if spec.skips_first:
            self._attend_but_first(q, kv, paging, out, spec, scales, heads.sinks)
        else:
            self._attend(layer, q, paging, out, spec, scales, heads.sinks)
        return out.view(q.shape[0], -1)

    def write(self, layer: int, qkv: torch.Tensor, heads: HeadTransform) -> None:
        batch = self._batch
        assert batch is not None, "begin comes before write"
        scales = (heads.kv_scales or self._ones) if self._shape.kv_dtype == CODES else None
        slots = batch.paging[self._group_of[layer]].slots
        store_qkv(qkv, heads, self._caches[layer], slots, batch.positions, scales)

    def _attend_but_first(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        paging: Paging,
        out: torch.Tensor,
        spec: AttentionSpec,
        scales: KVScales | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attend in a step of decodes; see `AttentionSpec.skips_first`."""
        batch, workspace = self._batch, self._skipping[spec.window]
        assert batch is not None and batch.num_decodes == batch.num_rows, "there are no chunks"
        where = (paging.tables, batch.table_rows, batch.context_len)
        decode_attention(q, *kv, *where, out, spec.scale, workspace, scales, sinks)

    def _attend_few(
        self,
        qkv: torch.Tensor,
        heads: HeadTransform,
        kv: tuple[torch.Tensor, torch.Tensor],
        paging: Paging,
        scales: KVScales | None,
    ) -> torch.Tensor:
        batch, spec = self._batch, heads.spec
        assert batch is not None
        out = torch.empty((qkv.shape[0], spec.heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        where, prepared, window = (*kv, paging.tables, batch.table_rows), heads.preparation, spec.window or 0
        lengths, slots, work = batch.context_len, paging.slots, self._few_workspace
        scale, sinks = spec.scale, heads.sinks
        if self._few == 1:
            skips = spec.skips_first
            decode_few(
                qkv, *where, lengths, slots, prepared, out, scale, work, window, scales, sinks, skips_first=skips
            )
        else:
            assert not spec.skips_first, "rows have one token"
            starts = batch.query_start
            verify_few(qkv, *where, starts, lengths, slots, prepared, out, scale, work, window, scales, sinks)
        return out.view(qkv.shape[0], -1)

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        paging: Paging,
        out: torch.Tensor,
        spec: AttentionSpec,
        scales: KVScales | None,
        sinks: torch.Tensor | None,
    ) -> None:
        batch, decode_lens, blocks = self._batch, self._lengths, self._block_map
        assert batch is not None and decode_lens is not None
        where, scale = (paging.tables, batch.table_rows), spec.scale
        mixed = bool(batch.num_decodes) and blocks is not None
        if mixed:
            self._side.follow()
        with self._side.launch() if mixed else nullcontext():
            if blocks is not None:
                rows = (*where, batch.query_start, batch.context_len)
                self._attend_chunks(layer, q, rows, out, blocks, spec, scales, sinks)
        if batch.num_decodes:
            workspace = self._plans[spec.window]
            decode_attention(q, *self._caches[layer], *where, decode_lens, out, scale, workspace, scales, sinks)
        if mixed:
            self._side.join()

    def _attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        blocks: torch.Tensor,
        spec: AttentionSpec,
        scales: KVScales | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """rows: block tables, their seats, where queries begin and lengths of contexts, as the kernels take them."""
        if self._takes_bulk:
            self._attend_in_bulk(layer, q, rows, out, blocks, spec, scales, sinks)
        if not self._takes_tiles:
            return
        config, window = self._prefill_config, spec.window or 0
        parts = self._parts if self._divides else None
        prefill_attention(
            q, *self._caches[layer], *rows, out, blocks, spec.scale, config, window, parts, scales, sinks=sinks
        )
        if self._divides:
            merge_parts(blocks, rows[2], self._parts, out)

    def _attend_in_bulk(
        self,
        layer: int,
        q: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        blocks: torch.Tensor,
        spec: AttentionSpec,
        scales: KVScales | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Attend like `_attend_chunks`, for blocks that the map gives to the copy engine."""
        block_size, wide = self._shape.block_size, self._wide
        if wide is not None:
            assert scales is not None
            widen_contexts(*self._caches[layer], scales, *rows, blocks, spec.group, wide)
            block_size = wide.page
        pages, in_order = self._pages[layer], wide is not None
        prefill_bulk(q, pages, *rows, out, blocks, spec.scale, block_size, sinks=sinks, in_order=in_order)

    def _config_for(self, tokens: int) -> PrefillConfig:
        spec, shape = self._spec, self._shape
        return choose_prefill_config(
            tokens, spec.group, spec.head_dim, shape.dtype, shape.kv_dtype == CODES, short=self._bulk
        )

    def _queries(self, tokens: int) -> int:
        return queries_per_block(self._config_for(tokens), self._spec.group)

    def _load_kernels(self, batch: ForwardBatch) -> None:
        """Launch every variant over no rows, so that nothing is compiled while serving."""
        spec, dtype, device = self._spec, self._shape.dtype, self._shape.device
        q = torch.empty((1, spec.heads + 2 * spec.kv_heads, spec.head_dim), dtype=dtype, device=device)[:, : spec.heads]
        out = torch.empty((1, spec.heads, spec.head_dim), dtype=dtype, device=device)
        nothing = torch.full((1, CHUNK_FIELD_COUNT), -1, dtype=torch.int32, device=device)
        cache = (*self._caches[0], batch.paging[self._group_of[0]].tables, batch.table_rows)
        scales = self._ones if self._shape.kv_dtype == CODES else None
        sinks = torch.zeros(spec.heads, device=device) if spec.sinks else None
        small = MAX_SMALL_STEP_TOKENS
        for workspace in self._workspaces.values():
            forms: list[tuple[int, PrefillWorkspace | None]] = [(small, None), (small + 1, None)]
            if self.may_divide(small):
                forms.append((small, self._parts))
                merge_parts(nothing, batch.query_start, self._parts, out)
            for tokens, parts in forms:
                starts, lengths, config = batch.query_start, batch.context_len, self._config_for(tokens)
                window = workspace.window
                prefill_attention(q, *cache, starts, lengths, out, nothing, 1.0, config, window, parts, scales, sinks)
            if self._bulk:
                rows = (*cache[2:], batch.query_start, batch.context_len)
                self._attend_in_bulk(0, q, rows, out, nothing, spec, scales, sinks)
        for workspace in (*self._workspaces.values(), *self._skipping.values()):
            plan_decode(batch.context_len, 0, workspace)
            decode_attention(q, *cache, batch.context_len, out, 1.0, workspace, scales, sinks)


def in_bulk(decodes: int, query_lens: Sequence[int], context_lens: Sequence[int]) -> bool:
    """Return True if `prefill_bulk` should compute a large step's chunks beside so many decodes.

    It is faster than `prefill_attention`, but leaves no room for another kernel. Running `prefill_attention` beside the
    decodes saves some 10 us a layer.
    """
    pairs = sum(count * (context - count // 2) for count, context in zip(query_lens, context_lens, strict=True))
    return not decodes or pairs > _MIN_BULK_PAIRS


def _copies_in_bulk(shape: AttentionShape) -> bool:
    """Return True if `prefill_bulk` supports all layers, and the map of blocks that `prefill_attention` takes."""
    if any(spec.window is not None for spec in shape.specs):
        return False
    spec = shape.specs[0]
    sizes = (spec.heads, spec.kv_heads, spec.head_dim, shape.block_size)
    tiles = choose_prefill_config(MAX_SMALL_STEP_TOKENS + 1, spec.group, spec.head_dim, shape.dtype).block_m
    return tiles == BLOCK_M and bulk_supports(*sizes, shape.dtype, shape.device)


def _wide_contexts(shape: AttentionShape) -> WideContexts:
    spec = shape.specs[0]
    tokens = min(_WIDE_TOKENS, shape.max_rows * shape.max_model_len)
    return WideContexts.allocate(tokens, spec.kv_heads, spec.head_dim, shape.dtype, shape.device)


def _division(shape: AttentionShape, config: PrefillConfig) -> tuple[Division, PrefillWorkspace]:
    """Return how contexts are divided in steps of small tiles, and the workspace for their parts."""
    spec = shape.specs[0]
    # Layers with windows have fewer tiles than the plan counts, at little cost.
    window = 0 if None in {spec.window for spec in shape.specs} else max(spec.window or 0 for spec in shape.specs)
    division = Division.of(_processors(shape.device), spec.kv_heads, config.block_n, window)
    parts = PrefillWorkspace.allocate(division.slots, spec.kv_heads, config.block_m, spec.head_dim, shape.device)
    return division, parts


def _few_workspace(spec: AttentionSpec, shape: AttentionShape) -> FewWorkspace:
    return FewWorkspace.allocate(spec.heads, spec.kv_heads, spec.head_dim, _processors(shape.device), shape.device)


def _workspace(spec: AttentionSpec, shape: AttentionShape, share: float = 1.0) -> DecodeWorkspace:
    """Allocate a workspace. share: part of the multiprocessors that decodes get."""
    config = choose_decode_config(spec.group, spec.head_dim, shape.dtype, shape.kv_dtype == CODES)
    processors = max(1, round(share * _processors(shape.device)))
    return DecodeWorkspace.allocate(
        config,
        shape.max_rows,
        spec.heads,
        spec.kv_heads,
        spec.head_dim,
        processors,
        shape.device,
        spec.window or 0,
        spec.skips_first,
    )


def _processors(device: torch.device) -> int:
    return multiprocessors(device) if device.type == "cuda" else 4  # under Triton's interpreter


def _upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy to a GPU through pinned memory, which its allocator keeps until the copy is done, so that nothing waits."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
