"""Attention of one query token a row over the paged KV cache: flash decoding (Dao et al., 2023) in equal shares.

All rows' contexts are cut into tiles of tokens and laid end to end. For each KV head they are divided into as many
equal shares as the GPU runs programs at once (Stream-K, Osama et al., 2023). Whatever the lengths, all programs finish
together, and the grid does not depend on the lengths, so that a CUDA graph can capture it. A row that crosses a border
of shares is merged by the program that finishes its last part.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.attention.decode_config import DecodeConfig
from roseinfer.kernels.attention.decode_forms import attend_elementwise, attend_matrix, attend_tokens
from roseinfer.kernels.attention.paged import (
    ENDLESS_TOKENS,
    LOG2_E,
    blocks_of,
    gathered,
    no_peak,
    padded_dim,
    softmax_reference,
    with_sinks,
)
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers for a plan and the parts of rows, allocated once so that captured graphs stay valid.

    work: [shares, 4] int32 = first row, its first tile, number of tiles, rows touched. spans: [max_rows, 2] int32 =
    slot of the row's first part, number of parts. sums: [2 * shares, heads, D] and peaks: [2 * shares, heads, 2]
    float32 hold the parts of rows, two slots a share: for its first row, and for its last. arrived: [max_rows,
    kv_heads] int32 counts the finished parts of a row; all zero between kernels. window: of the plan's layers, in
    tokens; 0 for full attention. skips_first: only a row of one token sees the first one.
    """

    config: DecodeConfig
    window: int
    skips_first: bool
    work: torch.Tensor
    spans: torch.Tensor
    sums: torch.Tensor
    peaks: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(
        cls,
        config: DecodeConfig,
        max_rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        processors: int,
        device: torch.device,
        window: int = 0,
        skips_first: bool = False,
    ) -> "DecodeWorkspace":
        """processors: multiprocessors of the GPU."""
        shares = max(1, processors * config.shares_per_processor // kv_heads)
        return cls(
            config,
            window,
            skips_first,
            work=torch.zeros((shares, 4), dtype=torch.int32, device=device),
            spans=torch.zeros((max_rows, 2), dtype=torch.int32, device=device),
            sums=torch.zeros((2 * shares, heads, head_dim), dtype=torch.float32, device=device),
            peaks=torch.zeros((2 * shares, heads, 2), dtype=torch.float32, device=device),
            arrived=torch.zeros((max_rows, kv_heads), dtype=torch.int32, device=device),
        )


def plan_decode(context_len: torch.Tensor, num_rows: int, workspace: DecodeWorkspace) -> None:
    """Divide the contexts of the first rows into shares, for all layers of a step with the workspace's window.

    context_len: [R] int32, of which `num_rows` are divided; those of 0 come last and are skipped. Tiles before a row's
    window are not part of the plan.
    """
    shares, max_rows = workspace.work.shape[0], workspace.spans.shape[0]
    _plan_kernel[(shares,)](
        context_len,
        workspace.work,
        workspace.spans,
        num_rows,
        SHARES=shares,
        TILE=workspace.config.tile,
        LEAST=workspace.config.least_tiles,
        WINDOW=workspace.window,
        ROWS=next_power_of_2(max_rows),
        num_warps=4,
    )


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write softmax(q K^T * scale) V over each row's first `context_len` tokens, for the rows of `plan_decode`.

    With a window in the workspace, only the last `window` of these tokens are read. See also its `skips_first`.

    q: [R, heads, D], a query a row, rows any distance apart. k_cache, v_cache: [num_blocks, block_size, kv_heads, D],
    dense except for the distance of blocks. tables: [S, max_blocks] int32; row r's is tables[table_rows[r]]. out: [R,
    heads, D]. kv_scales: factors of each KV head's codes (e4m3fn), [kv_heads] float32 each. sinks: [heads] float32, see
    `AttentionSpec.sinks`.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    config, group = workspace.config, heads // kv_heads
    assert (k_cache.dtype == CODES) == (kv_scales is not None)
    k_scales, v_scales = kv_scales or (None, None)
    _decode_kernel[(kv_heads, workspace.work.shape[0])](
        q,
        k_cache,
        v_cache,
        tables,
        table_rows,
        context_len,
        workspace.work,
        workspace.spans,
        workspace.sums,
        workspace.peaks,
        workspace.arrived,
        out,
        k_scales,
        v_scales,
        sinks,
        scale * LOG2_E,
        q.stride(0),
        k_cache.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        D_PAD=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        FORM=config.form,
        WINDOW=workspace.window or (ENDLESS_TOKENS if workspace.skips_first else 0),
        SKIPS_FIRST=workspace.skips_first,
        STAGES=config.num_stages,
        FP8=kv_scales is not None,
        SINKS=sinks is not None,
        COMPILED=q.is_cuda,
        num_warps=config.num_warps,
        **early_start.options(q.device),
    )


