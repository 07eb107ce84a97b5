"""Attention of one layer for few decoding rows in one launch: norm, rotation, cache update, attention, merge.

With few rows memory bandwidth is not the limit. The time depends on how often a kernel waits for data from another one,
or from an earlier load. So every program prepares the queries that it needs by itself, and the new key and value do not
pass through the cache. Contexts are divided into parts by their lengths alone, without a plan. The program that
finishes a row's last part merges the parts.
"""

from dataclasses import dataclass

import torch

from roseinfer.kernels.attention.decode_forms import add_tiles
from roseinfer.kernels.attention.heads import NORM_AFTER, NORM_BEFORE, HeadPreparation, norm_scale
from roseinfer.kernels.attention.kv_fp8 import narrow_queries, narrowed
from roseinfer.kernels.attention.paged import LOG2_E, blocks_of, no_peak, padded_dim
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.kernels.common.triton_support import tl, triton

MAX_ROWS: int = 32
# `decode_few` is the fastest up to so many rows, or up to so many KV heads of all rows together.
_MAX_ROWS_ANY_HEADS, _MAX_KV_HEADS = 16, 128
MAX_PARTS: int = 32  # per row
# Small programs wait the least for each other's warps and for K and V; docs/research/2026-11-attention.md has figures.
_TILE_TOKENS, _WARPS, _STAGES = 32, 2, 3
_MAX_PROGRAMS = 4  # per multiprocessor, if contexts are long enough
# Parts of a row that is not long. A row is long if such parts exceed `_LONG` tiles.
_SHORT_ROW_PARTS: int = 16
_PARTS: tl.constexpr = tl.constexpr(_SHORT_ROW_PARTS)
_LONG: tl.constexpr = tl.constexpr(4)
_MOST_PARTS: tl.constexpr = tl.constexpr(MAX_PARTS)
_MOST_ROWS: tl.constexpr = tl.constexpr(MAX_ROWS)


