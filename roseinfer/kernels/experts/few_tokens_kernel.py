"""Triton kernels of `experts_few`.

A thread holds all places of a group of columns, which are one load of 16 bytes: 8 columns in 16 bits, multiplied in
float32, or 16 in FP8, multiplied in pairs of float16 (`fp8_pairs`), or 32 in four bits, also multiplied in such pairs
(`mxfp4_weights`, `int4_weights`, `nvfp4_weights`). The place is the last dimension of tensors. Of the other dimensions,
Triton gives neighbours in the first one to neighbouring threads, until all 32 of a warp have work.

GROUP: columns of such a load. SCALE_COLUMNS: columns in four bits that share a scale, or in NVFP4 a word of them.
factors_ptr: scales by channel, or factors of rows in NVFP4.
"""

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.experts.int4_weights import multiply_blocks, prepare_blocks
from roseinfer.kernels.experts.logit_order import expert_at, first_experts
from roseinfer.kernels.experts.mxfp4_weights import multiply_codes, prepare_codes, scale_factors
from roseinfer.kernels.experts.nvfp4_weights import multiply_e2m1_blocks
from roseinfer.kernels.linear.activation import activate_gated
from roseinfer.kernels.linear.fp8_pairs import multiply, narrow


@triton.jit
def _groups(chunk, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """Return the numbers of the groups in a chunk of columns, [groups, 1, 1]."""
    return (chunk * (BLOCK_K // GROUP) + tl.arange(0, BLOCK_K // GROUP))[:, None, None]


@triton.jit
def _read_x(rows, groups, inside, MASKED: tl.constexpr, GROUP: tl.constexpr):
    """Load columns 0 to 7 of each group and, of 16, columns 8 to 15, as float32. rows: pointers; all three broadcast.

    Loads bypass the L1 cache, which may hold older data: see `gate_up_kernel`.
    """
    at = tl.expand_dims(rows + groups * GROUP, -1) + tl.arange(0, 8)  # of 32 columns, the caller adds 16 to rows
    if MASKED:
        low = tl.load(at, mask=tl.expand_dims(inside, -1), other=0.0, cache_modifier=".cg").to(tl.float32)
    else:
        low = tl.load(at, cache_modifier=".cg").to(tl.float32)
    high = low
    if GROUP > 8 and MASKED:
        high = tl.load(at + 8, mask=tl.expand_dims(inside, -1), other=0.0, cache_modifier=".cg").to(tl.float32)
    elif GROUP > 8:
        high = tl.load(at + 8, cache_modifier=".cg").to(tl.float32)
    return low, high


@triton.jit
def _prepared(low, high, GROUP: tl.constexpr, COMPILED: tl.constexpr):
    """Return the factors for `_products`, of 8 or 16 columns."""
    if GROUP > 8:
        return narrow(low, high, COMPILED)
    else:
        return low, low, 1.0


@triton.jit
def _prepared_32(low, high, later_low, later_high, SCALES: tl.constexpr, COMPILED: tl.constexpr):
    """Return the factors for `_products` of 32 columns."""
    if SCALES == "int4" or SCALES == "nvfp4":
        return prepare_blocks(low, high, later_low, later_high, SCALES == "nvfp4", COMPILED)
    else:
        return prepare_codes(low, high, later_low, later_high, COMPILED)


@triton.jit
def _products(w, x, factors, GROUP: tl.constexpr, SCALES: tl.constexpr, COMPILED: tl.constexpr):
    """Return the sums over each group times `factors`, float32."""
    if SCALES == "int4":
        return multiply_blocks(w, factors, x, COMPILED)
    elif SCALES == "nvfp4":
        return multiply_e2m1_blocks(w, factors, x, COMPILED)
    elif GROUP == 32:
        return multiply_codes(w, x, COMPILED) * factors
    elif GROUP == 16:
        return multiply(w, x[0], x[1], COMPILED) * (x[2] * factors)
    else:
        return tl.sum(w.to(tl.float32) * x[0], -1)


@triton.jit
def _read_w(
    w_ptr, rows, groups, inside, K: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr,
    EVICTION: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Load groups of columns of rows [.., K]; codes of four bytes in an int32 if COMPILED. rows: int64; all
    broadcast.
    """
    if GROUP > 8 and COMPILED:
        ROW: tl.constexpr = K * 16 // GROUP // 4
        at = w_ptr.to(tl.pointer_type(tl.int32)) + tl.expand_dims(rows * ROW + groups * 4, -1) + tl.arange(0, 4)
    elif GROUP == 32:
        at = w_ptr + tl.expand_dims(rows * (K // 2) + groups * 16, -1) + tl.arange(0, 16)
    else:
        at = w_ptr + tl.expand_dims(rows * K + groups * GROUP, -1) + tl.arange(0, GROUP)
    if MASKED:
        return tl.load(at, mask=tl.expand_dims(inside, -1), other=0.0, eviction_policy=EVICTION)
    else:
        return tl.load(at, eviction_policy=EVICTION)


@triton.jit
def _laid_out(x, GROUP: tl.constexpr):
    """Return the result of `_prepared` for [lanes, 1, groups] as [lanes, 1, groups, 1]."""
    if GROUP > 8:
        result = ()
        for i in tl.static_range(len(x)):
            result += (tl.expand_dims(x[i], 3),)
        return result
    else:
        return tl.expand_dims(x[0], 3), 1.0, 1.0


@triton.jit
def _factors_of(scales, SCALES: tl.constexpr):
    if SCALES == "mxfp4":
        return scale_factors(scales)
    else:
        return scales


@triton.jit
def gate_up_kernel(
    x_ptr,
    norm_ptr,
    logits_ptr,
    rstd_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    hidden_ptr,
    stride_x,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    EVICTION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
    factors_ptr=None,
):
    """Compute, in program (p, i), BLOCK_N * TILES outputs for token p // PLACES and its expert at place p % PLACES.

    SHARED: expert E follows the TOP_K chosen ones.

    Tensors have the dimensions lanes, near rows, groups, far rows: LANES threads of a warp have neighbouring groups of
    a row. With fewer lanes there is less to sum across threads, and more of x in each.

    x is older than the logits: their kernel lets this one start when all earlier kernels are done. So x is read before
    the wait. The load bypasses the L1 cache, which may hold older data.
    """
    CHUNKS: tl.constexpr = (H + BLOCK_K - 1) // BLOCK_K
    MASKED: tl.constexpr = H % BLOCK_K != 0
    FAR: tl.constexpr = BLOCK_K // GROUP // LANES  # groups per lane
    NEAR_ROWS: tl.constexpr = 32 // LANES
    FAR_ROWS: tl.constexpr = 2 * BLOCK_N // NEAR_ROWS
    PLACES: tl.constexpr = TOP_K + SHARED
    pick = tl.program_id(0)
    token, place = (pick // PLACES).to(tl.int64), pick % PLACES
    group = tl.arange(0, LANES)[:, None, None] + (tl.arange(0, FAR) * LANES)[None, None, :]
    xs = ()
    for chunk in tl.static_range(CHUNKS):
        columns = chunk * (BLOCK_K // GROUP) + group
        low, high = _read_x(x_ptr + token * stride_x, columns, columns < H // GROUP, MASKED, GROUP)
        low_gain, high_gain = _read_x(norm_ptr, columns, columns < H // GROUP, MASKED, GROUP)
        low, high = low * low_gain, high * high_gain
        if GROUP == 32:
            later, last = _read_x(x_ptr + token * stride_x + 16, columns, columns < H // GROUP, MASKED, GROUP)
            low_gain, high_gain = _read_x(norm_ptr + 16, columns, columns < H // GROUP, MASKED, GROUP)
            x = _prepared_32(low, high, later * low_gain, last * high_gain, SCALES, COMPILED)
        else:
            x = _prepared(low, high, GROUP, COMPILED)
        xs += (_laid_out(x, GROUP),)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # The next kernel may start, as the logits are complete.
        tl.extra.cuda.gdc_launch_dependents()
    rstd = tl.load(rstd_ptr + token, cache_modifier=".cg")
    logits = logits_ptr + token * (E + SHARED)
    expert = expert_at(logits, tl.minimum(place, TOP_K - 1), E, E_PAD).to(tl.int64)
    if SHARED:
        expert = tl.where(place == TOP_K, E, expert)

    # Gate's rows are the first half of the last dimension, up's the second.
    n = tl.arange(0, NEAR_ROWS)[:, None] + (tl.arange(0, FAR_ROWS) * NEAR_ROWS)[None, :]
    is_up = (tl.arange(0, FAR_ROWS) >= FAR_ROWS // 2)[None, None, None, :]
    for tile in tl.range(TILES, num_stages=STAGES):
        first = (tl.program_id(1) * TILES + tile) * BLOCK_N
        # Rows past the end are copies of the last one, and not written.
        rows = expert * (2 * WIDTH) + tl.minimum(first + n % BLOCK_N, WIDTH - 1) + n // BLOCK_N * WIDTH
        sums = tl.zeros([LANES, NEAR_ROWS, FAR, FAR_ROWS], tl.float32)
        for chunk in tl.static_range(CHUNKS):
            groups = tl.expand_dims(chunk * (BLOCK_K // GROUP) + group, 3)
            inside = groups < H // GROUP
            w = _read_w(w_ptr, rows[None, :, None, :], groups, inside, H, MASKED, GROUP, EVICTION, COMPILED)
            factors = 1.0
            if SCALES == "block":
                # Few numbers, so that Triton moves them to the layout of the sums, and not the sums to theirs.
                block = chunk * (BLOCK_K // 128) + tl.arange(0, FAR) * LANES // 8
                first_row = expert * (2 * WIDTH) + tl.minimum(first, WIDTH - 1)
                at = scales_ptr + first_row // 128 * (H // 128) + block
                up = WIDTH // 128 * (H // 128)
                gates = tl.load(at, mask=block < H // 128, other=0.0)[None, None, :, None]
                ups = tl.load(at + up, mask=block < H // 128, other=0.0)[None, None, :, None]
                factors = tl.where(is_up, ups, gates)
            elif GROUP == 32:
                at = scales_ptr + rows[None, :, None, :] * (H // SCALE_COLUMNS) + groups * 32 // SCALE_COLUMNS
                factors = _factors_of(tl.load(at, mask=inside, other=0), SCALES)
            sums += _products(w, xs[chunk], factors, GROUP, SCALES, COMPILED)
        sums = tl.reshape(tl.permute(sums, (3, 1, 0, 2)), [FAR_ROWS, NEAR_ROWS, LANES * FAR])
        result = tl.reshape(tl.sum(sums, 2), [2 * BLOCK_N]) * rstd
        if factors_ptr is not None:
            of_row = tl.arange(0, 2 * BLOCK_N)
            of_row = tl.minimum(first + of_row % BLOCK_N, WIDTH - 1) + of_row // BLOCK_N * WIDTH
            result *= tl.load(factors_ptr + expert * (2 * WIDTH) + of_row)
        if HAS_BIAS:
            of_row = tl.arange(0, 2 * BLOCK_N)
            of_row = tl.minimum(first + of_row % BLOCK_N, WIDTH - 1) + of_row // BLOCK_N * WIDTH
            result += tl.load(bias_ptr + expert * (2 * WIDTH) + of_row).to(tl.float32)
        gate, up_part = tl.split(tl.trans(tl.reshape(result, [2, BLOCK_N])))
        hidden = activate_gated(gate, up_part, ACTIVATION)
        out = first + tl.arange(0, BLOCK_N)
        tl.store(hidden_ptr + pick.to(tl.int64) * WIDTH + out, hidden.to(hidden_ptr.dtype.element_ty), mask=out < WIDTH)


@triton.jit
def _scales_of(
    scales_ptr, experts, n, H: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr
):
    """Return pointers to the first scales of groups of rows n, which share a block, of experts [places]."""
    experts = experts.to(tl.int64)[None, :, None]
    if SCALES == "none" or SCALES == "channel":
        return 0
    elif SCALES == "block":
        return scales_ptr + (experts * (H // 128) + tl.min(n, 0) // 128) * (WIDTH // 128)
    else:
        return scales_ptr + (experts * H + n[None, None, :]) * (WIDTH // SCALE_COLUMNS)


@triton.jit
def _within(groups, TOP_K: tl.constexpr, K_PAD: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    return (groups < WIDTH // GROUP) & (tl.arange(0, K_PAD) < TOP_K)[None, :, None]


@triton.jit
def _read_down(
    w_ptr, scales, rows, chunk, TOP_K: tl.constexpr, K_PAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVICTION: tl.constexpr, SCALES: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Load a chunk of the columns of rows of a token's experts, and the scales of its groups."""
    MASKED: tl.constexpr = WIDTH % BLOCK_K != 0 or TOP_K != K_PAD
    groups = _groups(chunk, BLOCK_K, GROUP)
    inside = _within(groups, TOP_K, K_PAD, WIDTH, GROUP)
    w = _read_w(w_ptr, rows, groups, inside, WIDTH, MASKED, GROUP, EVICTION, COMPILED)
    factors = 1.0
    if SCALES == "block" and MASKED:
        factors = tl.load(scales + groups // 8, mask=inside, other=0.0)
    elif SCALES == "block":
        factors = tl.load(scales + groups // 8)
    elif GROUP == 32:
        factors = _factors_of(tl.load(scales + groups * 32 // SCALE_COLUMNS, mask=inside, other=0), SCALES)
    return w, factors


@triton.jit
def _read_hidden(
    rows, shares, chunk, TOP_K: tl.constexpr, K_PAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Load the same columns of the input of a token's experts, each multiplied by its expert's weight."""
    groups = _groups(chunk, BLOCK_K, GROUP)
    inside = _within(groups, TOP_K, K_PAD, WIDTH, GROUP)
    MASKED: tl.constexpr = WIDTH % BLOCK_K != 0 or TOP_K != K_PAD
    low, high = _read_x(rows, groups, inside, MASKED, GROUP)
    if GROUP == 32:
        later, last = _read_x(rows + 16, groups, inside, MASKED, GROUP)
        return _prepared_32(low * shares, high * shares, later * shares, last * shares, SCALES, COMPILED)
    else:
        return _prepared(low * shares, high * shares, GROUP, COMPILED)


@triton.jit
def _down_rows(experts, n, H: tl.constexpr):
    """Return the numbers of the rows n of experts [places] in the matrix of all, [1, places, rows] int64."""
    return (experts.to(tl.int64) * H)[None, :, None] + n[None, None, :]


@triton.jit
def _read_ahead(
    w_ptr, scales, rows, TOP_K: tl.constexpr, K_PAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr, GROUP: tl.constexpr, EVICTION: tl.constexpr, SCALES: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr, COMPILED: tl.constexpr, factors_ptr,
):  # fmt: skip
    """Load the first AHEAD chunks of columns of rows [1, places, rows], of which TOP_K places are read, and the rows'
    factors.
    """
    ahead = ()
    for chunk in tl.static_range(AHEAD):
        ahead += (_read_down(
            w_ptr, scales, rows, chunk, TOP_K, K_PAD, WIDTH, BLOCK_K, GROUP, EVICTION, SCALES, SCALE_COLUMNS, COMPILED,
        ),)  # fmt: skip
    return ahead, tl.load(factors_ptr + rows) if factors_ptr is not None else 1.0


@triton.jit
def _down_sums(
    ahead, x_rows, w_ptr, scales, rows, shares, TOP_K: tl.constexpr, K_PAD: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr, EVICTION: tl.constexpr,
    SCALES: tl.constexpr, SCALE_COLUMNS: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Return the sums [BLOCK_N] over all columns of the first TOP_K of K_PAD places, each multiplied by its share."""
    CHUNKS: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    x_rows += (tl.arange(0, K_PAD) * WIDTH)[None, :, None]
    shares = shares[None, :, None, None]
    sums = tl.zeros([BLOCK_K // GROUP, K_PAD, BLOCK_N], tl.float32)
    chunks, row_factors = ahead
    for chunk in tl.static_range(AHEAD):
        x = _read_hidden(x_rows, shares, chunk, TOP_K, K_PAD, WIDTH, BLOCK_K, GROUP, SCALES, COMPILED)
        sums += _products(chunks[chunk][0], x, chunks[chunk][1], GROUP, SCALES, COMPILED)
    for chunk in tl.range(AHEAD, CHUNKS):
        x = _read_hidden(x_rows, shares, chunk, TOP_K, K_PAD, WIDTH, BLOCK_K, GROUP, SCALES, COMPILED)
        w, factors = _read_down(
            w_ptr, scales, rows, chunk, TOP_K, K_PAD, WIDTH, BLOCK_K, GROUP, EVICTION, SCALES, SCALE_COLUMNS, COMPILED
        )
        sums += _products(w, x, factors, GROUP, SCALES, COMPILED)
    return tl.sum(tl.sum(sums * row_factors, 0), 0)


@triton.jit
def down_kernel(
    hidden_ptr,
    logits_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    stride_residual,
    stride_out,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARED_BLOCK_K: tl.constexpr,
    AHEAD: tl.constexpr,
    EVICTION: tl.constexpr,
    RENORMALISE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
    factors_ptr=None,
):
    """Compute, in program (t, i), token t's outputs i * BLOCK_N and following over all of its experts.

    It takes BLOCK_K columns at a time. The logits are older than the hidden layers, whose kernel lets this one start
    once the logits are there. So the first AHEAD chunks of columns are read before the wait. SHARED: expert E follows
    the chosen ones, its share is the sigmoid of its logit; SHARED_BLOCK_K of its columns are taken at a time.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(out, H - 1)
    logits = logits_ptr + token * (E + SHARED)
    if SHARED:
        only = tl.full([1], E, tl.int32)
        shared_rows = _down_rows(only, n, H)
        shared_scales = _scales_of(scales_ptr, only, n, H, WIDTH, SCALES, SCALE_COLUMNS)
        shared_ahead = _read_ahead(
            w_ptr, shared_scales, shared_rows, 1, 1, WIDTH, SHARED_BLOCK_K, 1, GROUP, EVICTION, SCALES, SCALE_COLUMNS,
            COMPILED, factors_ptr,
        )  # fmt: skip
    experts, shares = first_experts(logits, E, E_PAD, TOP_K, K_PAD, RENORMALISE)
    rows = _down_rows(experts, n, H)
    scales = _scales_of(scales_ptr, experts, n, H, WIDTH, SCALES, SCALE_COLUMNS)
    ahead = _read_ahead(
        w_ptr, scales, rows, TOP_K, K_PAD, WIDTH, BLOCK_K, AHEAD, GROUP, EVICTION, SCALES, SCALE_COLUMNS, COMPILED,
        factors_ptr,
    )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x_rows = hidden_ptr + token * ((TOP_K + SHARED) * WIDTH)
    result = _down_sums(
        ahead, x_rows, w_ptr, scales, rows, shares, TOP_K, K_PAD, WIDTH, BLOCK_N, BLOCK_K, AHEAD, GROUP, EVICTION,
        SCALES, SCALE_COLUMNS, COMPILED,
    )  # fmt: skip
    if HAS_BIAS:
        biases = tl.load(bias_ptr + experts.to(tl.int64)[:, None] * H + n[None, :]).to(tl.float32)
        result += tl.sum(shares[:, None] * biases, 0)
    if SHARED:
        share = tl.sigmoid(tl.load(logits + E + tl.zeros([1], tl.int32), cache_modifier=".cg"))
        result += _down_sums(
            shared_ahead, x_rows + TOP_K * WIDTH, w_ptr, shared_scales, shared_rows, share, 1, 1, WIDTH, BLOCK_N,
            SHARED_BLOCK_K, 1, GROUP, EVICTION, SCALES, SCALE_COLUMNS, COMPILED,
        )  # fmt: skip
    if HAS_RESIDUAL:
        result += tl.load(residual_ptr + token * stride_residual + out, mask=out < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * stride_out + out, result.to(out_ptr.dtype.element_ty), mask=out < H)
