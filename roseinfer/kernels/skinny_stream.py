"""The Triton kernel of `skinny_linear` for a row or two: programs that stay, and stream the weight past the input.

A program per tile prepares the input, which is converted, normed and spread over the threads, for a few rows of weight
only: with a weight of 8 bits that takes longer than to multiply. Here a program prepares it once, keeps it in
registers, and takes tile after tile. Products and sums are float32, elementwise; tiles have the dimensions rows of the
input, rows of the weight, columns.
"""

from roseinfer.kernels.activation import activate
from roseinfer.kernels.skinny_kernel import _fold, _prefetch, _read, _read_scales
from roseinfer.kernels.triton_support import tl, triton


@triton.jit
def _weight_rows(tile, width, BLOCK_N: tl.constexpr, TILE_N: tl.constexpr):
    """Rows past the end are copies of the last one. Gated, up's rows follow the gate's."""
    n = tl.arange(0, TILE_N)
    return tl.minimum(tile * BLOCK_N + n % BLOCK_N, width - 1) + n // BLOCK_N * width


@triton.jit
def _prefetch_tile(w_ptr, tile, width, K: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr, GATED: tl.constexpr):
    """Ask for a tile of elements of SIZE bytes to be brought into the L2 cache, if there is such a tile."""
    first = tile * BLOCK_N
    count = tl.minimum(width - first, BLOCK_N)
    _prefetch(w_ptr + first.to(tl.int64) * K, count, K * SIZE, K * SIZE)
    if GATED:
        _prefetch(w_ptr + (width + first).to(tl.int64) * K, count, K * SIZE, K * SIZE)


@triton.jit
def _read_tile(
    w_ptr,
    scales_ptr,
    tile,
    chunk: tl.constexpr,
    width,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVICTION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_SCALED: tl.constexpr,
):
    """One of the chunks of columns of a tile, and the scales of its groups of columns."""
    MASKED: tl.constexpr = K % BLOCK_K != 0
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    rows = _weight_rows(tile, width, BLOCK_N, TILE_N).to(tl.int64)[None, :, None]
    w = _read(w_ptr + rows * K + columns, columns, chunk * BLOCK_K, K, MASKED, EVICTION)
    scales = 1.0
    if BLOCK_SCALED:
        BLOCKS: tl.constexpr = (K + 127) // 128
        first = tile * BLOCK_N
        gate, up = scales_ptr + first // 128 * BLOCKS, scales_ptr + (width + first) // 128 * BLOCKS
        is_up = (tl.arange(0, TILE_N) >= BLOCK_N)[None, :, None]
        groups = (tl.arange(0, BLOCK_K // GROUP) * GROUP)[None, None, :]
        scales = _read_scales(gate, up, is_up, groups, chunk * BLOCK_K, K, MASKED, GATED)
    return w, scales


@triton.jit
def _finish(
    sums,
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
):
    """What follows the product of a tile."""
    result = tl.sum(sums, 2) * rstd
    w_rows = _weight_rows(tile, width, BLOCK_N, 2 * BLOCK_N if GATED else BLOCK_N)
    if CHANNEL_SCALED:
        result *= tl.load(scales_ptr + w_rows)[None, :]
    if HAS_BIAS:
        result += tl.load(bias_ptr + w_rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, [ROWS, 2, BLOCK_N]), (0, 2, 1)))
        result = activate(gate, ACTIVATION) * up
    else:
        result = activate(result, ACTIVATION)
    m = tl.arange(0, ROWS)[:, None]
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    writable = (m < rows) & (n < width)
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + m.to(tl.int64) * stride_residual + n, mask=writable, other=0.0).to(tl.float32)
    tl.store(out_ptr + m.to(tl.int64) * stride_out + n, result.to(out_ptr.dtype.element_ty), mask=writable)