@dataclass(frozen=True, slots=True)
class FewWorkspace:
    """Buffers for parts, allocated once so that captured graphs stay valid.

    sums: [MAX_ROWS, MAX_PARTS, heads, D] and peaks: [MAX_ROWS, MAX_PARTS, heads, 2] float32. arrived: [MAX_ROWS,
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
            sums=torch.zeros((MAX_ROWS, MAX_PARTS, heads, head_dim), dtype=torch.float32, device=device),
            peaks=torch.zeros((MAX_ROWS, MAX_PARTS, heads, 2), dtype=torch.float32, device=device),
            arrived=torch.zeros((MAX_ROWS, kv_heads), dtype=torch.int32, device=device),
        )


def few_pays(rows: int, kv_heads: int) -> bool:
    """Return True if `decode_few` supports so many rows and is faster than `store_heads` and `decode_attention`.

    With 8 KV heads it is faster up to 16 rows; above, it is up to 4% of a layer faster or slower, depending on contexts
    (H200, Qwen3-8B, 2026-11-23). With 4 KV heads it is still 1 to 2% of a layer of Qwen3-30B-A3B faster at 24 to 32
    rows.
    """
    return 0 < rows <= (MAX_ROWS if rows * kv_heads <= _MAX_KV_HEADS else _MAX_ROWS_ANY_HEADS)


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
) -> None:
    """Apply `store_heads` and then `decode_attention` to R <= MAX_ROWS rows, with their arguments; qkv is not changed.

    qkv: [R, (heads + 2 * kv_heads) * D]. slots: [R] int64. The position of a row's query is the last of its context.
    With slot -1 its key and value are in the cache already. out: [R, heads, D].
    """
    rows, heads, head_dim = out.shape
    block_size, kv_heads = k_cache.shape[1:3]
    assert rows <= MAX_ROWS and qkv.stride(1) == 1 and k_cache.stride() == v_cache.stride()
    assert (k_cache.dtype == CODES) == (kv_scales is not None)
    k_scales, v_scales = kv_scales or (None, None)
    budget = max(1, _MAX_PROGRAMS * workspace.processors // kv_heads)
    parts = min(budget, max(_SHORT_ROW_PARTS, min(MAX_PARTS, budget // rows)))
    _few_kernel[(kv_heads, rows, parts)](
        qkv,
        k_cache,
        v_cache,
        tables,
        table_rows,
        context_len,
        slots,
        preparation.queries_cos_sin,
        preparation.keys_cos_sin,
        preparation.q_weight,
        preparation.k_weight,
        k_scales,
        v_scales,
        workspace.sums,
        workspace.peaks,
        workspace.arrived,
        out,
        scale * LOG2_E,
        preparation.eps,
        parts,
        budget,
        qkv.stride(0),
        k_cache.stride(0),
        tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=head_dim,
        D_PAD=padded_dim(head_dim),
        BLOCK_SIZE=block_size,
        TILE=_tile(head_dim, k_cache.dtype),
        WINDOW=window,
        STAGES=_STAGES,
        **preparation.options(head_dim),
        FP8=kv_scales is not None,
        COMPILED=qkv.is_cuda,
        num_warps=_WARPS if heads <= 16 * kv_heads else 2 * _WARPS,
        **early_start.options(qkv.device),
    )


def _tile(head_dim: int, kept: torch.dtype) -> int:
    """Return the tokens of K and V that a program loads at a time: fewer for wide heads, to fit the sums' registers."""
    return max(16, min(_TILE_TOKENS, 2 * 128 * _TILE_TOKENS // (padded_dim(head_dim) * max(2, kept.itemsize))))


@triton.jit(do_not_specialize=["slots", "parts", "budget"])
def _few_kernel(
    qkv,
    k_cache,
    v_cache,
    tables,
    table_rows,
    context_len,
    slots,
    queries_cos_sin,
    keys_cos_sin,
    q_weight,
    k_weight,
    k_scales,
    v_scales,
    sums,
    peaks,
    arrived,
    out,
    scale,
    eps,
    parts,
    budget,
    qkv_stride,
    block_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend, in program (h, r, i), for KV head h over part i of row r's context. The new token belongs to part 0."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    HEADS: tl.constexpr = KV_HEADS * GROUP
    ROWS: tl.constexpr = max(triton.next_power_of_2(GROUP), 16)
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    part = tl.program_id(2)
    # The step's first kernels wrote this and are done: the layer's product, which may still run, started after them.
    context = tl.load(context_len + row)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    slot = tl.load(slots + row)
    is_new = slot >= 0
    old = context - is_new.to(tl.int32)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(context - WINDOW, 0)
    first = seen_from // TILE
    tiles = tl.maximum(tl.cdiv(old, TILE) - first, 0)
    # All rows together have `budget` parts: a long row gets many, and few programs are left waiting.
    least = tl.maximum(tl.cdiv(_tiles_of_all(context_len, TILE, WINDOW), budget), 1)
    length = tl.maximum(tl.cdiv(tiles, tl.minimum(parts, _PARTS)), least)
    if length > _LONG:
        length = tl.maximum(tl.cdiv(tiles, parts), least)
    parts = tl.maximum(tl.cdiv(tiles, length), 1)
    begin = first + part * length
    end = tl.minimum(begin + length, first + tiles)
    place = tl.arange(0, TILE)
    block = blocks_of(table, begin * TILE + place, old, BLOCK_SIZE)
    if OVERLAP:
        _ask(k_cache + kv_head * D, block, begin * TILE + place, block_stride, KV_HEADS * D, D, BLOCK_SIZE)
        _ask(v_cache + kv_head * D, block, begin * TILE + place, block_stride, KV_HEADS * D, D, BLOCK_SIZE)
        tl.extra.cuda.gdc_wait()
    if part >= parts:
        return

    dim = tl.arange(0, D_PAD)
    member = tl.arange(0, ROWS)
    qkv += row.to(tl.int64) * qkv_stride
    if ROTATE:
        queries_cos_sin += (context - 1) * D
        keys_cos_sin += (context - 1) * D
    query = _turned(
        qkv + kv_head * GROUP * D, member, member < GROUP, q_weight, queries_cos_sin, eps, D, D_PAD, NORM, ROTATE,
        ROTATED, INTERLEAVED,
    ).to(qkv.dtype.element_ty)  # fmt: skip
    peak = no_peak(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    v_scale = 1.0
    if FP8:
        query, unit = narrow_queries(query)
        scale *= unit * tl.load(k_scales + kv_head)
        v_scale = tl.load(v_scales + kv_head)
    if part == 0:
        one = tl.arange(0, 1)
        key = _turned(
            qkv + (HEADS + kv_head) * D, one, one == 0, k_weight, keys_cos_sin, eps, D, D_PAD, NORM, ROTATE,
            ROTATED, INTERLEAVED,
        )  # fmt: skip
        value = tl.load(qkv + (HEADS + KV_HEADS + kv_head) * D + dim, mask=dim < D, other=0.0).to(tl.float32)[None, :]
        at = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * (KV_HEADS * D) + kv_head * D
        mask = (is_new & (dim < D))[None, :]
        key = _kept(k_cache + at + dim[None, :], key, mask, k_scales, kv_head, FP8)
        value = _kept(v_cache + at + dim[None, :], value, mask, v_scales, kv_head, FP8)
        peak = tl.where(is_new, tl.sum(query.to(tl.float32) * key, 1) * scale, peak)
        total += is_new.to(tl.float32)
        acc += tl.where(is_new, value, 0.0)
    peak, total, acc = add_tiles(
        query, k_cache + kv_head * D, v_cache + kv_head * D, table, block, begin, end, seen_from, old, scale,
        peak, total, acc, block_stride, KV_HEADS * D, D, D_PAD, BLOCK_SIZE, TILE, WINDOW, STAGES, FP8, COMPILED,
    )  # fmt: skip
    if FP8:
        acc *= v_scale

    head = kv_head * GROUP + member
    real = member < GROUP
    mask = real[:, None] & (dim < D)[None, :]
    if parts == 1:
        target = out + (row * HEADS + head)[:, None] * D + dim[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        at = (row * _MOST_PARTS + part) * HEADS + head
        tl.store(sums + at[:, None] * D + dim[None, :], acc, mask=mask)
        tl.store(peaks + 2 * at, peak, mask=real)
        tl.store(peaks + 2 * at + 1, total, mask=real)
        counter = arrived + row * KV_HEADS + kv_head
        # One thread updates the counter: the stores of the other threads must have happened before.
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(counter, 0)
            _merge(sums, peaks, out, row, kv_head, parts, HEADS, GROUP, D, D_PAD)


@triton.jit
def _tiles_of_all(context_len, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Return about the number of tiles of all rows of the launch."""
    row = tl.arange(0, _MOST_ROWS)
    lengths = tl.load(context_len + row, mask=row < tl.num_programs(1), other=0)
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW)
    return tl.sum(tl.cdiv(lengths, TILE), 0)


@triton.jit
def _ask(
    head, block, position, block_stride, TOKEN_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Request the keys or values of some tokens into the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // head.dtype.element_ty.primitive_bitwidth
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(D, LINE))) * LINE
    offset = block.to(tl.int64) * block_stride + position % BLOCK_SIZE * TOKEN_STRIDE
    where = (head + offset[:, None] + tl.minimum(line, D - 1)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _turned(
    base, row, real, weight_ptr, angles, eps, D: tl.constexpr, D_PAD: tl.constexpr,
    NORM: tl.constexpr, ROTATE: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return heads `row` of those at `base`, [rows, D_PAD] float32, normalised and rotated as asked (see `heads`)."""
    dim = tl.arange(0, D_PAD)
    inside = dim < D
    mask = real[:, None] & inside[None, :]
    at = base + row[:, None] * D
    x = tl.load(at + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    if ROTATE:
        partner, angle, sign = _pair_of(dim, D, ROTATED, INTERLEAVED)
        y = tl.load(at + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM == NORM_BEFORE:
        scale = norm_scale(tl.sum(x * x, 1), D, eps)
        x *= scale * tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        if ROTATE:
            y *= scale * tl.load(weight_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
    if ROTATE:
        cos = tl.load(angles + angle, mask=inside, other=0.0)
        sin = tl.load(angles + D // 2 + angle, mask=inside, other=0.0)
        x = x * cos[None, :] + y * (sign * sin)[None, :]
    if NORM == NORM_AFTER:
        scale = norm_scale(tl.sum(x * x, 1), D, eps)
        x *= scale * tl.load(weight_ptr + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def _pair_of(dim, D: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the number that rotates with number `dim` of a head, the index of their angle and the sign of its sine.
    A number that is not rotated has an angle of 0.
    """
    HALF: tl.constexpr = ROTATED // 2
    if INTERLEAVED:
        partner = dim ^ 1
        angle = dim // 2
        sign = tl.where(dim % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
        angle = tl.where(dim < HALF, dim, dim - HALF)
        sign = tl.where(dim < HALF, -1.0, 1.0)
    if ROTATED < D:
        partner = tl.where(dim < ROTATED, partner, dim)
        angle = tl.where(dim < ROTATED, angle, HALF)
    return partner, angle, sign


@triton.jit
def _kept(at, x, mask, scales, kv_head, FP8: tl.constexpr):
    """Store x in the cache, and return it as the cache holds it, in float32."""
    if FP8:
        kept = narrowed(x, tl.load(scales + kv_head))
    else:
        kept = x.to(at.dtype.element_ty)
    tl.store(at, kept, mask=mask)
    return kept.to(tl.float32)


@triton.jit
def _merge(
    sums, peaks, out, row, kv_head, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
):  # fmt: skip
    """Write the result of merging all parts of a row and KV head."""
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    AT_ONCE: tl.constexpr = max(1, min(16, 64 // ROWS))  # as many as fit registers
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, D_PAD)
    head = kv_head * GROUP + member
    peak = no_peak(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        real = (part < parts)[:, None] & (member < GROUP)[None, :]
        at = ((row * _MOST_PARTS + part) * HEADS)[:, None] + head[None, :]
        # Bypass the L1 cache, which may hold an earlier layer's data.
        peaks_of = tl.load(peaks + 2 * at, mask=real, other=-1e38, cache_modifier=".cg")
        totals = tl.load(peaks + 2 * at + 1, mask=real, other=0.0, cache_modifier=".cg")
        mask = real[:, :, None] & (dim < D)[None, None, :]
        accs = tl.load(sums + at[:, :, None] * D + dim[None, None, :], mask=mask, other=0.0, cache_modifier=".cg")
        higher = tl.maximum(peak, tl.max(peaks_of, 0))
        fade = tl.exp2(peak - higher)
        weight = tl.exp2(peaks_of - higher[None, :])
        total = total * fade + tl.sum(totals * weight, 0)
        acc = acc * fade[:, None] + tl.sum(accs * weight[:, :, None], 0)
        peak = higher
    merged = acc / tl.where(member < GROUP, total, 1.0)[:, None]
    target = out + (row * HEADS + head)[:, None] * D + dim[None, :]
    tl.store(target, merged.to(out.dtype.element_ty), mask=(member < GROUP)[:, None] & (dim < D)[None, :])
