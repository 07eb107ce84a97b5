"""The Triton kernel of `skinny_linear` for a row or two by a weight in FP8, multiplied in pairs of float16.

What bounds one row is not memory but instructions: a code takes three to be widened to float32 and multiplied. The GPU
widens two codes to float16 at once, and multiplies and adds such pairs, in one and a half. Float16 holds every code.
So that it holds x as well, each 16 columns of it are divided by the largest of them; their products, 448 each at most,
are summed up in float16, eight of them to one half of a pair, and all else in float32. Sums of 11 bits lose no more
than an x of 8 bits has lost.

Tensors have the dimensions groups of 16 columns, rows of x, rows of the weight, places in a group; a thread holds all
places of a group, which are one load of 16 bytes. A program prepares x once and keeps it in registers; that takes long
enough that programs may better stay and take tile after tile.
"""

from roseinfer.kernels.activation import activate
from roseinfer.kernels.triton_support import tl, triton


@triton.jit
def _pack(low, high):
    """Two float32 as a pair of float16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _dot_of_four(w, x01, x23):
    """Four codes by two pairs: the sums of columns 0 and 2, and of 1 and 3, as a pair."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .b32 w01, w23;
        mov.b32 {low, high}, $1;
        cvt.rn.f16x2.e4m3x2 w01, low;
        cvt.rn.f16x2.e4m3x2 w23, high;
        mul.rn.f16x2 w01, w01, $2;
        fma.rn.f16x2 $0, w23, $3, w01;
        }""",
        "=r,r,r,r",
        [w, x01, x23],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _add_pairs(a, b):
    return tl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _sum_of_pair(pair):
    """float32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        .reg .f32 a, b;
        mov.b32 {low, high}, $1;
        cvt.f32.f16 a, low;
        cvt.f32.f16 b, high;
        add.f32 $0, a, b;
        }""",
        "=f,r",
        [pair],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _read_halves(pointers, BLOCK_K: tl.constexpr):
    """Columns 0 to 7 of each 16, and 8 to 15: [BLOCK_K / 16, R, 1, 8] float32 each. pointers: [1, R, 1, 1], of rows."""
    at = pointers + (tl.arange(0, BLOCK_K // 16) * 16)[:, None, None, None] + tl.arange(0, 8)[None, None, None, :]
    return tl.load(at).to(tl.float32), tl.load(at + 8).to(tl.float32)


@triton.jit
def _pairs_of(half):
    """[G, R, 1, 8] float32 as pairs: columns 0 and 1 of each four, and 2 and 3, [G, R, 1, 2] int32 each."""
    even, odd = tl.split(tl.reshape(half, [half.shape[0], half.shape[1], 1, 2, 2, 2]))
    return tl.split(_pack(even, odd))


@triton.jit
def _behind_one_another(low, high):
    """What the halves of groups hold, [G, R, 1, n] each, as groups: [G, R, 1, 2 * n]."""
    both = tl.permute(tl.join(low, high), (0, 1, 2, 4, 3))
    return tl.reshape(both, [low.shape[0], low.shape[1], 1, 2 * low.shape[3]])


@triton.jit
def _narrow(low, high, COMPILED: tl.constexpr):
    """x / largest, pairs of it as `_dot_of_four` takes them, and largest: of each group, [G, R, 1].

    Not COMPILED, for the interpreter, which knows no such pairs: x / largest [G, R, 1, 16] float16, twice.
    """
    largest = tl.maximum(tl.maximum(tl.max(tl.abs(low), 3), tl.max(tl.abs(high), 3)), 1e-30)
    inverse = (1.0 / largest)[:, :, :, None]
    low, high = low * inverse, high * inverse
    if COMPILED:
        low01, low23 = _pairs_of(low)
        high01, high23 = _pairs_of(high)
        x01, x23 = _behind_one_another(low01, high01), _behind_one_another(low23, high23)
    else:
        x01 = _behind_one_another(low, high).to(tl.float16)
        x23 = x01
    return x01, x23, largest


@triton.jit
def _multiply(w, x01, x23, COMPILED: tl.constexpr):
    """The sums over each group, [G, R, N] float32."""
    if COMPILED:
        return _sum_of_pair(tl.reduce(_dot_of_four(w, x01, x23), 3, _add_pairs))
    else:
        return tl.sum(w.to(tl.float32) * x01.to(tl.float32), 3)


@triton.jit
def _weight_rows(tile, width, BLOCK_N: tl.constexpr, TILE_N: tl.constexpr):
    """Rows past the end are copies of the last one. Gated, up's rows follow the gate's."""
    n = tl.arange(0, TILE_N)
    return tl.minimum(tile * BLOCK_N + n % BLOCK_N, width - 1) + n // BLOCK_N * width


@triton.jit
def _read_tile(
    w_ptr, scales_ptr, tile, chunk: tl.constexpr, width, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVICTION: tl.constexpr, GATED: tl.constexpr, BLOCK_SCALED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One of the chunks of columns of a tile, four codes in an int32 if COMPILED, and the scales of its groups."""
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    group = tl.arange(0, BLOCK_K // 16)
    rows = _weight_rows(tile, width, BLOCK_N, TILE_N).to(tl.int64)[None, None, :, None]
    if COMPILED:
        at = w_ptr.to(tl.pointer_type(tl.int32)) + (rows * (K // 4) + chunk * (BLOCK_K // 4))
        at += (group * 4)[:, None, None, None] + tl.arange(0, 4)[None, None, None, :]
    else:
        at = w_ptr + (rows * K + chunk * BLOCK_K)
        at += (group * 16)[:, None, None, None] + tl.arange(0, 16)[None, None, None, :]
    w = tl.load(at, eviction_policy=EVICTION)
    scales = 1.0
    if BLOCK_SCALED:
        block = (group // 8)[:, None, None] + chunk * (BLOCK_K // 128)
        first = tile * BLOCK_N
        scales = tl.load(scales_ptr + first // 128 * (K // 128) + block)
        if GATED:
            is_up = (tl.arange(0, TILE_N) >= BLOCK_N)[None, None, :]
            scales = tl.where(is_up, tl.load(scales_ptr + (width + first) // 128 * (K // 128) + block), scales)
    return w, scales


@triton.jit
def _finish(
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
):
    """What follows the sums [ROWS, rows of the weight] of a tile."""
    result *= rstd
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
):
    """See `skinny_linear`. Program i of p computes tile i of BLOCK_N outputs, all rows; to STAY, then i + p, ..."""
    CHUNKS: tl.constexpr = K // BLOCK_K
    GROUPS: tl.constexpr = BLOCK_K // 16
    TILE_N: tl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    BLOCK_SCALED: tl.constexpr = SCALES == "block"
    CHANNEL_SCALED: tl.constexpr = SCALES == "channel"
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()

    tile = tl.program_id(0)
    step = tl.num_programs(0)
    tiles = tl.cdiv(width, BLOCK_N)
    w, scales = _read_tile(
        w_ptr, scales_ptr, tile, 0, width, K, BLOCK_N, BLOCK_K, EVICTION, GATED, BLOCK_SCALED, COMPILED
    )
    gains = ()
    if NORM == "rms":
        for chunk in tl.static_range(CHUNKS):
            gains += (_read_halves(norm_weight_ptr + chunk * BLOCK_K + tl.zeros([1, 1, 1, 1], tl.int32), BLOCK_K),)

    # Only from here on may what earlier kernels wrote be read, and what they read be overwritten.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    m = tl.minimum(tl.arange(0, ROWS), rows - 1)  # rows past the end are copies of the last one, and not written
    x_rows = x_ptr + (m.to(tl.int64) * stride_x)[None, :, None, None]
    xs = ()
    squares = tl.zeros([GROUPS, ROWS, 1], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        low, high = _read_halves(x_rows + chunk * BLOCK_K, BLOCK_K)
        if NORM == "rms":
            squares += tl.sum(low * low + high * high, 3)
            low, high = low * gains[chunk][0], high * gains[chunk][1]
        xs += (_narrow(low, high, COMPILED),)

    sums = tl.zeros([GROUPS, ROWS, TILE_N], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        if chunk > 0:
            w, scales = _read_tile(
                w_ptr, scales_ptr, tile, chunk, width, K, BLOCK_N, BLOCK_K, EVICTION, GATED, BLOCK_SCALED, COMPILED
            )
        sums += _multiply(w, xs[chunk][0], xs[chunk][1], COMPILED) * (xs[chunk][2] * scales)
    # An RMSNorm divides a row by one number, which can wait until here, off the path to the first product.
    factor = 1.0
    if NORM == "rms":
        factor = tl.rsqrt(tl.sum(squares, 0) / K + eps)
    _finish(
        tl.sum(sums, 0), factor, tile, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, width,
        stride_residual, stride_out, ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, CHANNEL_SCALED,
    )  # fmt: skip
    if STAY:
        for later in tl.range(tile + step, tiles, step, num_stages=STAGES):
            sums = tl.zeros([GROUPS, ROWS, TILE_N], tl.float32)
            for chunk in tl.static_range(CHUNKS):
                w, scales = _read_tile(
                    w_ptr, scales_ptr, later, chunk, width, K, BLOCK_N, BLOCK_K, EVICTION, GATED, BLOCK_SCALED, COMPILED
                )
                sums += _multiply(w, xs[chunk][0], xs[chunk][1], COMPILED) * (xs[chunk][2] * scales)
            _finish(
                tl.sum(sums, 0), factor, later, scales_ptr, bias_ptr, residual_ptr, out_ptr, rows, width,
                stride_residual, stride_out, ROWS, BLOCK_N, ACTIVATION, GATED, HAS_BIAS, HAS_RESIDUAL, CHANNEL_SCALED,
            )  # fmt: skip
