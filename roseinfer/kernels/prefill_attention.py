"""Causal attention of prompt chunks over the paged KV cache, on the matrix units: FlashAttention-2 (Dao, 2023).

The query heads that share a KV head lie side by side in one tile of queries, so that K and V are read once for all of
them and that a short prompt still fills a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roseinfer.kernels.paged import LOG2_E, blocks_of, gathered, load_tokens, no_peak, padded_dim
from roseinfer.kernels.triton_support import next_power_of_2, tl, triton


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """block_m: (query, head) pairs of a program, block_n: keys that it takes at a time."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_prefill_config(group: int, head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The largest tiles whose sums stay in registers, for `group` query heads a KV head."""
    if dtype == torch.float32:
        return PrefillConfig(max(16, next_power_of_2(group)), 32, 8, 2)
    if head_dim > 128:
        return PrefillConfig(max(64, next_power_of_2(group)), 64, 8, 2)
    return PrefillConfig(max(128, next_power_of_2(group)), 64, 8, 3)


def map_blocks(first_row: int, query_lens: Sequence[int], context_lens: Sequence[int], queries: int) -> np.ndarray:
    """Cut rows first_row .. into blocks of at most `queries` queries: [G, 2] int32 = row, first query within the row.

    The blocks with the longest contexts come first, so that no long one begins when the others are about to end.
    """
    counts = np.asarray(query_lens, dtype=np.int64)
    blocks = -(-counts // queries)
    row = np.repeat(np.arange(len(counts)), blocks)
    first = (np.arange(row.shape[0]) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * queries
    position = (np.asarray(context_lens, dtype=np.int64) - counts)[row] + first
    order = np.argsort(-position, kind="stable")
    return np.stack((row[order] + first_row, first[order]), axis=1).astype(np.int32)


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
) -> None:
    """softmax(q K^T * scale) V, each query over the tokens up to its own, for the rows that `block_map` names.

    q: [T, heads, D], tokens any distance apart; the last of row r's queries, query_start[r] .. query_start[r + 1], is
    the last of its context_len[r] tokens. k_cache, v_cache: [num_blocks, block_size, kv_heads, D], dense but for the
    distance of blocks, and filled for all tokens of the contexts. tables: [S, max_blocks] int32; row r's is
    tables[table_rows[r]]. out: [T, heads, D]. block_map: [G, 2] int32 of `map_blocks` with
    `queries_per_block(config, heads // kv_heads)`; entries with row -1 are passed over.
    """
    heads, head_dim = q.shape[1:]
    block_size, kv_heads = k_cache.shape[1:3]
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
        STAGES=config.num_stages,
        num_warps=config.num_warps,
    )


def queries_per_block(config: PrefillConfig, group: int) -> int:
    """Queries that one program takes with all `group` query heads of a KV head."""
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
) -> torch.Tensor:
    """What `prefill_attention` writes for all rows, one by one in float32: [T, heads, D]."""
    group = q.shape[1] // k_cache.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_start.tolist()
    for row, (table_row, context) in enumerate(zip(table_rows.tolist(), context_len.tolist(), strict=True)):
        k, v = (gathered(cache, tables[table_row], context, group) for cache in (k_cache, v_cache))
        queries = slice(starts[row], starts[row + 1])
        scores = torch.einsum("qhd,khd->hqk", q[queries].float(), k) * scale
        positions = torch.arange(context, device=q.device)
        visible = positions <= positions[context - (queries.stop - queries.start) :, None]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


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
    STAGES: tl.constexpr,
):
    """Program (h, i): KV head h with its query heads, block i."""
    kv_head = tl.program_id(0)
    row = tl.load(block_map + 2 * tl.program_id(1))
    first = tl.load(block_map + 2 * tl.program_id(1) + 1)
    if row < 0:
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

    # Keys that every query of the block sees, in whole tiles, and the end of those that any of them sees.
    visible_to_all = (context - count + first + 1) // BLOCK_N
    end = tl.cdiv(tl.minimum(context - count + first + QUERIES, context), BLOCK_N)
    place = tl.arange(0, BLOCK_N)
    peak = no_peak(BLOCK_M)
    total = tl.zeros([BLOCK_M], tl.float32)
    fade = tl.zeros([BLOCK_M], tl.float32)
    weight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    v_offset = tl.zeros([BLOCK_N], tl.int64)
    v_inside = place < 0
    peak, total, fade, weight, acc, v_offset, v_inside = _attend(
        queries, k_head, v_head, table, 0, visible_to_all, position, context, scale, block_stride,
        peak, total, fade, weight, acc, v_offset, v_inside,
        False, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, BLOCK_N, STAGES,
    )  # fmt: skip
    peak, total, fade, weight, acc, v_offset, v_inside = _attend(
        queries, k_head, v_head, table, visible_to_all, end, position, context, scale, block_stride,
        peak, total, fade, weight, acc, v_offset, v_inside,
        True, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, BLOCK_N, STAGES,
    )  # fmt: skip
    v = load_tokens(v_head, v_offset, v_inside, D, D_PAD)
    acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    target = out + ((token * KV_HEADS * GROUP + head) * D)[:, None] + dim[None, :]
    tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    queries, k_head, v_head, table, begin, end, position, context, scale, block_stride,
    peak, total, fade, weight, acc, v_offset, v_inside,
    MASKED: tl.constexpr, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take tiles begin .. end of the keys into account; with MASKED, each query the keys up to its own only.

    A tile's V is multiplied one round later than its K, so that the matrix units have that to do while the weights of
    the next tile are worked out (FlashAttention-3, Shah et al., 2024). `weight`, `v_offset` and `v_inside` are what
    is still to be multiplied; `fade` is what `acc` must be scaled by before that.
    """
    place = tl.arange(0, BLOCK_N)
    block = blocks_of(table, begin * BLOCK_N + place, context, BLOCK_SIZE)
    for tile in tl.range(begin, end, num_stages=STAGES):
        key = tile * BLOCK_N + place
        offset = block.to(tl.int64) * block_stride + key % BLOCK_SIZE * TOKEN_STRIDE
        inside = key < context
        block = blocks_of(table, key + BLOCK_N, context, BLOCK_SIZE)
        k = load_tokens(k_head, offset, inside, D, D_PAD)
        score = tl.dot(queries, tl.trans(k), input_precision="ieee")
        v = load_tokens(v_head, v_offset, v_inside, D, D_PAD)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        if MASKED:
            score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - higher[:, None])
        fade = tl.exp2(peak - higher)
        total = total * fade + tl.sum(weight, 1)
        peak = higher
        v_offset = offset
        v_inside = inside
    return peak, total, fade, weight, acc, v_offset, v_inside
