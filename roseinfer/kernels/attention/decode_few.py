"""Attention of one layer for few decoding rows in one launch: norm, rotation, cache update, attention, merge.

With few rows memory bandwidth is not the limit. The time depends on how often a kernel waits for data from another one,
or from an earlier load. So every program prepares the queries that it needs by itself, and the new key and value do not
pass through the cache. Contexts are divided into parts by their lengths alone, without a plan. The program that
finishes a row's last part merges the parts.

Rows of several tokens, such as a token and its drafts, are the same with more queries in a tile (`verify_few`): as many
as leave a tile of the matrix units' least size. Larger tiles were slower than further tiles, which find K and V in the
L2 cache. Parts are merged by a second kernel: merging is as much work for each query, too much for one program.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.attention.decode_few_kernel import (
    MAX_PARTS,
    MAX_ROWS,
    MAX_TOKENS,
    SHORT_ROW_PARTS,
    few_kernel,
    merge_kernel,
)
from roseinfer.kernels.attention.heads import HeadPreparation
from roseinfer.kernels.attention.paged import ENDLESS_TOKENS, LOG2_E, padded_dim
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES

MAX_QUERIES = 8  # of a row, for `verify_few`; its kernel supports 16
# `decode_few` is the fastest up to so many rows, or up to so many KV heads of all rows together.
_MAX_ROWS_ANY_HEADS, _MAX_KV_HEADS = 16, 128
_MAX_VERIFIED_KV_HEADS = 48
# Small programs wait the least for each other's warps and for K and V; docs/research/2026-11-attention.md has figures.
_TILE_TOKENS, _WARPS, _STAGES = 32, 2, 3
_MAX_PROGRAMS = 4  # per multiprocessor, if contexts are long enough
_TILE_ROWS = 16  # queries times heads of a group, the least that the matrix units take


@dataclass(frozen=True, slots=True)
class FewWorkspace:
    """Buffers for parts, allocated once so that captured graphs stay valid.

    sums: [MAX_TOKENS, MAX_PARTS, heads, D] and peaks: [MAX_TOKENS, MAX_PARTS, heads, 2] float32. arrived: [MAX_ROWS,
    kv_heads] int32 counts the finished parts of a row; all zero between kernels. processors: multiprocessors.
    """

    processors: int
    sums: torch.Tensor
    peaks: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(
        cls, heads: int, kv_heads: int, head_dim: int, processors: int, device: torch.device
    ) -> "FewWorkspace":
        return cls(
            processors,
            sums=torch.zeros((MAX_TOKENS, MAX_PARTS, heads, head_dim), dtype=torch.float32, device=device),
            peaks=torch.zeros((MAX_TOKENS, MAX_PARTS, heads, 2), dtype=torch.float32, device=device),
            arrived=torch.zeros((MAX_ROWS, kv_heads), dtype=torch.int32, device=device),
        )


def few_pays(rows: int, kv_heads: int) -> bool:
    """Return True if `decode_few` supports so many rows and is faster than `store_heads` and `decode_attention`.

    With 8 KV heads it is faster up to 16 rows; above, it is up to 4% of a layer faster or slower, depending on contexts
    (H200, Qwen3-8B, 2026-11-23). With 4 KV heads it is still 1 to 2% of a layer of Qwen3-30B-A3B faster at 24 to 32
    rows.
    """
    return 0 < rows <= (MAX_ROWS if rows * kv_heads <= _MAX_KV_HEADS else _MAX_ROWS_ANY_HEADS)


def most_rows(kv_heads: int) -> int:
    """Return the most rows for which `verify_few` is the fastest.

    A layer of Qwen3-8B (8 KV heads) with rows of 5 tokens at contexts of 1,024, against their being chunks of prompts:
    131 us instead of 139 with 1 row, 142 instead of 148 with 4, 155 instead of 152 with 8 (H200, 2026-11-27).
    """
    return max(1, _MAX_VERIFIED_KV_HEADS // kv_heads)


def decode_few(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    context_len: torch.Tensor,
    slots: torch.Tensor,
    preparation: HeadPreparation,
    out: torch.Tensor,
    scale: float,
    workspace: FewWorkspace,
    window: int = 0,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
    *,
    skips_first: bool = False,
) -> None:
    """Apply `store_heads` and then `decode_attention` to R <= MAX_ROWS rows, with their arguments; qkv is not changed.

    qkv: [R, (heads + 2 * kv_heads) * D]. slots: [R] int64. The position of a row's query is the last of its context.
    With slot -1 its key and value are in the cache already. out: [R, heads, D]. skips_first: only a row of one token
    sees the first one.
    """
    rows, kv_heads = out.shape[0], k_cache.shape[2]
    assert rows <= MAX_ROWS
    budget = _budget(workspace, kv_heads)
    parts = min(budget, max(SHORT_ROW_PARTS, min(MAX_PARTS, budget // rows)))
    paged = k_cache, v_cache, tables, table_rows, context_len, slots
    grid = kv_heads, rows, parts
    rest = out, scale, workspace, window, kv_scales, sinks
    _launch(grid, qkv, paged, context_len, preparation, *rest, parts, rows, skips_first=skips_first)


def verify_few(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    slots: torch.Tensor,
    preparation: HeadPreparation,
    out: torch.Tensor,
    scale: float,
    workspace: FewWorkspace,
    window: int = 0,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Apply `store_heads` and then causal attention to R rows of up to MAX_QUERIES tokens; qkv is not changed.

    qkv: [T, (heads + 2 * kv_heads) * D], T <= MAX_TOKENS, R <= T. Row r's tokens query_start[r] .. query_start[r + 1]
    are the last of its context_len[r] tokens; a row may have none. slots: [T] int64. Keys and values of a row's tokens
    are taken from qkv; those with slot -1 are not written. out: [T, heads, D], of which tokens of no row are not
    written. Other arguments: see `decode_few`.
    """
    tokens, heads, head_dim = out.shape
    rows, kv_heads = context_len.shape[0], k_cache.shape[2]
    assert rows <= tokens <= MAX_TOKENS
    budget, queries = _budget(workspace, kv_heads), _queries(heads // kv_heads)
    query_tiles = rows + tokens // queries  # at the most
    programs = min(budget + query_tiles, query_tiles * MAX_PARTS)
    paged = k_cache, v_cache, tables, table_rows, context_len, slots
    grid = kv_heads, programs, 1
    rest = out, scale, workspace, window, kv_scales, sinks
    _launch(grid, qkv, paged, query_start, preparation, *rest, 0, rows, queries, many=True)
    merge_kernel[(heads, tokens)](
        query_start,
        context_len,
        workspace.sums,
        workspace.peaks,
        out,
        rows,
        budget,
        HEADS=heads,
        QUERIES=queries,
        D=head_dim,
        D_PAD=padded_dim(head_dim),
        TILE=_tile(head_dim, k_cache.dtype),
        WINDOW=window,
        num_warps=4,
        **early_start.options(qkv.device),
    )


def _queries(group: int) -> int:
    """Return the tokens of a row that fit a tile of queries with `group` heads each."""
    return max(1, min(MAX_QUERIES, _TILE_ROWS // group))


def _budget(workspace: FewWorkspace, kv_heads: int) -> int:
    """Return the programs of a KV head that the GPU runs at once."""
    return max(1, _MAX_PROGRAMS * workspace.processors // kv_heads)


def _launch(
    grid: tuple[int, int, int],
    qkv: torch.Tensor,
    paged: tuple[torch.Tensor, ...],
    query_start: torch.Tensor,
    preparation: HeadPreparation,
    out: torch.Tensor,
    scale: float,
    workspace: FewWorkspace,
    window: int,
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None,
    sinks: torch.Tensor | None,
    parts: int,
    rows: int,
    queries: int = 1,
    *,
    many: bool = False,
    skips_first: bool = False,
) -> None:
    """Launch the kernel. paged: its arguments from `k_cache` to `slots`. query_start: read if rows may have `many`
    tokens, of which a program takes `queries`.
    """
    heads, head_dim = out.shape[1:]
    k_cache, v_cache, tables = paged[:3]
    block_size, kv_heads = k_cache.shape[1:3]
    assert qkv.stride(1) == 1 and k_cache.stride() == v_cache.stride()
    assert (k_cache.dtype == CODES) == (kv_scales is not None)
    k_scales, v_scales = kv_scales or (None, None)
    few_kernel[grid](
        qkv,
        *paged,
        query_start,
        preparation.queries_cos_sin,
        preparation.keys_cos_sin,
        preparation.q_weight,
        preparation.k_weight,
        k_scales,
        v_scales,
        sinks,
        workspace.sums,
        workspace.peaks,
        workspace.arrived,
        out,
        scale * LOG2_E,
        preparation.eps,
        parts,
        rows,
        _budget(workspace, kv_heads),
        qkv.stride(0),
        k_cache.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        MANY=many,
        QUERIES=queries,
        D=head_dim,
        D_PAD=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=_tile(head_dim, k_cache.dtype),
        WINDOW=window or (ENDLESS_TOKENS if skips_first else 0),
        SKIPS_FIRST=skips_first,
        STAGES=_STAGES,
        **preparation.options(head_dim),
        FP8=kv_scales is not None,
        SINKS=sinks is not None,
        COMPILED=qkv.is_cuda,
        num_warps=_WARPS if heads <= _TILE_ROWS * kv_heads else 2 * _WARPS,
        **early_start.options(qkv.device),
    )


def _tile(head_dim: int, kept: torch.dtype) -> int:
    """Return the tokens of K and V that a program loads at a time: fewer for wide heads, to fit the sums' registers."""
    return max(16, min(_TILE_TOKENS, 2 * 128 * _TILE_TOKENS // (padded_dim(head_dim) * max(2, kept.itemsize))))
