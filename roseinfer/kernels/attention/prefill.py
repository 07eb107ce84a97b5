"""Causal attention of prompt chunks over the paged KV cache, on the matrix units: FlashAttention-2 (Dao, 2023).

Query heads that share a KV head are side by side in one tile of queries, so that K and V are read once for all of them,
and a short prompt still fills a tile.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.attention.kv_fp8 import narrow_queries, widened_values
from roseinfer.kernels.attention.paged import LOG2_E, gathered, no_peak, padded_dim, softmax_reference, with_sinks
from roseinfer.kernels.attention.prefill_shares import IN_BULK, PrefillWorkspace
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes. block_m: (query, head) pairs of a program, block_n: keys that it takes at a time.

    max_registers: per thread, so that a multiprocessor runs more programs at once; None for no limit.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


# Steps of up to this many tokens take small tiles, see `choose_prefill_config`.
MAX_SMALL_STEP_TOKENS = 1024


def choose_prefill_config(
    tokens: int, group: int, head_dim: int, dtype: torch.dtype, fp8: bool = False, *, short: bool = False
) -> PrefillConfig:
    """Return the config for a step of `tokens` tokens and `group` query heads per KV head. fp8: K and V are stored in
    it.

    short: large steps have short contexts only, since `prefill_bulk` takes the long ones.

    Large tiles read K and V less often. Small ones give a step more programs and waste less on short rows. From a sweep
    in bfloat16 (H200, 2026-11-21), TFLOP/s of large / small tiles for heads / KV heads / head size; "+ 512" are tokens
    in the cache:

                    8 x 1024  1 x 8192  8 x 256 + 1024  4 x 512   64 x 16 + 512  1 x 512   1 x 128
        32/8/128    273/253   435/348   338/274         190/190   127/172        137/138   17/21
        16/8/128    268/253   428/400   324/303         187/172   64/90          70/82     8/9
        12/12/64    248/234   372/333   213/240         112/124   31/44          36/48     4/6

    Large is 128 x 64 with 8 warps and 3 stages, small 64 x 64 with 4 warps and 3 stages. (The first line has 2 stages;
    3 give 173, 138 and 18 in its last three columns, and are up to a third faster after long contexts, for which they
    were chosen: see `prefill_shares`.) The number of tokens does not distinguish 32 prompts of 65 tokens (26/35, 20/24,
    16/17) from 4 of 512, but they lose only a few us. Heads of more than 128, and float32, have one size of tiles, the
    largest whose sums fit registers; they were not measured.

    With two stages and at most 128 registers, two programs of large tiles run on a multiprocessor, which hides their
    beginnings and ends: 8 x 1024 334, 2 x 1024 326 instead of 271 (2026-11-23). One program alone is slower: 512 tokens
    after 8,192 take 287 us instead of 169.

    In FP8 large tiles have twice the keys, since all programs that see a key widen it. 32/8/128 (2026-11-23), TFLOP/s
    of 8 x 1024, 1 x 8192, 2048 + 6144 with 3 stages: 229 356 351, with 2: 226 340 336, small tiles 228 312 307.
    """
    least = next_power_of_2(group)
    if dtype == torch.float32:
        return PrefillConfig(max(16, least), 32, 8, 2)
    if head_dim > 128:
        return PrefillConfig(max(64, least), 64, 8, 2)
    if tokens > MAX_SMALL_STEP_TOKENS:
        if fp8:
            return PrefillConfig(max(128, least), 128, 8, 3)
        return PrefillConfig(max(128, least), 64, 8, 2, 128) if short else PrefillConfig(max(128, least), 64, 8, 3)
    return PrefillConfig(max(64, least), 64, 4, 3)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    out: torch.Tensor,
    block_map: torch.Tensor,
    scale: float,
    config: PrefillConfig,
    window: int = 0,
    workspace: PrefillWorkspace | None = None,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Write softmax(q K^T * scale) V, each query over the tokens up to its own, for the rows in `block_map`.

    With a window, a query sees the last `window` tokens up to its own; keys outside of a block's windows are not read.

    q: [T, heads, D], tokens any distance apart; the last of row r's queries, query_start[r] .. query_start[r + 1], is
    the last of its context_len[r] tokens. k_cache, v_cache: [num_blocks, block_size, kv_heads, D], dense except for the
    distance of blocks, and filled for all tokens of the contexts. tables: [S, max_blocks] int32; row r's is
    tables[table_rows[r]]. out: [T, heads, D]. block_map: [G, 4] int32 from `map_blocks` with `queries_per_block(config,
    heads // kv_heads)`; entries with row -1 or parts `IN_BULK` are skipped. With a workspace (for tiles of
    `config.block_m`) the map may divide contexts; `merge_parts` then writes the results of divided blocks.

    kv_scales: factors of each KV head's codes (e4m3fn), [kv_heads] float32 each. sinks: [heads] float32, see
    `AttentionSpec.sinks`.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
    assert (k_cache.dtype == CODES) == (kv_scales is not None)
    k_scales, v_scales = kv_scales or (None, None)
    _prefill_kernel[(kv_heads, block_map.shape[0])](
        q,
        k_cache,
        v_cache,
        tables,
        table_rows,
        query_start,
        context_len,
        out,
        block_map,
        out if workspace is None else workspace.sums,
        out if workspace is None else workspace.peaks,
        k_scales,
        v_scales,
        sinks,
        scale * LOG2_E,
        q.stride(0),
        k_cache.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        D_PAD=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        WINDOW=window,
        DIVIDED=workspace is not None,
        STAGES=config.num_stages,
        FP8=kv_scales is not None,
        SINKS=sinks is not None,
        COMPILED=q.is_cuda,
        num_warps=config.num_warps,
        maxnreg=config.max_registers,
    )


def queries_per_block(config: PrefillConfig, group: int) -> int:
    """Return the queries that one program takes with all `group` query heads of a KV head."""
    assert group <= config.block_m
    return config.block_m // group


def prefill_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    scale: float,
    window: int = 0,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`prefill_attention` for all rows, one by one in float32: [T, heads, D]."""
    k_scales, v_scales = kv_scales or (None, None)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_start.tolist()
    for row, (table_row, context) in enumerate(zip(table_rows.tolist(), context_len.tolist(), strict=True)):
        k = gathered(k_cache, tables[table_row], context, q.shape[1], k_scales)
        v = gathered(v_cache, tables[table_row], context, q.shape[1], v_scales)
        queries = slice(starts[row], starts[row + 1])
        scores = torch.einsum("qhd,khd->hqk", q[queries].float(), k) * scale
        positions = torch.arange(context, device=q.device)
        own = positions[context - (queries.stop - queries.start) :, None]
        visible = (positions <= own) & (positions > own - (window or context))
        weights = softmax_reference(scores.masked_fill(~visible, float("-inf")), sinks)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


