"""Gated DeltaNet of rows of several tokens, in pieces of up to 64 tokens (see `chunked_rule` for the formulas).

Only `scan_kernel` passes from piece to piece of a row. The kernels before it compute all pieces at once: convolution,
unit vectors and gates; then what each piece needs besides the state, in three steps. The last ones take windows and
norms.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.kernels.delta.scan_bulk import HIGH_BITS, scan_bulk, scan_in_bulk
from roseinfer.kernels.delta.tables import (
    BETA,
    GATES,
    PER_STEP,
    SINCE,
    TOTAL,
    UNTIL,
    load_piece,
    load_pieced,
    load_pieced_row,
    load_pieces,
    load_row,
)

PIECE_TOKENS = 64
# Rows of the blocks of a piece's matrix that are inverted row by row.
INVERTED_BLOCK_ROWS = 16
# Values of a head that one program of the scan computes.
MAX_SCAN_VALUES = 32
# The narrowest heads whose float32 factors are two of bfloat16. For 16 and 32 columns ptxas 12.8 gives products of a
# factor in registers wrong addresses, but for the first.
MIN_PARTS_WIDTH = 64
WINDOW_BLOCK_ELEMENTS = 256
# Programs that share the rows of these channels. A captured step has room for many more rows than it mostly has.
MAX_WINDOW_PROGRAMS = 16


@triton.jit(do_not_specialize=PER_STEP)
def prepare_kernel(
    mixed_ptr,
    gates_ptr,
    conv_ptr,
    decay_ptr,
    dt_bias_ptr,
    window_ptr,
    rows_ptr,
    pieces_ptr,
    heads_ptr,
    decays_ptr,
    mixed_stride,
    gates_stride,
    window_stride,
    num_rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write queries, keys and values [T, channels] of one head of one piece. With values write also [T, HV, 4]:
    G, the sum of g within the piece; beta; the decays e^G since its beginning, and until its end.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        head = tl.program_id(1)  # queries first, then keys, then values
        C: tl.constexpr = (2 * HK + HV) * D
        slot, start, row_first, _count = load_row(rows_ptr, row, num_rows)
        index = tl.arange(0, SIZE)
        inside = index < count
        token = (first + index).to(tl.int64)
        position = start + (first - row_first) + index
        channel = head * D + tl.arange(0, D)
        total = tl.zeros((SIZE, D), tl.float32)
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            here = inside & (token - back >= row_first)
            x = tl.load(mixed_ptr + (token - back)[:, None] * mixed_stride + channel, mask=here[:, None], other=0.0)
            if back > 0:
                before = inside & (token - back < row_first) & (position >= back)
                entry = (tl.maximum(position - back, 0) % RING)[:, None] * C + channel
                x += tl.load(window_ptr + slot * window_stride + entry, mask=before[:, None], other=0.0)
            total += x.to(tl.float32) * tl.load(conv_ptr + tap * C + channel)
        total *= tl.sigmoid(total)
        if head < 2 * HK:
            total *= tl.rsqrt(tl.sum(total * total, 1) + 1e-6)[:, None]
            if head < HK:
                total *= D**-0.5
        else:
            value_head = head - 2 * HK
            at = gates_ptr + token * gates_stride + value_head
            b = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            a = tl.load(at + HV, mask=inside, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + value_head)
            softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            g = tl.where(inside, tl.load(decay_ptr + value_head) * softplus, 0.0)
            sums = tl.cumsum(g, 0)
            to = decays_ptr + (token * HV + value_head) * GATES
            tl.store(to + TOTAL, sums, mask=inside)
            tl.store(to + BETA, tl.sigmoid(b), mask=inside)
            tl.store(to + SINCE, tl.exp(sums), mask=inside)
            tl.store(to + UNTIL, tl.exp(tl.sum(g, 0) - sums), mask=inside)
        to = heads_ptr + token[:, None] * C + channel
        tl.store(to, total.to(heads_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _parts(x):
    """Return two bfloat16 whose sum is x, but for its last 8 bits. The first is cut off: rounding it takes longer."""
    high = (x.to(tl.int32, bitcast=True) & HIGH_BITS).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _product(x, y, PRECISION: tl.constexpr):
    """Return x @ y in float32. With "parts" each float32 factor is two bfloat16: they are smaller and hold more bits
    than TF32, and other factors are bfloat16.
    """
    if PRECISION != "parts":
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)
    elif x.dtype == tl.float32 and y.dtype == tl.float32:
        x_high, x_low = _parts(x)
        y_high, y_low = _parts(y)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    elif x.dtype == tl.float32:
        high, low = _parts(x)
        return tl.dot(high, y, tl.dot(low, y))
    else:
        return tl.dot(x, y)


@triton.jit(do_not_specialize=PER_STEP)
def pairs_kernel(
    heads_ptr,
    decays_ptr,
    pieces_ptr,
    lower_ptr,
    within_ptr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write of one value head of one piece, [T, HV * SIZE]: A (`lower`), and q k^T D with its diagonal (`within`)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        head = tl.program_id(1)
        key_head = head // (HV // HK)
        C: tl.constexpr = (2 * HK + HV) * D
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        inside = i < count
        token = (first + i).to(tl.int64)
        at = heads_ptr + token[:, None] * C + key_head * D + d
        q = tl.load(at, mask=inside[:, None], other=0.0)
        k = tl.load(at + HK * D, mask=inside[:, None], other=0.0)
        decays = decays_ptr + (token * HV + head) * GATES
        total = tl.load(decays + TOTAL, mask=inside, other=0.0)
        beta = tl.load(decays + BETA, mask=inside, other=0.0)
        # Above the diagonal the exponent may be large.
        seen = (i[:, None] >= i[None, :]) & inside[:, None]
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        to = (token * HV + head)[:, None] * SIZE + i
        within = _product(q, tl.trans(k), PRECISION) * decay
        tl.store(within_ptr + to, within.to(within_ptr.dtype.element_ty), mask=inside[:, None])
        lower = _product(k, tl.trans(k), PRECISION) * decay * beta[:, None]
        tl.store(lower_ptr + to, tl.where(i[:, None] > i[None, :], lower, 0.0), mask=inside[:, None])


@triton.jit(do_not_specialize=PER_STEP)
def invert_kernel(
    lower_ptr,
    pieces_ptr,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Overwrite the blocks on the diagonal of one head's A by the inverses of I + A's.

    Rows of all blocks are substituted at the same time, which is as exact as substitution of the whole. A thread holds
    a column of a block's inverse.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        i, column = tl.arange(0, BLOCK), tl.arange(0, SIZE)
        start = column // BLOCK * BLOCK  # of its block
        of_piece = lower_ptr + (first.to(tl.int64) * HV + tl.program_id(1)) * SIZE
        inverse = tl.where(i[:, None] == (column % BLOCK)[None, :], 1.0, 0.0)
        for step in tl.static_range(1, BLOCK):
            earlier = (i[:, None] < step) & (start + step < count)[None, :]
            at = of_piece + ((start + step) * HV * SIZE + start)[None, :] + i[:, None]
            found = tl.sum(tl.load(at, mask=earlier, other=0.0) * inverse, 0)
            inverse -= tl.where(i[:, None] == step, found[None, :], 0.0)
        tl.debug_barrier()  # all have read before one writes
        to = of_piece + (start[None, :] + i[:, None]) * HV * SIZE + column[None, :]
        tl.store(to, inverse, mask=(start[None, :] + i[:, None]) < count)


@triton.jit(do_not_specialize=PER_STEP)
def solve_kernel(
    heads_ptr,
    decays_ptr,
    pieces_ptr,
    lower_ptr,
    own_ptr,
    read_ptr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write of one value head of one piece: (I + A)^-1 beta v (`own`) and (I + A)^-1 beta e^G k (`read`) [T, HV * D].

    `lower`: A with blocks on the diagonal that are inverted. With N the product of these and the rest, which has only
    four blocks a row, (I + N)^-1 = (I - N) (I + N^2).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        head = tl.program_id(1)
        key_head = head // (HV // HK)
        C: tl.constexpr = (2 * HK + HV) * D
        EXACT: tl.constexpr = "parts" if PRECISION == "parts" else "tf32x3"
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        inside = i < count
        token = (first + i).to(tl.int64)
        of_head = token * HV + head
        lower = tl.load(lower_ptr + of_head[:, None] * SIZE + i, mask=inside[:, None], other=0.0)
        inverse = tl.where((i[:, None] // BLOCK) == (i[None, :] // BLOCK), lower, 0.0)
        below = _product(inverse, lower - inverse, EXACT)
        inverse += _product(_product(below, below, EXACT), inverse, EXACT)
        inverse -= _product(below, inverse, EXACT)
        at = heads_ptr + token[:, None] * C + d
        to = of_head[:, None] * D + d
        scale = tl.load(decays_ptr + of_head * GATES + BETA, mask=inside, other=0.0)
        v = tl.load(at + (2 * HK + head) * D, mask=inside[:, None], other=0.0)
        own = _product(inverse * scale[None, :], v, PRECISION)
        tl.store(own_ptr + to, own.to(own_ptr.dtype.element_ty), mask=inside[:, None])
        scale *= tl.load(decays_ptr + of_head * GATES + SINCE, mask=inside, other=0.0)
        k = tl.load(at + (HK + key_head) * D, mask=inside[:, None], other=0.0)
        read = _product(inverse * scale[None, :], k, PRECISION)
        tl.store(read_ptr + to, read.to(read_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=PER_STEP)
def scan_kernel(
    heads_ptr,
    decays_ptr,
    own_ptr,
    read_ptr,
    within_ptr,
    memory_ptr,
    rows_ptr,
    pieces_ptr,
    out_ptr,
    memory_stride,
    num_rows,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the outputs o [T, HV * D] of some values of one head of one row, and its states: at snapshots and last."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = load_pieces(rows_ptr, row, num_rows)
    if begin < end:
        key_head = head // (HV // HK)
        C: tl.constexpr = (2 * HK + HV) * D
        slot, start, _first, _count = load_row(rows_ptr, row, num_rows)
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        value = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
        part = head * D * D + d[:, None] * D + value[None, :]
        state = tl.load(memory_ptr + slot * memory_stride + part, mask=(start > 0) & (part >= 0), other=0.0)
        for piece in range(begin, end):
            _row, first, count, snapshot = load_piece(pieces_ptr, piece)
            inside = (i < count)[:, None]
            token = (first + i).to(tl.int64)
            decays = decays_ptr + (token * HV + head) * GATES
            since = tl.load(decays + SINCE, mask=i < count, other=1.0)
            until = tl.load(decays + UNTIL, mask=i < count, other=0.0)
            whole = tl.min(since, 0)  # of the piece: nothing grows
            by_head = (token * HV + head)[:, None]
            read = tl.load(read_ptr + by_head * D + d, mask=inside, other=0.0).to(tl.float32)
            own = tl.load(own_ptr + by_head * D + value, mask=inside, other=0.0).to(tl.float32)
            new = own - tl.dot(read, state, input_precision=PRECISION)
            q = tl.load(heads_ptr + token[:, None] * C + key_head * D + d, mask=inside, other=0.0).to(tl.float32)
            output = tl.dot(q * since[:, None], state, input_precision=PRECISION)
            within = tl.load(within_ptr + by_head * SIZE + i, mask=inside, other=0.0).to(tl.float32)
            output += tl.dot(within, new, input_precision=PRECISION)
            to = out_ptr + by_head * D + value
            tl.store(to, output.to(out_ptr.dtype.element_ty), mask=inside)
            k = tl.load(heads_ptr + token[:, None] * C + (HK + key_head) * D + d, mask=inside, other=0.0).to(tl.float32)
            k *= until[:, None]
            state = state * whole + tl.dot(tl.trans(k), new, input_precision=PRECISION)
            if snapshot >= 0:
                tl.store(memory_ptr + snapshot * memory_stride + part, state)
        tl.store(memory_ptr + slot * memory_stride + part, state)


@triton.jit
def _store_window(
    mixed_ptr,
    window_ptr,
    source,
    target,
    row_first,
    end,
    position,
    channel,
    inside,
    mixed_stride,
    C,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
):
    """Write to `target` the inputs before packed index `end`, at `position`. Those before the row are in `source`."""
    for back in tl.static_range(1, TAPS):
        token = (end - back).to(tl.int64)
        entry = (tl.maximum(position - back, 0) % RING) * C + channel
        mask = inside & (position >= back)
        here = token >= row_first
        x = tl.load(mixed_ptr + token * mixed_stride + channel, mask=mask & here, other=0.0)
        x += tl.load(window_ptr + source + entry, mask=mask & (token < row_first), other=0.0)
        tl.store(window_ptr + target + entry, x, mask=mask)


@triton.jit(do_not_specialize=PER_STEP)
def window_kernel(
    mixed_ptr,
    window_ptr,
    rows_ptr,
    pieces_ptr,
    mixed_stride,
    window_stride,
    num_rows,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the windows of some channels of some rows. Snapshots read a row's old window, which is overwritten last."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < C
    for n in range(tl.program_id(0), load_pieced(rows_ptr, num_rows), tl.num_programs(0)):
        row = load_pieced_row(rows_ptr, n, num_rows)
        begin, end = load_pieces(rows_ptr, row, num_rows)
        slot, start, row_first, row_count = load_row(rows_ptr, row, num_rows)
        ring = slot * window_stride
        for piece in range(begin, end):
            _row, first, count, snapshot = load_piece(pieces_ptr, piece)
            if snapshot >= 0:
                after = first + count
                position = start + after - row_first
                target = snapshot * window_stride
                _store_window(
                    mixed_ptr,
                    window_ptr,
                    ring,
                    target,
                    row_first,
                    after,
                    position,
                    channel,
                    inside,
                    mixed_stride,
                    C,
                    TAPS,
                    RING,
                )
        after = row_first + row_count
        position = start + row_count
        _store_window(
            mixed_ptr, window_ptr, ring, ring, row_first, after, position, channel, inside, mixed_stride, C, TAPS, RING
        )


@triton.jit(do_not_specialize=PER_STEP)
def gated_norm_kernel(
    out_ptr,
    z_ptr,
    norm_ptr,
    pieces_ptr,
    z_stride,
    eps,
    HV: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Overwrite the outputs of one head of one piece with rms_norm(o) * silu(z)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        head = tl.program_id(1)
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        inside = (i < count)[:, None]
        token = (first + i).to(tl.int64)[:, None]
        at = out_ptr + (token * HV + head) * D + d
        output = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        output *= tl.rsqrt(tl.sum(output * output, 1) / D + eps)[:, None] * tl.load(norm_ptr + d)
        z = tl.load(z_ptr + token * z_stride + head * D + d, mask=inside, other=0.0).to(tl.float32)
        output *= z * tl.sigmoid(z)
        tl.store(at, output.to(out_ptr.dtype.element_ty), mask=inside)


def delta_chunks(inputs: DeltaInputs, out: torch.Tensor) -> None:
    """Compute all pieces: write their outputs to `out` [T, HV * D], and update the slots of their rows and snapshots.

    D is a power of two of at least 16.
    """
    mixed, z, gates, conv, decay, dt_bias, norm, memory, window, _, rows, pieces, eps = inputs
    heads, width = memory.shape[1], memory.shape[2]
    assert memory.shape[3] == width and mixed.stride(1) == z.stride(1) == gates.stride(1) == 1
    num_rows, num_pieces, tokens = rows.shape[1], pieces.shape[0], mixed.shape[0]
    if num_pieces == 0:
        return
    taps, channels = conv.shape
    key_heads = (channels // width - heads) // 2
    shape = {"HK": key_heads, "HV": heads, "D": width, "SIZE": PIECE_TOKENS, **early_start.options(mixed.device)}
    # Of products: TF32 holds all bits of 16-bit numbers; three products hold those of float32.
    tf32 = "tf32x3" if mixed.dtype is torch.float32 else "tf32"
    # Without a GPU there are no products of bfloat16.
    has_parts = mixed.dtype is torch.bfloat16 and mixed.is_cuda and width >= MIN_PARTS_WIDTH
    precision = "parts" if has_parts else tf32
    prepared = torch.empty((tokens, channels), dtype=mixed.dtype, device=mixed.device)
    decays = torch.empty((tokens, heads, GATES.value), dtype=torch.float32, device=mixed.device)
    own, read = torch.empty((2, tokens, heads * width), dtype=mixed.dtype, device=mixed.device)
    within = torch.empty((tokens, heads * PIECE_TOKENS), dtype=mixed.dtype, device=mixed.device)
    lower = torch.empty(within.shape, dtype=torch.float32, device=mixed.device)
    prepare_kernel[(num_pieces, 2 * key_heads + heads)](
        mixed,
        gates,
        conv,
        decay,
        dt_bias,
        window,
        rows,
        pieces,
        prepared,
        decays,
        mixed.stride(0),
        gates.stride(0),
        window.stride(0),
        num_rows,
        TAPS=taps,
        RING=window.shape[1],
        num_warps=8,
        **shape,
    )
    pairs_kernel[(num_pieces, heads)](prepared, decays, pieces, lower, within, PRECISION=precision, **shape)
    blocks = {"SIZE": PIECE_TOKENS, "BLOCK": INVERTED_BLOCK_ROWS, **early_start.options(mixed.device)}
    invert_kernel[(num_pieces, heads)](lower, pieces, HV=heads, num_warps=2, **blocks)
    solve_kernel[(num_pieces, heads)](
        prepared, decays, pieces, lower, own, read, BLOCK=INVERTED_BLOCK_ROWS, PRECISION=precision, **shape
    )
    if scan_in_bulk(width, mixed.dtype, mixed.device):
        scan_bulk(prepared, decays, own, read, within, memory, rows, pieces, out)
    else:
        scan_width = min(width, MAX_SCAN_VALUES)
        scan_kernel[(num_rows, heads, width // scan_width)](
            prepared,
            decays,
            own,
            read,
            within,
            memory,
            rows,
            pieces,
            out,
            memory.stride(0),
            num_rows,
            WIDTH=scan_width,
            PRECISION=tf32,
            **shape,
        )
    del shape["HK"]
    gated_norm_kernel[(num_pieces, heads)](out, z, norm, pieces, z.stride(0), eps, num_warps=8, **shape)
    window_kernel[(min(num_rows, MAX_WINDOW_PROGRAMS), cdiv(channels, WINDOW_BLOCK_ELEMENTS))](
        mixed,
        window,
        rows,
        pieces,
        mixed.stride(0),
        window.stride(0),
        num_rows,
        C=channels,
        TAPS=taps,
        RING=window.shape[1],
        BLOCK=WINDOW_BLOCK_ELEMENTS,
        **early_start.options(mixed.device),
    )