@triton.jit
def _read_chunks(pointers, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """All K columns of the rows that `pointers` [rows, 1, 1] begin, in float32: a tuple of chunks of BLOCK_K."""
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    chunks = ()
    for chunk in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        values = _read(pointers + columns, columns, chunk * BLOCK_K, K, K % BLOCK_K != 0, "")
        chunks += (values.to(tl.float32),)
    return chunks


@triton.jit
def _sum_of_squares(xs, GROUP: tl.constexpr):
    """Of the chunks together, not yet of the columns: [ROWS, 1, BLOCK_K / GROUP]."""
    squares = _fold(xs[0] * xs[0], GROUP)
    for chunk in tl.static_range(1, len(xs)):
        squares += _fold(xs[chunk] * xs[chunk], GROUP)
    return squares


@triton.jit
def _centre(xs, K: tl.constexpr):
    """The chunks less their rows' means; zero past column K."""
    BLOCK_K: tl.constexpr = xs[0].shape[2]
    columns = tl.arange(0, BLOCK_K)[None, None, :]
    total = tl.sum(xs[0], 2, keep_dims=True)
    for chunk in tl.static_range(1, len(xs)):
        total += tl.sum(xs[chunk], 2, keep_dims=True)
    centred = ()
    for chunk in tl.static_range(len(xs)):
        centred += (tl.where(columns + chunk * BLOCK_K < K, xs[chunk] - total / K, 0.0),)
    return centred


@triton.jit
def _scale_and_shift(xs, factor, weight, bias, SHIFT: tl.constexpr):
    """xs * factor * weight (+ bias), chunk by chunk."""
    result = ()
    for chunk in tl.static_range(len(xs)):
        x = xs[chunk] * factor * weight[chunk]
        result += (x + bias[chunk] if SHIFT else x,)
    return result


@triton.jit(do_not_specialize=["rows"])
def skinny_stream_kernel(
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
    PREFETCH: tl.constexpr,
    EVICTION: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    SCALES: tl.constexpr,
):
    """See `skinny_linear`. Program i of p computes tiles i, i + p, ... of BLOCK_N outputs, of all rows."""
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    SIZE: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
    GROUP: tl.constexpr = 16 // SIZE  # columns whose products a thread sums up at once: of a load of 16 bytes
    BLOCK_SCALED: tl.constexpr = SCALES == "block"
    CHANNEL_SCALED: tl.constexpr = SCALES == "channel"
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    tile = tl.program_id(0)
    step = tl.num_programs(0)
    tiles = tl.cdiv(width, BLOCK_N)
    w, scales = _read_tile(w_ptr, scales_ptr, tile, 0, width, K, BLOCK_N, BLOCK_K, GROUP, EVICTION, GATED, BLOCK_SCALED)
    for ahead in tl.static_range(1, PREFETCH + 1):
        _prefetch_tile(w_ptr, tile + ahead * step, width, K, SIZE, BLOCK_N, GATED)
    norm_weight, norm_bias = (), ()
    if NORM != "none":
        norm_weight = _read_chunks(norm_weight_ptr + tl.zeros([1, 1, 1], tl.int32), K, BLOCK_K)
    if NORM == "layer":
        norm_bias = _read_chunks(norm_bias_ptr + tl.zeros([1, 1, 1], tl.int32), K, BLOCK_K)

    # Only from here on may what earlier kernels wrote be read, and what they read be overwritten.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    m = tl.minimum(tl.arange(0, ROWS), rows - 1)  # rows past the end are copies of the last one, and not written
    xs = _read_chunks(x_ptr + (m.to(tl.int64) * stride_x)[:, None, None], K, BLOCK_K)
    if NORM == "layer":
        xs = _centre(xs, K)
        rstd = tl.rsqrt(tl.sum(_sum_of_squares(xs, GROUP), 2, keep_dims=True) / K + eps)
        xs = _scale_and_shift(xs, rstd, norm_weight, norm_bias, True)
    if NORM == "rms":
        squares = _sum_of_squares(xs, GROUP)
        xs = _scale_and_shift(xs, 1.0, norm_weight, norm_bias, False)

    sums = tl.zeros([ROWS, TILE_N, BLOCK_K // GROUP], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk > 0:
            w, scales = _read_tile(
                w_ptr, scales_ptr, tile, chunk, width, K, BLOCK_N, BLOCK_K, GROUP, EVICTION, GATED, BLOCK_SCALED
            )
        sums += _fold(xs[chunk] * w.to(tl.float32), GROUP) * scales
    # An RMSNorm divides a row by one number, which can wait until here, off the path to the first product.
    factor = 1.0
    if NORM == "rms":
        factor = tl.rsqrt(tl.sum(tl.sum(squares, 2), 1) / K + eps)[:, None]
    _finish(
        sums, factor, tile, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, width, stride_residual, stride_out,
        ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, CHANNEL_SCALED,
    )  # fmt: skip
    for later in tl.range(tile + step, tiles, step, num_stages=STAGES):
        if PREFETCH > 0:
            _prefetch_tile(w_ptr, later + PREFETCH * step, width, K, SIZE, BLOCK_N, GATED)
        sums = tl.zeros([ROWS, TILE_N, BLOCK_K // GROUP], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            w, scales = _read_tile(
                w_ptr, scales_ptr, later, chunk, width, K, BLOCK_N, BLOCK_K, GROUP, EVICTION, GATED, BLOCK_SCALED
            )
            sums += _fold(xs[chunk] * w.to(tl.float32), GROUP) * scales
        _finish(
            sums, factor, later, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, width, stride_residual, stride_out,
            ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, CHANNEL_SCALED,
        )  # fmt: skip
