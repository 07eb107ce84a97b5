"""Triton kernel of `skinny_linear` for a row or two by a weight in FP8, in pairs of float16 (`fp8_pairs`).

Tensors have the dimensions groups of 16 columns, rows of x, rows of the weight, places in a group. A program prepares x
once and keeps it in registers. The preparation takes so long that a program may better process several tiles.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.linear.activation import activate
from roseinfer.kernels.linear.fp8_pairs import multiply, narrow, read_halves
from roseinfer.kernels.linear.small_product import write_small_product
from roseinfer.kernels.lora.fused import (
    add_delta,
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
def weight_rows(tile, width, BLOCK_N: tl.constexpr, TILE_N: tl.constexpr):
    """Return a tile's rows of the weight. Rows past the end are copies of the last one; if gated, up's rows follow the
    gate's.
    """
    n = tl.arange(0, TILE_N)
    return tl.minimum(tile * BLOCK_N + n % BLOCK_N, width - 1) + n // BLOCK_N * width


@triton.jit
def _read_tile(
    w_ptr, scales_ptr, tile, chunk: tl.constexpr, width, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVICTION: tl.constexpr, GATED: tl.constexpr, BLOCK_SCALED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Load one chunk of a tile's columns, four codes in an int32 if COMPILED, and the scales of its groups."""
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    group = tl.arange(0, BLOCK_K // 16)
    rows = weight_rows(tile, width, BLOCK_N, TILE_N).to(tl.int64)[None, None, :, None]
    if COMPILED:
        at = w_ptr.to(tl.pointer_type(tl.int32)) + (rows * (K // 4) + chunk * (BLOCK_K // 4))
        at += (group * 4)[:, None, None, None] + tl.arange(0, 4)[None, None, None, :]
    else:
        at = w_ptr + (rows * K + chunk * BLOCK_K)
        at += (group * 16)[:, None, None, None] + tl.arange(0, 16)[None, None, None, :]
    if (chunk + 1) * BLOCK_K > K:
        inside = (chunk * (BLOCK_K // 16) + group < K // 16)[:, None, None, None]
        w = tl.load(at, mask=inside, other=0 if COMPILED else 0.0, eviction_policy=EVICTION)
    else:
        w = tl.load(at, eviction_policy=EVICTION)
    scales = 1.0
    if BLOCK_SCALED:
        # Past the last column x is zero, so any scale will do.
        block = tl.minimum((group // 8)[:, None, None] + chunk * (BLOCK_K // 128), K // 128 - 1)
        first = tile * BLOCK_N
        scales = tl.load(scales_ptr + first // 128 * (K // 128) + block)
        if GATED:
            is_up = (tl.arange(0, TILE_N) >= BLOCK_N)[None, None, :]
            scales = tl.where(is_up, tl.load(scales_ptr + (width + first) // 128 * (K // 128) + block), scales)
    return w, scales


@triton.jit
def finish(
    result,
    rstd,
    tile,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    width,
    stride_residual,
    stride_out,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    CHANNEL_SCALED: tl.constexpr,
    delta,
    lora_b,
    lora_s,
    starts,
    RANK: tl.constexpr,
    PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Apply scales and epilogue to a tile's sums [ROWS, rows of the weight], and write them."""
    result *= rstd
    w_rows = weight_rows(tile, width, BLOCK_N, 2 * BLOCK_N if GATED else BLOCK_N)
    if CHANNEL_SCALED:
        result *= tl.load(scales_ptr + w_rows)[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    m = tl.arange(0, ROWS)[:, None]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    writable = (m < rows) & (n < width)
    if HAS_RESIDUAL:
        at = residual_ptr + m.to(tl.int64) * stride_residual + n
        residual = tl.load(at, mask=writable, other=0.0).to(tl.float32)
        if ACTIVATION == "none":  # in the same order as without adapters: it may be one operation
            result += residual
    if delta is not None:
        slots, ranks, sums_ptr, b_ptr = delta
        outs = 2 * width if GATED else width
        result = add_delta(
            result, lora_b, lora_s, slots, ranks, starts, w_rows, tl.arange(0, ROWS), outs, sums_ptr, b_ptr, RANK,
            PLACES, COLUMNS,
        )  # fmt: skip
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, [ROWS, 2, BLOCK_N]), (0, 2, 1)))
        result = activate(gate, ACTIVATION) * up
    else:
        result = activate(result, ACTIVATION)
    if HAS_RESIDUAL and ACTIVATION != "none":
        result += residual
    tl.store(out_ptr + m.to(tl.int64) * stride_out + n, result.to(out_ptr.dtype.element_ty), mask=writable)


@triton.jit(do_not_specialize=["rows"])
def skinny_pairs_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    out_ptr,
    rows,
    width,
    stride_x,
    stride_residual,
    stride_out,
    eps,
    ROWS: tl.constexpr,
    K: tl.constexpr,
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
    SCALES: tl.constexpr,
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
    small_w_ptr=None,
    small_out_ptr=None,
    small_width=0,
    SMALL_PROGRAMS: tl.constexpr = 0,
    SMALL_ROWS: tl.constexpr = 1,
    SMALL_COLUMNS: tl.constexpr = 1,
):
    """Compute, in program i of p, tile i of BLOCK_N outputs for all rows; with STAY also i + p, ... See
    `skinny_linear`. The first SMALL_PROGRAMS programs compute another product.
    """
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    GROUPS: tl.constexpr = BLOCK_K // 16
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    BLOCK_SCALED: tl.constexpr = SCALES == "block"
    CHANNEL_SCALED: tl.constexpr = SCALES == "channel"
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    tile = tl.program_id(0)
    step = tl.num_programs(0)
    if SMALL_PROGRAMS > 0:
        if tile < SMALL_PROGRAMS:
            write_small_product(
                tile, x_ptr, small_w_ptr, norm_weight_ptr, small_out_ptr, rows, small_width, stride_x, eps, K,
                SMALL_ROWS, SMALL_COLUMNS, NORM, OVERLAP,
            )  # fmt: skip
            return
        tile -= SMALL_PROGRAMS
        step -= SMALL_PROGRAMS
    if sums_ptr is not None:
        leading = rows * (COLUMNS // LEAD)
        if tile < leading:
            lead(
                tile, tl.arange(0, CHUNK), rows, lead_x_ptr, norm_weight_ptr, norm_bias_ptr, stride_x, eps, sums_ptr,
                slots_ptr, ranks_ptr, a_ptr, arrived_ptr, K, NORM, RANK, COLUMNS, LEAD, OVERLAP,
            )  # fmt: skip
            return
        tile -= leading
        step -= leading
        slots = read_slots(tl.arange(0, ROWS), rows, slots_ptr)
    tiles = tl.cdiv(width, BLOCK_N)
    w, scales = _read_tile(
        w_ptr, scales_ptr, tile, 0, width, K, BLOCK_N, BLOCK_K, EVICTION, GATED, BLOCK_SCALED, COMPILED
    )
    gains = ()
    if NORM == "rms":
        for chunk in tl.static_range(CHUNKS):
            gains_at = norm_weight_ptr + chunk * BLOCK_K + tl.zeros([1, 1, 1, 1], tl.int32)
            gains += (read_halves(gains_at, BLOCK_K, K - chunk * BLOCK_K),)
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
    squares = tl.zeros([GROUPS, ROWS, 1], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        low, high = read_halves(x_rows + chunk * BLOCK_K, BLOCK_K, K - chunk * BLOCK_K)
        if NORM == "rms":
            squares += tl.sum(low * low + high * high, 3)
            low, high = low * gains[chunk][0], high * gains[chunk][1]
        xs += (narrow(low, high, COMPILED),)

    if sums_ptr is not None:
        outs = 2 * width if GATED else width
        delta = (slots, ranks, sums_ptr, b_ptr)
        lora_b = read_b(slots, ranks, w_rows, outs, b_ptr, RANK, PLACES)
        ready = arrived_of(arrived_ptr) >= leads
        lora_s = read_sums(lora_b, ready, ranks, tl.arange(0, ROWS), starts, sums_ptr, PLACES, COLUMNS)
    sums = tl.zeros([GROUPS, ROWS, TILE_N], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk > 0:
            w, scales = _read_tile(
                w_ptr, scales_ptr, tile, chunk, width, K, BLOCK_N, BLOCK_K, EVICTION, GATED, BLOCK_SCALED, COMPILED
            )
        sums += multiply(w, xs[chunk][0], xs[chunk][1], COMPILED) * (xs[chunk][2] * scales)
    # An RMSNorm divides a row by one number, so the division can follow the products.
    factor = 1.0
    if NORM == "rms":
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    if sums_ptr is not None:
        if not ready:
            wait_for_sums(leads, arrived_ptr)
            lora_s = read_sums(lora_b, True, ranks, tl.arange(0, ROWS), starts, sums_ptr, PLACES, COLUMNS)
        leave(tile == 0, step, leads, arrived_ptr)
    finish(
        tl.sum(sums, 0), factor, tile, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, width,
        stride_residual, stride_out, ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, CHANNEL_SCALED,
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
            sums = tl.zeros([GROUPS, ROWS, TILE_N], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                w, scales = _read_tile(
                    w_ptr, scales_ptr, later, chunk, width, K, BLOCK_N, BLOCK_K, EVICTION, GATED, BLOCK_SCALED, COMPILED
                )
                sums += multiply(w, xs[chunk][0], xs[chunk][1], COMPILED) * (xs[chunk][2] * scales)
            finish(
                tl.sum(sums, 0), factor, later, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, width,
                stride_residual, stride_out, ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, CHANNEL_SCALED,
                delta, later_b, later_s, later_starts, RANK, PLACES, COLUMNS,
            )  # fmt: skip
