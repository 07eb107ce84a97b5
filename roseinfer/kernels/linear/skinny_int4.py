"""Triton kernel of `int4_linear` for a row or two, in pairs of float16 (`int4_pairs`).

Tensors have the dimensions units of 32 columns, rows of x, rows of the weight, words of a unit. A program prepares x
once and keeps it in registers, as `skinny_pairs_kernel` does.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.linear.int4_codes import scales_and_shifts
from roseinfer.kernels.linear.int4_pairs import multiply, narrow, read_unit
from roseinfer.kernels.linear.nvfp4_codes import multiply_e2m1
from roseinfer.kernels.linear.skinny_pairs import finish, weight_rows
from roseinfer.kernels.lora.fused import (
    arrived_of,
    lead,
    leave,
    read_b,
    read_ranks,
    read_slots,
    read_sums,
    wait_for_sums,
)


@triton.jit
def _read_tile(
    w_ptr, scales_ptr, tile, chunk: tl.constexpr, width, PADDED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVICTION: tl.constexpr, GATED: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """Load one chunk of a tile's columns as words, and the words of their scales."""
    rows = weight_rows(tile, width, BLOCK_N, 2 * BLOCK_N if GATED else BLOCK_N).to(tl.int64)
    unit = tl.arange(0, BLOCK_K // 32)
    word = tl.arange(0, 4)
    first = chunk * BLOCK_K
    at = w_ptr + rows[None, None, :, None] * (PADDED // 8) + first // 8
    at += (unit * 4)[:, None, None, None] + word[None, None, None, :]
    outs = 2 * width if GATED else width
    scales_at = scales_ptr + rows[None, None, :]
    block = unit // 4 * 128 + first
    SPLIT: tl.constexpr = GROUP < 128 and not E2M1
    if SPLIT:
        group = (block[:, None, None, None] + 32 * word[None, None, None, :]) // GROUP
        scales_at = scales_at[:, :, :, None] + group * outs
    else:
        half = unit % 4 // 2 * 64 if E2M1 else 0
        scales_at += ((block + half) // GROUP * outs)[:, None, None]
    if first + BLOCK_K > PADDED:
        inside = (block < PADDED)[:, None, None]
        w = tl.load(at, mask=inside[:, :, :, None], other=0, eviction_policy=EVICTION)
        if SPLIT:
            inside = inside[:, :, :, None]
        both = tl.load(scales_at, mask=inside, other=0)
    else:
        w = tl.load(at, eviction_policy=EVICTION)
        both = tl.load(scales_at)
    return w, both


@triton.jit
def _products(w, both, x, SPLIT: tl.constexpr, E2M1: tl.constexpr, COMPILED: tl.constexpr):
    if E2M1:
        return multiply_e2m1(w, both, x, COMPILED)
    scales, shifts = scales_and_shifts(both)
    return multiply(w, scales, shifts, x, SPLIT, COMPILED)


@triton.jit(do_not_specialize=["rows"])
def skinny_int4_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    norm_weight_ptr,
    out_ptr,
    rows,
    width,
    stride_x,
    stride_residual,
    stride_out,
    eps,
    ROWS: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    STAY: tl.constexpr,
    COMPILED: tl.constexpr,
    sums_ptr=None,
    lead_x_ptr=None,
    slots_ptr=None,
    ranks_ptr=None,
    a_ptr=None,
    b_ptr=None,
    starts_ptr=None,
    arrived_ptr=None,
    RANK: tl.constexpr = 0,
    PLACES: tl.constexpr = 0,
    COLUMNS: tl.constexpr = 0,
    LEAD: tl.constexpr = 1,
    CHUNK: tl.constexpr = 1,
    factors_ptr=None,
):
    """Compute, in program i of p, tile i of BLOCK_N outputs for all rows; with STAY also i + p, ... See
    `int4_linear`.
    """
    PADDED: tl.constexpr = (K + 127) // 128 * 128
    CHUNKS: tl.constexpr = (PADDED + BLOCK_K - 1) // BLOCK_K
    UNITS: tl.constexpr = BLOCK_K // 32
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    E2M1: tl.constexpr = factors_ptr is not None
    SPLIT: tl.constexpr = GROUP < 128 and not E2M1
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    tile = tl.program_id(0)
    step = tl.num_programs(0)
    if sums_ptr is not None:
        leading = rows * (COLUMNS // LEAD)
        if tile < leading:
            lead(
                tile, tl.arange(0, CHUNK), rows, lead_x_ptr, norm_weight_ptr, norm_weight_ptr, stride_x, eps, sums_ptr,
                slots_ptr, ranks_ptr, a_ptr, arrived_ptr, K, "rms" if NORM else "none", RANK, COLUMNS, LEAD, OVERLAP,
            )  # fmt: skip
            return
        tile -= leading
        step -= leading
        slots = read_slots(tl.arange(0, ROWS), rows, slots_ptr)
    tiles = tl.cdiv(width, BLOCK_N)
    w, both = _read_tile(w_ptr, scales_ptr, tile, 0, width, PADDED, GROUP, BLOCK_N, BLOCK_K, EVICTION, GATED, E2M1)
    gains = ()
    if NORM:
        for chunk in tl.static_range(CHUNKS):
            gains += (read_unit(norm_weight_ptr + tl.zeros([1, 1, 1, 1], tl.int32), chunk, K, BLOCK_K),)
    delta, lora_b, lora_s, starts = None, None, None, None
    if sums_ptr is not None:
        ranks, leads = read_ranks(slots, ranks_ptr, RANK, COLUMNS, LEAD)
        w_rows = weight_rows(tile, width, BLOCK_N, TILE_N)
        starts = tl.load(starts_ptr + w_rows)

    # From here on, results of earlier kernels may be read, and their inputs overwritten.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    m = tl.minimum(tl.arange(0, ROWS), rows - 1)  # rows past the end are copies of the last one, and not written
    x_rows = x_ptr + (m.to(tl.int64) * stride_x)[None, :, None, None]
    xs = ()
    squares = tl.zeros([UNITS, ROWS, 1], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        parts = read_unit(x_rows, chunk, K, BLOCK_K)
        if NORM:
            scaled = ()
            for j in tl.static_range(4):
                squares += tl.sum(parts[j] * parts[j], 3)
                scaled += (parts[j] * gains[chunk][j],)
            parts = scaled
        xs += (narrow(parts, SPLIT, E2M1, COMPILED),)

    if sums_ptr is not None:
        outs = 2 * width if GATED else width
        delta = (slots, ranks, sums_ptr, b_ptr)
        lora_b = read_b(slots, ranks, w_rows, outs, b_ptr, RANK, PLACES)
        ready = arrived_of(arrived_ptr) >= leads
        lora_s = read_sums(lora_b, ready, ranks, tl.arange(0, ROWS), starts, sums_ptr, PLACES, COLUMNS)
    sums = tl.zeros([UNITS, ROWS, TILE_N], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk > 0:
            w, both = _read_tile(
                w_ptr, scales_ptr, tile, chunk, width, PADDED, GROUP, BLOCK_N, BLOCK_K, EVICTION, GATED, E2M1
            )
        sums += _products(w, both, xs[chunk], SPLIT, E2M1, COMPILED)
    # An RMSNorm divides a row by one number, so the division can follow the products.
    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if sums_ptr is not None:
        if not ready:
            wait_for_sums(leads, arrived_ptr)
            lora_s = read_sums(lora_b, True, ranks, tl.arange(0, ROWS), starts, sums_ptr, PLACES, COLUMNS)
        leave(tile == 0, step, leads, arrived_ptr)
    finish(
        tl.sum(sums, 0), factor, tile, factors_ptr, bias_ptr, residual_ptr, out_ptr, rows, width, stride_residual,
        stride_out, ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, E2M1,
        delta, lora_b, lora_s, starts, RANK, PLACES, COLUMNS,
    )  # fmt: skip
    if STAY:
        for later in tl.range(tile + step, tiles, step, num_stages=STAGES):
            later_b, later_s, later_starts = None, None, None
            if sums_ptr is not None:
                w_rows = weight_rows(later, width, BLOCK_N, TILE_N)
                later_starts = tl.load(starts_ptr + w_rows)
                later_b = read_b(slots, ranks, w_rows, outs, b_ptr, RANK, PLACES)
                m = tl.arange(0, ROWS)
                later_s = read_sums(later_b, True, ranks, m, later_starts, sums_ptr, PLACES, COLUMNS)
            sums = tl.zeros([UNITS, ROWS, TILE_N], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                w, both = _read_tile(
                    w_ptr, scales_ptr, later, chunk, width, PADDED, GROUP, BLOCK_N, BLOCK_K, EVICTION, GATED, E2M1
                )
                sums += _products(w, both, xs[chunk], SPLIT, E2M1, COMPILED)
            finish(
                tl.sum(sums, 0), factor, later, factors_ptr, bias_ptr, residual_ptr, out_ptr, rows, width,
                stride_residual, stride_out, ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, E2M1,
                delta, later_b, later_s, later_starts, RANK, PLACES, COLUMNS,
            )  # fmt: skip