def decode_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    skips_first: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_attention` row by row in float32: [R, heads, D]."""
    k_scales, v_scales = kv_scales or (None, None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for row, (table_row, context) in enumerate(zip(table_rows.tolist(), context_len.tolist(), strict=True)):
        first = max(0, context - window) if window else 0
        first = max(first, min(1, context - 1)) if skips_first else first
        k = gathered(k_cache, tables[table_row], context, q.shape[1], k_scales)[first:]
        v = gathered(v_cache, tables[table_row], context, q.shape[1], v_scales)[first:]
        scores = torch.einsum("hd,khd->hk", q[row].float(), k) * scale
        out[row] = torch.einsum("hk,khd->hd", softmax_reference(scores, sinks), v)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _plan_kernel(
    context_len,
    work,
    spans,
    num_rows,
    SHARES: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write, in program i, share i's entry of `work`. All programs compute where rows begin and end, in tiles."""
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    context = tl.load(context_len + row, mask=is_row, other=0)
    tiles = tl.cdiv(context, TILE)
    if WINDOW > 0:
        tiles -= tl.maximum(context - WINDOW, 0) // TILE
    ends = tl.cumsum(tiles, 0)
    starts = ends - tiles
    total = tl.sum(tiles, 0)
    size = tl.maximum(tl.cdiv(total, SHARES), LEAST)
    share = tl.program_id(0)
    begin = tl.minimum(share * size, total)
    end = tl.minimum(begin + size, total)
    before = ends <= begin
    tl.store(work + 4 * share, tl.sum(before.to(tl.int32), 0))
    tl.store(work + 4 * share + 1, begin - tl.sum(tl.where(before, tiles, 0), 0))
    tl.store(work + 4 * share + 2, end - begin)
    tl.store(work + 4 * share + 3, tl.sum(((starts < end) & (ends > begin)).to(tl.int32), 0))
    if share == 0:
        first = starts // size
        # A row that begins within a share and continues in the next one is that share's last row.
        tl.store(spans + 2 * row, 2 * first + (starts > first * size).to(tl.int32), mask=is_row)
        tl.store(spans + 2 * row + 1, (ends - 1) // size - first + 1, mask=is_row)


@triton.jit
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    table_rows,
    context_len,
    work,
    spans,
    sums,
    peaks,
    arrived,
    out,
    k_scales,
    v_scales,
    sinks,
    scale,
    q_stride,
    block_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    FORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SKIPS_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend, in program (h, i), for KV head h over the tiles in share i, one row after another.

    A row's tiles are counted from the one in which its window begins.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    share = tl.program_id(1)
    k_head = k_cache + kv_head * D
    v_head = v_cache + kv_head * D
    # The plan, the step's inputs and the scales are older than the embedding, which no kernel overtakes.
    if FP8:
        scale *= tl.load(k_scales + kv_head)
        v_scale = tl.load(v_scales + kv_head)
    row = tl.load(work + 4 * share)
    tile = tl.load(work + 4 * share + 1)
    left = tl.load(work + 4 * share + 2)
    rows = tl.load(work + 4 * share + 3)
    context, table, block = _look_up(
        tables, table_rows, context_len, row, tile, rows > 0, table_stride, BLOCK_SIZE, TILE, WINDOW
    )
    if OVERLAP:
        token = (tile + _hidden(context, TILE, WINDOW)) * TILE + tl.arange(0, TILE)
        offset = block.to(tl.int64) * block_stride + token % BLOCK_SIZE * (KV_HEADS * D)
        _prefetch_tokens(k_head + offset, token < context, D)
        _prefetch_tokens(v_head + offset, token < context, D)
        tl.extra.cuda.gdc_wait()
    for i in range(rows):
        hidden = _hidden(context, TILE, WINDOW)
        seen_from = tl.maximum(context - WINDOW, 0) if WINDOW > 0 else 0
        if SKIPS_FIRST:
            seen_from = tl.maximum(seen_from, tl.minimum(1, context - 1))
        row_end = tl.cdiv(context, TILE) - hidden
        end = tl.minimum(tile + left, row_end)
        q_group = q + row.to(tl.int64) * q_stride + kv_head * GROUP * D
        if FORM == 0:
            peak, total, acc = attend_elementwise(
                q_group, k_head, v_head, table, block, hidden + tile, hidden + end, seen_from, context, scale,
                block_stride, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, STAGES,
            )  # fmt: skip
        elif FORM == 2:
            peak, total, acc = attend_tokens(
                q_group, k_head, v_head, table, block, hidden + tile, hidden + end, seen_from, context, scale,
                block_stride, KV_HEADS * D, GROUP, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, STAGES, FP8, COMPILED,
            )  # fmt: skip
        else:
            peak, total, acc = attend_matrix(
                q_group, k_head, v_head, table, block, hidden + tile, hidden + end, seen_from, context, scale,
                block_stride, KV_HEADS * D, GROUP, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, STAGES, FP8, COMPILED,
            )  # fmt: skip
        if SINKS:
            member = tl.arange(0, peak.shape[0])
            peak, total, acc = with_sinks(sinks, kv_head * GROUP + member, member < GROUP, tile == 0, peak, total, acc)
        if FP8:
            acc *= v_scale
        if (tile == 0) & (end == row_end):
            _store(out, row, kv_head, acc / total[:, None], KV_HEADS, GROUP, D, D_PAD)
        else:
            slot = 2 * share + ((i > 0) & (tile == 0)).to(tl.int32)
            _store(sums, slot, kv_head, acc, KV_HEADS, GROUP, D, D_PAD)
            _store_peaks(peaks, slot, kv_head, peak, total, KV_HEADS, GROUP)
            _merge_if_last(spans, sums, peaks, arrived, out, row, kv_head, KV_HEADS, GROUP, D, D_PAD)
        left -= end - tile
        tile = 0
        row += 1
        context, table, block = _look_up(
            tables, table_rows, context_len, row, tile, i + 1 < rows, table_stride, BLOCK_SIZE, TILE, WINDOW
        )


@triton.jit
def _hidden(context, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return the number of tiles before a row's window."""
    return tl.maximum(context - WINDOW, 0) // TILE if WINDOW > 0 else 0


@triton.jit
def _look_up(
    tables, table_rows, context_len, row, tile, exists, table_stride,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Load a row's length, its block table, and its tokens' blocks in a tile; nothing is read unless it `exists`."""
    context = tl.load(context_len + row, mask=exists, other=0)
    table = tables + tl.load(table_rows + row, mask=exists, other=0).to(tl.int64) * table_stride
    token = (tile + _hidden(context, TILE, WINDOW)) * TILE + tl.arange(0, TILE)
    return context, table, blocks_of(table, token, context, BLOCK_SIZE)


@triton.jit
def _prefetch_tokens(pointers, inside, D: tl.constexpr):
    """Request D elements at each pointer into the L2 cache, where the GPU supports it."""
    SIZE: tl.constexpr = D * pointers.dtype.element_ty.primitive_bitwidth // 8
    if SIZE % 16 == 0:
        tl.inline_asm_elementwise(
            """{
            .reg .pred inside;
            setp.ne.s32 inside, $2, 0;
            @inside cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r",
            [pointers.to(tl.int64), inside.to(tl.int32), SIZE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _store(
    target, index, kv_head, values, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr
):
    """Store values [heads, D_PAD], padded, to a group of target [n, KV_HEADS * GROUP, D]."""
    head = tl.arange(0, values.shape[0])
    dim = tl.arange(0, D_PAD)
    mask = (head < GROUP)[:, None] & (dim < D)[None, :]
    group = target + (index.to(tl.int64) * KV_HEADS + kv_head) * GROUP * D
    tl.store(group + head[:, None] * D + dim[None, :], values.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_peaks(peaks, slot, kv_head, peak, total, KV_HEADS: tl.constexpr, GROUP: tl.constexpr):
    head = tl.arange(0, peak.shape[0])
    group = peaks + (slot * KV_HEADS + kv_head) * GROUP * 2
    tl.store(group + 2 * head, peak, mask=head < GROUP)
    tl.store(group + 2 * head + 1, total, mask=head < GROUP)


@triton.jit
def _merge_if_last(
    spans, sums, peaks, arrived, out, row, kv_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Count a finished part of a row; the program that finishes the last one merges all parts."""
    first = tl.load(spans + 2 * row)
    parts = tl.load(spans + 2 * row + 1)
    counter = arrived + row * KV_HEADS + kv_head
    # One thread updates the counter: the stores of the other threads must have happened before.
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(counter, 0)
        ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
        head = tl.arange(0, ROWS)
        dim = tl.arange(0, D_PAD)
        real = head < GROUP
        mask = real[:, None] & (dim < D)[None, :]
        peak = no_peak(ROWS)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D_PAD], tl.float32)
        for i in tl.range(parts, num_stages=4):
            # The first slot of each share, except possibly for the row's first share.
            slot = tl.where(i == 0, first, (first // 2 + i) * 2)
            group = (slot * KV_HEADS + kv_head) * GROUP
            # Bypass the L1 cache, which may hold an earlier layer's data.
            part_peak = tl.load(peaks + 2 * (group + head), mask=real, other=0.0, cache_modifier=".cg")
            part_total = tl.load(peaks + 2 * (group + head) + 1, mask=real, other=1.0, cache_modifier=".cg")
            part = sums + (group + head)[:, None] * D + dim[None, :]
            part_sum = tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(peak, part_peak)
            fade, weight = tl.exp2(peak - higher), tl.exp2(part_peak - higher)
            total = total * fade + part_total * weight
            acc = acc * fade[:, None] + part_sum * weight[:, None]
            peak = higher
        _store(out, row, kv_head, acc / total[:, None], KV_HEADS, GROUP, D, D_PAD)
