"""Triton kernel of `skinny_linear`.

Tiles have three dimensions, so that the same code serves both ways of multiplying. On the tensor cores: slices of
columns, one for each warp, then rows, then columns of a slice; a batched product whose batch is the slices.
Elementwise: rows of the input, rows of the weight, columns.

A weight of 8 bits is widened in registers, exactly, and multiplied like one of 16. Scales of rows are applied at the
end. With scales of blocks of 128 x 128, the sum over each block is scaled before it is added to the sums.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.linear.activation import activate
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
def prefetch_rows(pointer, rows, stride_bytes, size_bytes):
    """Request the first `size_bytes` (a multiple of 16) of each of `rows` rows into the L2 cache."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred mine;
        .reg .u32 thread;
        .reg .u64 address;
        mov.u32 thread, %tid.x;
        setp.lt.s32 mine, thread, $2;
        mad.wide.u32 address, thread, $3, $1;
        @mine cp.async.bulk.prefetch.L2.global [address], $4;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [pointer.to(tl.int64), rows, stride_bytes, size_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _read(pointers, columns, start, K: tl.constexpr, MASKED: tl.constexpr, EVICTION: tl.constexpr):
    """Load at `pointers` moved by `start` columns; zero past column K."""
    if MASKED:
        return tl.load(pointers + start, mask=columns + start < K, other=0.0, eviction_policy=EVICTION)
    else:
        return tl.load(pointers + start, eviction_policy=EVICTION)


@triton.jit
def _statistics(
    x_rows, eps, ROWS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, CENTRED: tl.constexpr
):
    """Return mean (zero unless CENTRED) and 1 / standard deviation of each row, [ROWS] float32 each."""
    columns = tl.arange(0, BLOCK_K)[None, :]
    pointers = x_rows[:, None] + columns
    mean = tl.zeros([ROWS], tl.float32)
    if CENTRED:
        for start in tl.range(0, K, BLOCK_K):
            mean += tl.sum(_read(pointers, columns, start, K, MASKED, "").to(tl.float32), 1)
        mean = mean / K
    squares = tl.zeros([ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        centred = _read(pointers, columns, start, K, MASKED, "").to(tl.float32) - mean[:, None]
        if MASKED:
            centred = tl.where(columns + start < K, centred, 0.0)
        squares += tl.sum(centred * centred, 1)
    return mean, tl.rsqrt(squares / K + eps)


@triton.jit
def _along_rows(row_values, DOT: tl.constexpr):
    """Broadcast [ROWS] over a tile's rows of the input."""
    if DOT:
        return row_values[None, :, None]
    else:
        return row_values[:, None, None]


@triton.jit
def _fold(products, COLUMNS: tl.constexpr):
    """Sum every COLUMNS neighbouring columns, which one thread holds: a load of 16 bytes."""
    shape: tl.constexpr = [products.shape[0], products.shape[1], products.shape[2] // COLUMNS, COLUMNS]
    return tl.sum(tl.reshape(products, shape), 3)


@triton.jit
def _widen(w, x):
    """Convert codes of 8 bits to the dtype of x, which holds each of them exactly; return other weights as they are.

    Conversions to bfloat16 go through float32: Triton's direct way converts single elements, at an eighth of the rate.
    """
    if w.dtype == tl.float8e4nv:
        w = w.to(tl.float16) if x.dtype == tl.float16 else w.to(tl.float32).to(x.dtype)
    return w


@triton.jit
def _read_scales(
    scales_ptr, up_scales_ptr, is_up, groups, start, K: tl.constexpr, MASKED: tl.constexpr, GATED: tl.constexpr
):
    """Load the scale of each group of columns in one block; `groups`: their first columns."""
    at = (groups + start) // 128
    END: tl.constexpr = (K + 127) // 128
    scales = _read(scales_ptr + at, at, 0, END, MASKED, "")
    if GATED:
        scales = tl.where(is_up, _read(up_scales_ptr + at, at, 0, END, MASKED, ""), scales)
    return scales


@triton.jit
def _read_block(
    w_tile,
    norm_weight_ptr,
    norm_bias_ptr,
    columns,
    start,
    K: tl.constexpr,
    MASKED: tl.constexpr,
    EVICTION: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load the weight of a block of columns, and the norm's weight and bias if there are any."""
    w = _read(w_tile, columns, start, K, MASKED, EVICTION)
    scale, shift = w, w
    if NORM != "none":
        scale = _read(norm_weight_ptr + columns, columns, start, K, MASKED, "")
    if NORM == "layer":
        shift = _read(norm_bias_ptr + columns, columns, start, K, MASKED, "")
    return w, scale, shift


@triton.jit
def _add_block(
    sums,
    squares,
    x,
    w,
    w_scales,
    scale,
    shift,
    mean,
    rstd,
    DOT: tl.constexpr,
    NORM: tl.constexpr,
    LATE: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Add a block's products to the sums and, for a LATE norm, the squares of x to theirs."""
    if DOT:
        w = tl.trans(_widen(w, x), (0, 2, 1))
    if NORM != "none":
        x = x.to(tl.float32)
        if LATE:
            squares += _fold(x * x, GROUP)
            x = x * scale.to(tl.float32)
        else:
            x = (x - mean) * rstd * scale.to(tl.float32)
        if NORM == "layer":
            x += shift.to(tl.float32)
    if DOT:
        x = x.to(w.dtype)
        sums = sums + tl.dot(x, w) * w_scales if BLOCK_SCALED else tl.dot(x, w, sums)
    else:
        products = _fold(x.to(tl.float32) * w.to(tl.float32), GROUP)
        sums += products * w_scales if BLOCK_SCALED else products
    return sums, squares


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
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
    DOT: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    PRELOAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVICTION: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    SCALES: tl.constexpr,
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
):
    """Compute, in program i, outputs i * BLOCK_N and following of all rows. See `skinny_linear`."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    # RMSNorm divides a row by one number, so the division can follow the products. Not in float16: a large residual
    # times the norm's weight may exceed its range.
    NARROW: tl.constexpr = w_ptr.dtype.element_ty == tl.float8e4nv
    LATE: tl.constexpr = NORM == "rms" and (x_ptr if NARROW else w_ptr).dtype.element_ty != tl.float16
    # Columns whose products one thread sums at once: those of a load of 16 bytes.
    GROUP: tl.constexpr = 16 if NARROW and not DOT else 8
    BLOCK_SCALED: tl.constexpr = SCALES == "block"
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    program = tl.program_id(0)
    if sums_ptr is not None:
        leading = rows * (COLUMNS // LEAD)
        if program < leading:
            lead(
                program, tl.arange(0, CHUNK), rows, lead_x_ptr, norm_weight_ptr, norm_bias_ptr, stride_x, eps, sums_ptr,
                slots_ptr, ranks_ptr, a_ptr, arrived_ptr, K, NORM, RANK, COLUMNS, LEAD, OVERLAP,
            )  # fmt: skip
            return
        program -= leading
    first = program * BLOCK_N
    m = tl.arange(0, ROWS)
    if sums_ptr is not None:
        slots = read_slots(m, rows, slots_ptr)
    if PREFETCH > 0:
        count = tl.minimum(width - first, BLOCK_N)
        SIZE: tl.constexpr = 1 if NARROW else 2
        prefetch_rows(w_ptr + first.to(tl.int64) * K, count, K * SIZE, PREFETCH * SIZE)
        if GATED:
            prefetch_rows(w_ptr + (width + first).to(tl.int64) * K, count, K * SIZE, PREFETCH * SIZE)
    # Rows past the end are read as copies of the last one, and not written. If gated, up's rows follow the gate's.
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    tile_n = tl.arange(0, TILE_N)
    w_rows = tl.minimum(first + tile_n % BLOCK_N, width - 1) + tile_n // BLOCK_N * width
    slice_starts = tl.arange(0, SLICES) * (BLOCK_K // SLICES)
    k = (slice_starts[:, None] + tl.arange(0, BLOCK_K // SLICES)[None, :])[:, None, :]
    w_tile = w_ptr + w_rows.to(tl.int64)[None, :, None] * K + k
    if BLOCK_SCALED:
        BLOCKS: tl.constexpr = (K + 127) // 128
        gate_scales = scales_ptr + first // 128 * BLOCKS
        up_scales = scales_ptr + (width + first) // 128 * BLOCKS
        is_up = tile_n >= BLOCK_N
        if DOT:
            is_up, groups = is_up[None, None, :], slice_starts[:, None, None]
        else:
            is_up, groups = is_up[None, :, None], (tl.arange(0, BLOCK_K // GROUP) * GROUP)[None, None, :]
    if PRELOAD:
        factors = 1.0
        if BLOCK_SCALED:
            factors = _read_scales(gate_scales, up_scales, is_up, groups, 0, K, MASKED, GATED)
        w, scale, shift = _read_block(w_tile, norm_weight_ptr, norm_bias_ptr, k, 0, K, MASKED, EVICTION, NORM)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + w_rows).to(tl.float32)
    if SCALES == "channel":
        row_scales = tl.load(scales_ptr + w_rows)
    if sums_ptr is not None:
        ranks, leads = read_ranks(slots, ranks_ptr, RANK, COLUMNS, LEAD)
        starts = tl.load(starts_ptr + w_rows)

    # From here on, results of earlier kernels may be read, and their inputs overwritten.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = first + tl.arange(0, BLOCK_N)
    writable = (m < rows)[:, None] & (n < width)[None, :]
    if HAS_RESIDUAL:
        residual_tile = residual_ptr + m.to(tl.int64)[:, None] * stride_residual + n[None, :]
        residual = tl.load(residual_tile, mask=writable, other=0.0).to(tl.float32)
    x_rows = x_ptr + tl.minimum(m, rows - 1).to(tl.int64) * stride_x
    mean, rstd = 0.0, 1.0
    if NORM != "none" and not LATE:
        mean, rstd = _statistics(x_rows, eps, ROWS, K, BLOCK_K, MASKED, NORM == "layer")
        mean, rstd = _along_rows(mean, DOT), _along_rows(rstd, DOT)
    x_tile = _along_rows(x_rows, DOT) + k
    if DOT:
        sums = tl.zeros([SLICES, ROWS, TILE_N], tl.float32)
        squares = tl.zeros([SLICES, ROWS, BLOCK_K // SLICES // GROUP], tl.float32)
    else:
        sums = tl.zeros([ROWS, TILE_N, BLOCK_K // GROUP], tl.float32)
        squares = tl.zeros([ROWS, 1, BLOCK_K // GROUP], tl.float32)
    if PRELOAD:
        x = _read(x_tile, k, 0, K, MASKED, "")
    if sums_ptr is not None:
        outs = 2 * width if GATED else width
        lora_b = read_b(slots, ranks, w_rows, outs, b_ptr, RANK, PLACES)
        ready = arrived_of(arrived_ptr) >= leads
        lora_s = read_sums(lora_b, ready, ranks, m, starts, sums_ptr, PLACES, COLUMNS)
    if PRELOAD:
        sums, squares = _add_block(
            sums, squares, x, w, factors, scale, shift, mean, rstd, DOT, NORM, LATE, BLOCK_SCALED, GROUP
        )
    for start in tl.range(BLOCK_K if PRELOAD else 0, K, BLOCK_K, num_stages=STAGES):
        factors = 1.0
        if BLOCK_SCALED:
            factors = _read_scales(gate_scales, up_scales, is_up, groups, start, K, MASKED, GATED)
        w, scale, shift = _read_block(w_tile, norm_weight_ptr, norm_bias_ptr, k, start, K, MASKED, EVICTION, NORM)
        x = _read(x_tile, k, start, K, MASKED, "")
        sums, squares = _add_block(
            sums, squares, x, w, factors, scale, shift, mean, rstd, DOT, NORM, LATE, BLOCK_SCALED, GROUP
        )

    result = tl.sum(sums, 0 if DOT else 2)
    if LATE:
        mean_square = tl.sum(tl.sum(squares, 2), 0 if DOT else 1) / K
        result *= tl.rsqrt(mean_square + eps)[:, None]
    if SCALES == "channel":
        result *= row_scales[None, :]
    if HAS_BIAS:
        result += bias[None, :]
    if HAS_RESIDUAL and ACTIVATION == "none":  # in the same order as without adapters: it may be one operation
        result += residual
    if sums_ptr is not None:
        if not ready:
            wait_for_sums(leads, arrived_ptr)
            lora_s = read_sums(lora_b, True, ranks, m, starts, sums_ptr, PLACES, COLUMNS)
        result = add_delta(
            result, lora_b, lora_s, slots, ranks, starts, w_rows, m, outs, sums_ptr, b_ptr, RANK, PLACES, COLUMNS
        )
        leave(program == 0, tl.num_programs(0) - leading, leads, arrived_ptr)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, [ROWS, 2, BLOCK_N]), (0, 2, 1)))
        result = activate(gate, ACTIVATION) * up
    else:
        result = activate(result, ACTIVATION)
    if HAS_RESIDUAL and ACTIVATION != "none":
        result += residual
    out_tile = out_ptr + m.to(tl.int64)[:, None] * stride_out + n[None, :]
    tl.store(out_tile, result.to(out_ptr.dtype.element_ty), mask=writable)
