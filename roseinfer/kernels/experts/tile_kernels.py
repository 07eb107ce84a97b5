"""Triton kernels of `tiles`.

A program takes a tile of rows, all of one expert, and some of that expert's outputs. Few rows are the short side of the
matrix units (`WEIGHT_FIRST`), so that they do not leave them idle. A tile may end with rows of the next expert, which
are computed and not written.

SCALES: "none" for weights in 16 bits. With codes of 8 bits both factors are codes. Each row of the input has a scale
for each 128 columns, and the weight has one for each block of 128 x 128 ("block") or for each row ("channel"). "mxfp4",
"int4" and "nvfp4": the weight has four bits, which are widened to the input's 16. GROUP: columns in four bits that
share a scale, or in NVFP4 a word of them; else 0. factors_ptr: scales by channel, or factors of rows in NVFP4.
"""

from roseinfer.kernels.common.matrix_units import end_products
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.int4_weights import read_scales
from roseinfer.kernels.experts.int4_weights import widened as widened_int4
from roseinfer.kernels.experts.mxfp4_weights import SUMS_FACTOR, widened
from roseinfer.kernels.experts.nvfp4_weights import widened_nvfp4
from roseinfer.kernels.linear.activation import activate_gated
from roseinfer.kernels.linear.fp8_rows import code_of, scale_of