_IN_BULK: tl.constexpr = tl.constexpr(IN_BULK)


@triton.jit
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    table_rows,
    query_start,
    context_len,
    out,
    block_map,
    sums,
    peaks,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    DIVIDED: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    SINKS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Attend, in program (h, i), for KV head h and entry i of the map: a block, or with DIVIDED a part of one."""
    kv_head = tl.program_id(0)
    entry = tl.program_id(1)
    row = tl.load(block_map + 4 * entry)
    first = tl.load(block_map + 4 * entry + 1)
    kind = tl.load(block_map + 4 * entry + 3)
    if (row < 0) | (kind == _IN_BULK):
        return
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    context = tl.load(context_len + row)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    k_head = k_cache + kv_head * D
    v_head = v_cache + kv_head * D

    QUERIES: tl.constexpr = BLOCK_M // GROUP
    pair = tl.arange(0, BLOCK_M)
    query = first + pair // GROUP
    real = (query < count) & (pair < QUERIES * GROUP)
    position = context - count + query
    token = (begin + query).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, D_PAD)
    mask = real[:, None] & (dim < D)[None, :]
    queries = tl.load(q + (token * q_stride + head * D)[:, None] + dim[None, :], mask=mask, other=0.0)
    if FP8:
        queries, unit = narrow_queries(queries)
        scale *= unit * tl.load(k_scales + kv_head)

    # The keys that every query of the block sees, in whole tiles, and the end of the keys that any query sees.
    position_of_first = context - count + first
    visible_to_all = (position_of_first + 1) // BLOCK_N
    last = tl.minimum(position_of_first + QUERIES, context)
    end = tl.cdiv(last, BLOCK_N)
    peak = no_peak(BLOCK_M)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    inner = 0
    seen_from = 0
    if WINDOW > 0:
        # The tiles from the first query's first key to the last query's contain the window's border.
        seen_from = tl.maximum(position_of_first - WINDOW + 1, 0)
        inner = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW, 0), BLOCK_N), visible_to_all)
    begin_tile = seen_from // BLOCK_N
    part = 0
    parts = 1
    if DIVIDED:
        part = tl.load(block_map + 4 * entry + 2)
        parts = kind
        tiles = end - begin_tile
        end = begin_tile + (part + 1) * tiles // parts
        begin_tile += part * tiles // parts
        # A part contains tiles of all, some or one of the three ranges.
        inner = tl.maximum(tl.minimum(inner, end), begin_tile)
        visible_to_all = tl.maximum(tl.minimum(visible_to_all, end), begin_tile)
    if WINDOW > 0:
        peak, total, acc = _attend(
            queries, k_head, v_head, table, begin_tile, inner, position, seen_from, context, scale,
            block_stride, peak, total, acc, True, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, STAGES,
            FP8, COMPILED,
        )  # fmt: skip
    peak, total, acc = _attend(
        queries, k_head, v_head, table, inner, visible_to_all, position, seen_from, context, scale,
        block_stride, peak, total, acc, False, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, STAGES,
        FP8, COMPILED,
    )  # fmt: skip
    peak, total, acc = _attend(
        queries, k_head, v_head, table, visible_to_all, end, position, seen_from, context, scale,
        block_stride, peak, total, acc, True, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, BLOCK_N, WINDOW, STAGES,
        FP8, COMPILED,
    )  # fmt: skip
    if SINKS:
        peak, total, acc = with_sinks(sinks, head, real, part == 0, peak, total, acc)
    if FP8:
        acc *= tl.load(v_scales + kv_head)
    if parts == 1:
        target = out + ((token * KV_HEADS * GROUP + head) * D)[:, None] + dim[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    elif DIVIDED:
        slot = entry * KV_HEADS + kv_head
        tl.store(sums + (slot * BLOCK_M + pair)[:, None] * D + dim[None, :], acc, mask=mask)
        tl.store(peaks + slot * 2 * BLOCK_M + pair, peak, mask=real)
        tl.store(peaks + slot * 2 * BLOCK_M + BLOCK_M + pair, total, mask=real)


@triton.jit
def _attend(
    queries, k_head, v_head, table, begin, end, position, seen_from, context, scale,
    block_stride, peak, total, acc, MASKED: tl.constexpr, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Process tiles begin .. end of the keys; with MASKED, each query sees the keys of its window only.

    Keys before `seen_from` are not read: no query of the block sees them.
    """
    place = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, D_PAD)
    within = (place % BLOCK_SIZE * TOKEN_STRIDE)[:, None] + dim[None, :]
    # Past the context the last block is used instead of the table's entries, which is less work than a mask.
    last = (context - 1) // BLOCK_SIZE
    page = (begin * BLOCK_N + place) // BLOCK_SIZE
    block = tl.load(table + tl.minimum(page, last))
    for tile in tl.range(begin, end, num_stages=STAGES):
        first = tile * BLOCK_N
        if BLOCK_N % BLOCK_SIZE == 0:
            page += BLOCK_N // BLOCK_SIZE
        else:  # the next tile's tokens have other offsets in their blocks
            within = ((first + place) % BLOCK_SIZE * TOKEN_STRIDE)[:, None] + dim[None, :]
            page = (first + BLOCK_N + place) // BLOCK_SIZE
        offset = (block.to(tl.int64) * block_stride)[:, None] + within
        block = tl.load(table + tl.minimum(page, last))
        inside = (place < context - first) | (not MASKED)
        if MASKED and WINDOW > 0:
            inside = inside & (place >= seen_from - first)
        k = _load_tokens(k_head + offset, inside, dim, D, D_PAD)
        if FP8:
            k = k.to(queries.dtype)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if MASKED:
            own = position - first
            score = tl.where(place[None, :] <= own[:, None], score, float("-inf"))
            if WINDOW > 0:
                score = tl.where(place[None, :] > own[:, None] - WINDOW, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weight, 1)
        v = _load_tokens(v_head + offset, inside, dim, D, D_PAD)
        if FP8:
            v = widened_values(v, k, COMPILED)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = higher
    return peak, total, acc


@triton.jit
def _load_tokens(at, inside, dim, D: tl.constexpr, D_PAD: tl.constexpr):
    """Load [tokens, D_PAD], zero outside of the context: a block's unused slots may contain NaN."""
    mask = inside[:, None] & (dim < D)[None, :] if D_PAD > D else inside[:, None]
    return tl.load(at, mask=mask, other=0.0)
