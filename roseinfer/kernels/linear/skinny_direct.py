"""Gluon kernel of `skinny_linear` for several rows: the weight goes from memory to the matrix units' registers.

Of a product on the matrix units a thread holds some columns of the weight's rows and the same columns of x's rows. Any
columns will do, as long as they are the same. So each thread takes adjacent ones, which are loads of 16 bytes, and
nothing passes through shared memory. Each warp multiplies a part of the columns. Codes of four bits are widened in
registers, in which they then lie as the matrix units want them (`int4_codes`).
"""

from roseinfer.kernels.common.gluon_support import ampere, gl, gluon
from roseinfer.kernels.common.triton_support import tl
from roseinfer.kernels.linear.activation import activate
from roseinfer.kernels.linear.int4_codes import WIDEN_BFLOAT16, WIDEN_FLOAT16
from roseinfer.kernels.linear.nvfp4_codes import pairs_of_words, scale_pairs
from roseinfer.kernels.lora.fused import arrived_of, lead, leave, read_ranks, read_slots, wait_for_sums

# Columns that a warp multiplies by at a time.
PIECE_COLUMNS: int = 128
MIN_TILE_ROWS = 8  # of x, that the matrix units take
PIECE: gl.constexpr = gl.constexpr(PIECE_COLUMNS)
# Places of an adapter's rank that a thread loads at once.
RANK_PIECE: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _index(SIZE: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Return 0 .. SIZE along dimension DIM of three."""
    if DIM == 0:
        i = gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(i, 1), 2)
    elif DIM == 1:
        i = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(i, 0), 2)
    else:
        i = gl.arange(0, SIZE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        return gl.expand_dims(gl.expand_dims(i, 0), 1)


@gluon.jit
def _load_weight(
    w_tile, scales_tile, scales_at, outs, chunk, PIECES: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr
):
    """Load the pieces of a chunk of columns, with the words of their scales if they are codes."""
    pieces = ()
    for i in gl.static_range(PIECES):
        if GROUP == 0:
            w = gl.load(w_tile + chunk * BLOCK_K + i * PIECE, eviction_policy="evict_first")
            pieces += ((w, 0),)
        else:
            w = gl.load(w_tile + (chunk * BLOCK_K + i * PIECE) // 2, eviction_policy="evict_first")
            pieces += ((w, gl.load(scales_tile + (scales_at + (chunk * BLOCK_K + i * PIECE)) // GROUP * outs)),)
    return pieces


@gluon.jit
def _int4_halves(codes, words, DTYPE: gl.constexpr):
    """Widen words of codes [WARPS, rows, 16, 4], with words of scales and shifts [WARPS, rows, 16]."""
    bits = gl.expand_dims(words, 3)
    scales = bits.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(DTYPE)
    shifts = (bits >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32).to(DTYPE)
    ASSEMBLY: gl.constexpr = WIDEN_BFLOAT16 if gl.bfloat16 == DTYPE else WIDEN_FLOAT16
    return gl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [codes, scales, shifts],
        dtype=(scales.dtype, scales.dtype),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _e2m1_halves(codes, words, DTYPE: gl.constexpr):
    """Widen words of codes [WARPS, rows, 16, 4], with words of scales [WARPS, rows, t]."""
    by_thread: gl.constexpr = words.type.layout.parent.parent
    codes = gl.reshape(codes, [words.shape[0], words.shape[1], 4, 4, 4])  # t, j, byte
    codes = gl.convert_layout(codes, by_thread, assert_trivial=True)
    j = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, by_thread)))))
    j = gl.expand_dims(gl.expand_dims(gl.expand_dims(j, 0), 1), 2)
    return pairs_of_words(codes, gl.expand_dims(scale_pairs(gl.expand_dims(words, 3), j, DTYPE), 4), DTYPE)


@gluon.jit
def _operand(
    piece, DTYPE: gl.constexpr, GROUP: gl.constexpr, E2M1: gl.constexpr, BYTES_OF_WORDS: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """Return a piece of the weight [WARPS, rows, PIECE] as the left side of a product."""
    w = piece[0]
    if GROUP > 0:
        w = gl.convert_layout(gl.reshape(w, [w.shape[0], w.shape[1], 16, 4]), BYTES_OF_WORDS, assert_trivial=True)
        low, high = _e2m1_halves(w, piece[1], DTYPE) if E2M1 else _int4_halves(w, piece[1], DTYPE)
        w = gl.reshape(gl.join(low, high), [w.shape[0], w.shape[1], 4, 4, 4, 2])
        w = gl.permute(w, (0, 1, 3, 2, 5, 4))  # j, t, half of eight, column
        w = gl.convert_layout(gl.reshape(w, [w.shape[0], w.shape[1], PIECE]), LEFT, assert_trivial=True)
    return w


@gluon.jit
def _rank_piece(tile, ranks, first, LAYOUT: gl.constexpr):
    """Load places of the rank from `first` on; zeros past a row's rank."""
    place = first + gl.arange(0, RANK_PIECE, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    place = gl.expand_dims(gl.expand_dims(gl.expand_dims(place, 0), 1), 2)
    at = gl.expand_dims(tile, 3) + place
    there = (place < gl.expand_dims(ranks, 3)) & (at.to(gl.int64) != 0)  # of the same shape as the pointers
    return gl.load(at, mask=there, other=0.0)


@gluon.jit
def _prefetch(pointers):
    """Request the memory at these pointers into the L2 cache."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(gl.int64)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit(do_not_specialize=["rows"])
def skinny_direct_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    rows,
    width,
    stride_x,
    stride_residual,
    stride_out,
    ROWS: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    AHEAD: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    OVERLAP: gl.constexpr,
    WARPS: gl.constexpr,
    sums_ptr=None,
    lead_x_ptr=None,
    slots_ptr=None,
    ranks_ptr=None,
    a_ptr=None,
    b_ptr=None,
    starts_ptr=None,
    arrived_ptr=None,
    RANK: gl.constexpr = 0,
    PLACES: gl.constexpr = 0,
    COLUMNS: gl.constexpr = 0,
    LEAD: gl.constexpr = 1,
    CHUNK: gl.constexpr = 1,
    factors_ptr=None,
):
    """Compute, in program i, outputs i * BLOCK_N and following of all rows.

    GROUP: 0 for a weight in 16 bits; else w_ptr, scales_ptr and factors_ptr are those of a `PackedInt4`.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    TILE_N: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    SLICE: gl.constexpr = BLOCK_K // WARPS
    PIECES: gl.constexpr = SLICE // PIECE
    E2M1: gl.constexpr = factors_ptr is not None
    PADDED: gl.constexpr = (K + PIECE - 1) // PIECE * PIECE
    CHUNKS: gl.constexpr = PADDED // BLOCK_K
    DTYPE: gl.constexpr = w_ptr.dtype.element_ty if GROUP == 0 else x_ptr.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 8)
    bytes_of_words: gl.constexpr = gl.BlockedLayout([1, 1, 4, 4], [1, 8, 4, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0])
    # With the places of an adapter's rank as a fourth dimension.
    ranked: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 32 // ROWS, ROWS, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
    flat: gl.constexpr = gl.SliceLayout(3, ranked)

    program = gl.program_id(0)
    if sums_ptr is not None:
        leading = rows * (COLUMNS // LEAD)
        if program < leading:
            k = gl.arange(0, CHUNK, gl.BlockedLayout([8], [32], [WARPS], [0]))
            lead(
                program, k, rows, lead_x_ptr, x_ptr, x_ptr, stride_x, 0.0, sums_ptr, slots_ptr, ranks_ptr, a_ptr,
                arrived_ptr, K, "none", RANK, COLUMNS, LEAD, OVERLAP,
            )  # fmt: skip
            return
        program -= leading
    first = program * BLOCK_N
    outs = TILE_N // BLOCK_N * width
    if GROUP == 0:
        n = _index(TILE_N, 1, left)
        w_rows = gl.minimum(first + n % BLOCK_N, width - 1) + n // BLOCK_N * width
        w_tile = w_ptr + w_rows.to(gl.int64) * K + (_index(WARPS, 0, left) * SLICE + _index(PIECE, 2, left))
        scales_tile, scales_at = 0, 0
    else:
        bytes_of: gl.constexpr = gl.BlockedLayout([1, 1, 16], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
        n = _index(TILE_N, 1, bytes_of)
        w_rows = gl.minimum(first + n % BLOCK_N, width - 1) + n // BLOCK_N * width
        places = _index(WARPS, 0, bytes_of) * (SLICE // 2) + _index(PIECE // 2, 2, bytes_of)
        w_tile = w_ptr + w_rows.to(gl.int64) * (PADDED // 2) + places
        by_thread: gl.constexpr = gl.BlockedLayout(
            [1, 1, 1, 4, 4], [1, 8, 4, 1, 1], [WARPS, 1, 1, 1, 1], [4, 3, 2, 1, 0]
        )
        of_threads: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, by_thread))
        words: gl.constexpr = of_threads if E2M1 else gl.SliceLayout(3, bytes_of_words)
        n = _index(TILE_N, 1, words)
        w_rows = gl.minimum(first + n % BLOCK_N, width - 1) + n // BLOCK_N * width
        scales_tile, scales_at = scales_ptr + w_rows, _index(WARPS, 0, words) * SLICE
        if E2M1:
            scales_at += _index(4, 2, words) // 2 * 64
        elif GROUP < PIECE:
            scales_at += _index(PIECE // 8, 2, words) % 4 * 32
    w = _load_weight(w_tile, scales_tile, scales_at, outs, 0, PIECES, BLOCK_K, GROUP)
    column = _index(WARPS, 0, right) * SLICE + _index(PIECE, 1, right)
    part = _index(TILE_N // BLOCK_N, 0, flat)
    row = first + _index(BLOCK_N, 1, flat)
    column_of = gl.minimum(row, width - 1) + part * width
    own = _index(ROWS, 2, flat)
    if sums_ptr is not None:
        slots = read_slots(own, rows, slots_ptr)
        ranks, leads = read_ranks(slots, ranks_ptr, RANK, COLUMNS, LEAD)
        b_tile = b_ptr + gl.maximum(slots, 0).to(gl.int64) * ((TILE_N // BLOCK_N) * width * RANK) + column_of * ranks
        starts = gl.load(starts_ptr + column_of)
        _prefetch(b_tile)

    # From here on, results of earlier kernels may be read, and their inputs overwritten.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    m = _index(ROWS, 2, right)
    x_tile = x_ptr + m.to(gl.int64) * stride_x + column
    real = (m < rows) & (column >= 0)
    if sums_ptr is not None:
        ready = arrived_of(arrived_ptr) >= leads
    sums = gl.zeros([WARPS, TILE_N, ROWS], gl.float32, mma)
    for chunk in gl.static_range(CHUNKS):
        later = w
        if AHEAD and chunk + 1 < CHUNKS:
            later = _load_weight(w_tile, scales_tile, scales_at, outs, chunk + 1, PIECES, BLOCK_K, GROUP)
        elif chunk > 0 and not AHEAD:
            w = _load_weight(w_tile, scales_tile, scales_at, outs, chunk, PIECES, BLOCK_K, GROUP)
        for i in gl.static_range(PIECES):
            at = chunk * BLOCK_K + i * PIECE
            x = gl.load(x_tile + at, mask=real if PADDED == K else real & (column + at < K), other=0.0)
            sums = ampere.mma_v2(_operand(w[i], DTYPE, GROUP, E2M1, bytes_of_words, left), x.to(DTYPE), sums)
        w = later

    result = gl.sum(sums, 0)
    result = gl.convert_layout(gl.reshape(result, [TILE_N // BLOCK_N, BLOCK_N, ROWS]), flat)
    if E2M1:
        result *= gl.load(factors_ptr + column_of)
    if HAS_BIAS:
        result += gl.load(bias_ptr + column_of).to(gl.float32)
    if sums_ptr is not None:
        if not ready:
            wait_for_sums(leads, arrived_ptr)
        leave(program == 0, gl.num_programs(0) - leading, leads, arrived_ptr)
        s_tile = sums_ptr + (own * COLUMNS + starts)
        delta = gl.zeros(result.shape, gl.float32, flat)
        for start in range(0, gl.max(gl.max(gl.max(ranks, 2), 1), 0), RANK_PIECE):
            b = _rank_piece(b_tile, ranks, start, ranked).to(gl.float32)
            delta += gl.sum(b * _rank_piece(s_tile, ranks, start, ranked), 3)
        result = gl.where((ranks > 0) & (column_of >= 0), result + delta, result)
    if GATED:
        gate = gl.sum(gl.where(part == 0, result, 0.0), 0)
        up = gl.sum(gl.where(part == 1, result, 0.0), 0)
        result = gl.expand_dims(activate(gate, ACTIVATION) * up, 0)
    else:
        result = activate(result, ACTIVATION)
    writable = (own < rows) & (row < width)
    if HAS_RESIDUAL:
        at = residual_ptr + own.to(gl.int64) * stride_residual + row
        result += gl.load(at, mask=writable, other=0.0).to(gl.float32)
    gl.store(out_ptr + own.to(gl.int64) * stride_out + row, result.to(out_ptr.dtype.element_ty), mask=writable)