@triton.jit
def _add_product(sums, x, w, scale, SCALES: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """Return sums + x @ w.T, for codes times `scale` [rows of x]; sums are transposed if WEIGHT_FIRST."""
    if SCALES != "channel" and SCALES != "block":
        if WEIGHT_FIRST:
            return tl.dot(w, tl.trans(x), sums)
        else:
            return tl.dot(x, tl.trans(w), sums)
    elif WEIGHT_FIRST:
        return sums + tl.dot(w, tl.trans(x)) * scale[None, :]
    else:
        return sums + tl.dot(x, tl.trans(w)) * scale[:, None]


@triton.jit
def _early_scales(
    scales_ptr, row, k, rows, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALES: tl.constexpr
):
    """Return the scales in MXFP4 or NVFP4 of a block from row `row` and column k on, 0 for other kinds. rows: left of
    the expert's.

    They are too small for the copy engine, so they are loaded a turn ahead.
    """
    if SCALES == "mxfp4" or SCALES == "nvfp4":
        n, group = tl.arange(0, BLOCK_N), k // 32 + tl.arange(0, BLOCK_K // 32)
        inside = (n < rows)[:, None] & (group < K // 32)[None, :]
        return tl.load(scales_ptr + (row + n)[:, None] * (K // 32) + group[None, :], mask=inside, other=0)
    else:
        return tl.full([], 0, tl.uint8)


@triton.jit
def _read_w(
    w_blocks, scales_ptr, scales, row, k, rows, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SCALES: tl.constexpr, DTYPE: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Return a block of the weight as `_add_product` takes it, from row `row` and column k on. scales: the block's of
    `_early_scales`. rows: left of the expert's.
    """
    if SCALES == "mxfp4":
        return widened(w_blocks.load([row, k // 8]), scales, DTYPE, COMPILED)
    elif SCALES == "nvfp4":
        return widened_nvfp4(w_blocks.load([row, k // 8]), scales, DTYPE, COMPILED)
    elif SCALES == "int4":
        n = row + tl.minimum(tl.arange(0, BLOCK_N), rows - 1)
        both = read_scales(scales_ptr, n, k, K, GROUP, BLOCK_K)
        return widened_int4(w_blocks.load([row, k // 8]), both, DTYPE, COMPILED)
    else:
        return w_blocks.load([row, k])


@triton.jit
def _of_block(scales_ptr, row, step, BLOCK_K: tl.constexpr, K: tl.constexpr, SCALES: tl.constexpr):
    """Return the weight's scale for row `row` and the block of columns `step`; 1 unless scales are by blocks."""
    if SCALES == "block":
        return tl.load(scales_ptr + row // 128 * (K // 128) + step * BLOCK_K // 128)
    else:
        return 1.0


@triton.jit
def _rows_first(sums, factors_ptr, outs, inside, SCALES: tl.constexpr, WEIGHT_FIRST: tl.constexpr, EXACT: tl.constexpr):
    """Return the sums of a tile as [rows of x, outputs], times the factor of each output if it has one.

    EXACT: widened numbers are as in MXFP4.
    """
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
    if SCALES == "mxfp4" and not EXACT:
        sums *= SUMS_FACTOR
    if factors_ptr is not None:
        sums *= tl.load(factors_ptr + outs, mask=inside, other=0.0)[None, :]
    return sums


@triton.jit
def _own_tile(tiles_ptr, places, BLOCK_N: tl.constexpr):
    """Return this program's expert, its first row, the end of the expert's rows, and its first output."""
    place = tl.program_id(1)
    first_n = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * BLOCK_N
    first, end = tl.load(tiles_ptr + places + place), tl.load(tiles_ptr + 2 * places + place)
    return tl.load(tiles_ptr + place), first, end, first_n


@triton.jit(do_not_specialize=["places", "x_scale_stride", "h_scale_stride"])
def gate_up_kernel(
    x,
    x_scales_ptr,
    w_blocks,
    w_scales_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    h_ptr,
    h_scales_ptr,
    places,
    x_stride,
    x_scale_stride,
    h_scale_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    GATHER: tl.constexpr,
    HALVES: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
    factors_ptr=None,
):
    """Compute h = activation(x @ gate.T) * (x @ up.T), rows in the order of `pairs`.

    Program (i, place, group): outputs of the hidden layer, a tile, and outputs again. A tile's programs run one after
    another, so that they find its rows in the L2 cache, and tiles of an expert find its weight. x: a pointer to tokens'
    rows if GATHER, else a descriptor of sorted rows.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    expert, first, end, first_n = _own_tile(tiles_ptr, places, BLOCK_N)
    if first < end and first_n < N:
        # The empty half of a tile is not computed.
        if HALVES and end - first <= BLOCK_M // 2:
            _gate_up_tile(
                x, x_scales_ptr, w_blocks, w_scales_ptr, bias_ptr, pairs_ptr, h_ptr, h_scales_ptr, expert, first, end,
                first_n, x_stride, x_scale_stride, h_scale_stride, TOP_K, N, K, GROUP, BLOCK_M // 2, BLOCK_N, BLOCK_K,
                STAGES, SCALES, ACTIVATION, HAS_BIAS, WEIGHT_FIRST, GATHER, COMPILED, OVERLAP,
                factors_ptr,
            )  # fmt: skip
        else:
            _gate_up_tile(
                x, x_scales_ptr, w_blocks, w_scales_ptr, bias_ptr, pairs_ptr, h_ptr, h_scales_ptr, expert, first, end,
                first_n, x_stride, x_scale_stride, h_scale_stride, TOP_K, N, K, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                STAGES, SCALES, ACTIVATION, HAS_BIAS, WEIGHT_FIRST, GATHER, COMPILED, OVERLAP,
                factors_ptr,
            )  # fmt: skip


@triton.jit
def _gate_up_tile(
    x, x_scales_ptr, w_blocks, w_scales_ptr, bias_ptr, pairs_ptr, h_ptr, h_scales_ptr, expert, first, end, first_n,
    x_stride, x_scale_stride, h_scale_stride, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SCALES: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
    GATHER: tl.constexpr, COMPILED: tl.constexpr, OVERLAP: tl.constexpr, factors_ptr,
):  # fmt: skip
    row = first + tl.arange(0, BLOCK_M)
    there = row < end
    source = row
    if GATHER:
        source = tl.load(pairs_ptr + row, mask=there, other=0) // TOP_K
    column = tl.arange(0, BLOCK_K)
    gate_row = expert * (2 * N) + first_n
    up_row = gate_row + N
    HEIGHT: tl.constexpr = BLOCK_N if WEIGHT_FIRST else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if WEIGHT_FIRST else BLOCK_N
    gate, up = tl.zeros([HEIGHT, WIDTH], tl.float32), tl.zeros([HEIGHT, WIDTH], tl.float32)
    left = N - first_n
    gate_scales = _early_scales(w_scales_ptr, gate_row, 0, left, K, BLOCK_N, BLOCK_K, SCALES)
    up_scales = _early_scales(w_scales_ptr, up_row, 0, left, K, BLOCK_N, BLOCK_K, SCALES)
    for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if COMPILED and WEIGHT_FIRST and GROUP > 0:
            end_products()
        k = step * BLOCK_K
        if GATHER:
            at = x + source.to(tl.int64)[:, None] * x_stride + (k + column)[None, :]
            if K % BLOCK_K == 0:
                rows = tl.load(at, mask=there[:, None], other=0.0)
            else:
                rows = tl.load(at, mask=there[:, None] & (k + column < K)[None, :], other=0.0)
        else:
            rows = x.load([first, k])
        gate_w = _read_w(
            w_blocks, w_scales_ptr, gate_scales, gate_row, k, left, K, GROUP, BLOCK_N, BLOCK_K, SCALES, rows.dtype,
            COMPILED,
        )  # fmt: skip
        up_w = _read_w(
            w_blocks, w_scales_ptr, up_scales, up_row, k, left, K, GROUP, BLOCK_N, BLOCK_K, SCALES, rows.dtype, COMPILED
        )
        gate_scales = _early_scales(w_scales_ptr, gate_row, k + BLOCK_K, left, K, BLOCK_N, BLOCK_K, SCALES)
        up_scales = _early_scales(w_scales_ptr, up_row, k + BLOCK_K, left, K, BLOCK_N, BLOCK_K, SCALES)
        scale = 1.0
        if SCALES == "channel" or SCALES == "block":
            scale = tl.load(x_scales_ptr + k // 128 * x_scale_stride + source, mask=there, other=0.0)
        gate_scale = scale * _of_block(w_scales_ptr, gate_row, step, BLOCK_K, K, SCALES)
        up_scale = scale * _of_block(w_scales_ptr, up_row, step, BLOCK_K, K, SCALES)
        gate = _add_product(gate, rows, gate_w, gate_scale, SCALES, WEIGHT_FIRST)
        up = _add_product(up, rows, up_w, up_scale, SCALES, WEIGHT_FIRST)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # not earlier: successors would take the room of the many programs
    n = first_n + tl.arange(0, BLOCK_N)
    inside = n < N
    EXACT: tl.constexpr = not COMPILED or h_ptr.dtype.element_ty != tl.bfloat16
    gate = _rows_first(gate, factors_ptr, expert * (2 * N) + n, inside, SCALES, WEIGHT_FIRST, EXACT)
    up = _rows_first(up, factors_ptr, expert * (2 * N) + N + n, inside, SCALES, WEIGHT_FIRST, EXACT)
    if HAS_BIAS:
        bias = bias_ptr + expert * (2 * N) + n
        gate += tl.load(bias, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + N, mask=inside, other=0.0).to(tl.float32)[None, :]
    h = activate_gated(gate, up, ACTIVATION)
    if SCALES == "channel" or SCALES == "block":
        largest = scale_of(tl.max(tl.abs(h), 1))
        tl.store(h_scales_ptr + first_n // 128 * h_scale_stride + row, largest, mask=there)
        h = code_of(h, largest[:, None])
    at = h_ptr + row.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, h.to(h_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["places", "x_scale_stride"])
def down_kernel(
    x_blocks,
    half_blocks,
    x_scales_ptr,
    w_blocks,
    w_scales_ptr,
    bias_ptr,
    pairs_ptr,
    tiles_ptr,
    weights_ptr,
    out_ptr,
    places,
    x_scale_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
    factors_ptr=None,
):
    """Compute out = weight * (x @ down.T), x sorted, out and weights in the order of tokens; programs as above."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    expert, first, end, first_n = _own_tile(tiles_ptr, places, BLOCK_N)
    if first < end and first_n < N:
        if HALVES and end - first <= BLOCK_M // 2:
            _down_tile(
                half_blocks, x_scales_ptr, w_blocks, w_scales_ptr, bias_ptr, pairs_ptr, weights_ptr, out_ptr, expert,
                first, end, first_n, x_scale_stride, N, K, GROUP, BLOCK_M // 2, BLOCK_N, BLOCK_K, STAGES, SCALES,
                HAS_BIAS, WEIGHT_FIRST, COMPILED, OVERLAP, factors_ptr,
            )  # fmt: skip
        else:
            _down_tile(
                x_blocks, x_scales_ptr, w_blocks, w_scales_ptr, bias_ptr, pairs_ptr, weights_ptr, out_ptr, expert,
                first, end, first_n, x_scale_stride, N, K, GROUP, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SCALES,
                HAS_BIAS, WEIGHT_FIRST, COMPILED, OVERLAP, factors_ptr,
            )  # fmt: skip


@triton.jit
def _down_tile(
    x_blocks, x_scales_ptr, w_blocks, w_scales_ptr, bias_ptr, pairs_ptr, weights_ptr, out_ptr, expert, first, end,
    first_n, x_scale_stride, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, HAS_BIAS: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, COMPILED: tl.constexpr, OVERLAP: tl.constexpr, factors_ptr,
):  # fmt: skip
    row = first + tl.arange(0, BLOCK_M)
    there = row < end
    w_row = expert * N + first_n
    HEIGHT: tl.constexpr = BLOCK_N if WEIGHT_FIRST else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if WEIGHT_FIRST else BLOCK_N
    sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
    left = N - first_n
    scales = _early_scales(w_scales_ptr, w_row, 0, left, K, BLOCK_N, BLOCK_K, SCALES)
    for step in tl.range(0, (K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
        if COMPILED and WEIGHT_FIRST and GROUP > 0:
            end_products()
        k = step * BLOCK_K
        x = x_blocks.load([first, k])
        w = _read_w(
            w_blocks, w_scales_ptr, scales, w_row, k, left, K, GROUP, BLOCK_N, BLOCK_K, SCALES, x.dtype, COMPILED
        )
        scales = _early_scales(w_scales_ptr, w_row, k + BLOCK_K, left, K, BLOCK_N, BLOCK_K, SCALES)
        scale = 1.0
        if SCALES == "channel" or SCALES == "block":
            scale = tl.load(x_scales_ptr + k // 128 * x_scale_stride + row, mask=there, other=0.0)
            scale *= _of_block(w_scales_ptr, w_row, step, BLOCK_K, K, SCALES)
        sums = _add_product(sums, x, w, scale, SCALES, WEIGHT_FIRST)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    n = first_n + tl.arange(0, BLOCK_N)
    inside = n < N
    EXACT: tl.constexpr = not COMPILED or out_ptr.dtype.element_ty != tl.bfloat16
    sums = _rows_first(sums, factors_ptr, expert * N + n, inside, SCALES, WEIGHT_FIRST, EXACT)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + expert * N + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(pairs_ptr + row, mask=there, other=0)
    sums *= tl.load(weights_ptr + pair, mask=there, other=0.0)[:, None]
    at = out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def sum_kernel(
    parts_ptr,
    out_ptr,
    stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the sum of a token's parts, in their order, and of out's old value if that is a residual.

    Program (token, columns). EARLY: the next kernel has room beside all programs.
    """
    if OVERLAP:
        if EARLY:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    sums = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        sums += tl.load(parts_ptr + (token * TOP_K + j) * N + column, mask=inside, other=0.0).to(tl.float32)
    at = out_ptr + token * stride + column
    if HAS_RESIDUAL:
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "scale_stride", "out_scale_stride"])
def spread_kernel(
    x_ptr,
    scales_ptr,
    pairs_ptr,
    out_ptr,
    out_scales_ptr,
    tokens,
    stride,
    scale_stride,
    out_scale_stride,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Copy the row of each program's pair's token, and its scales if it has GROUPS of them."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    # A row without a pair contains an arbitrary number.
    token = tl.minimum(tl.maximum(tl.load(pairs_ptr + row) // TOP_K, 0), tokens - 1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for start in tl.static_range(0, N, BLOCK):
        inside = start + column < N
        x = tl.load(x_ptr + token * stride + start + column, mask=inside)
        tl.store(out_ptr + row * N + start + column, x, mask=inside)
    if GROUPS > 0:
        group = tl.arange(0, GROUPS)
        scales = tl.load(scales_ptr + group * scale_stride + token, mask=group < N // 128)
        tl.store(out_scales_ptr + group * out_scale_stride + row, scales, mask=group < N // 128)
