"""Gated DeltaNet of rows of several tokens, in pieces of up to 64 tokens (see `chunked_rule` for the formulas).

Only `_scan_kernel` passes from piece to piece of a row. The kernels before it compute all pieces at once: convolution,
unit vectors and gates; then what each piece needs besides the state. The last ones take windows and norms.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.kernels.delta.tables import PER_STEP, load_piece, load_pieces, load_row

PIECE_TOKENS = 64
# Values of a head that one program of the scan computes.
MAX_SCAN_WIDTH = 32
WINDOW_BLOCK_ELEMENTS = 256


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
    total_ptr,
    beta_ptr,
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
    """Write queries, keys and values [T, channels] of one head of one piece, and with values g's sum within the piece
    and beta [T, HV].
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
            tl.store(total_ptr + token * HV + value_head, tl.cumsum(g, 0), mask=inside)
            tl.store(beta_ptr + token * HV + value_head, tl.sigmoid(b), mask=inside)
        to = heads_ptr + token[:, None] * C + channel
        tl.store(to, total.to(heads_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _inverse(lower, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Return (I + lower)^-1 [SIZE, SIZE] float32 of a strictly lower triangular matrix.

    Rows of all four diagonal blocks are substituted at the same time, which is as exact as substitution of the whole.
    The blocks below need few powers then: with N the product of the inverted blocks and the rest, (I + N)^-1 =
    (I - N) (I + N^2).
    """
    i = tl.arange(0, SIZE)
    same = (i[:, None] // BLOCK) == (i[None, :] // BLOCK)
    blocks = tl.where(same, lower, 0.0)
    by_column = tl.trans(blocks)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for step in range(1, BLOCK):
        # Factors of earlier rows in row `step` of each block.
        factors = tl.sum(tl.where((i[None, :] % BLOCK) == step, by_column, 0.0), 1)
        found = tl.sum(factors[:, None] * inverse, 0)
        inverse -= tl.where(same & ((i[:, None] % BLOCK) == step), found[None, :], 0.0)
    below = tl.dot(inverse, lower - blocks, input_precision="tf32x3")
    squared = tl.dot(below, below, input_precision="tf32x3")
    inverse += tl.dot(squared, inverse, input_precision="tf32x3")
    return inverse - tl.dot(below, inverse, input_precision="tf32x3")


@triton.jit(do_not_specialize=PER_STEP)
def solve_kernel(
    heads_ptr,
    total_ptr,
    beta_ptr,
    pieces_ptr,
    own_ptr,
    read_ptr,
    within_ptr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write of one value head of one piece: (I + A)^-1 beta v (`own`) and (I + A)^-1 beta e^G k (`read`) [T, HV * D],
    and q k^T D with its diagonal (`within`) [T, HV * SIZE].
    """
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
        at = heads_ptr + token[:, None] * C + d
        q = tl.load(at + key_head * D, mask=inside[:, None], other=0.0).to(tl.float32)
        k = tl.load(at + (HK + key_head) * D, mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(at + (2 * HK + head) * D, mask=inside[:, None], other=0.0).to(tl.float32)
        total = tl.load(total_ptr + token * HV + head, mask=inside, other=0.0)
        beta = tl.load(beta_ptr + token * HV + head, mask=inside, other=0.0)
        # Above the diagonal the exponent may be large.
        seen = (i[:, None] >= i[None, :]) & inside[:, None]
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        within = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decay
        to = within_ptr + (token * HV + head)[:, None] * SIZE + i
        tl.store(to, within.to(within_ptr.dtype.element_ty), mask=inside[:, None])
        lower = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decay * beta[:, None]
        lower = tl.where(i[:, None] > i[None, :], lower, 0.0)
        solved = _inverse(lower, SIZE, SIZE // 4)
        to = (token * HV + head)[:, None] * D + d
        own = tl.dot(solved, v * beta[:, None], input_precision=PRECISION)
        tl.store(own_ptr + to, own.to(own_ptr.dtype.element_ty), mask=inside[:, None])
        scaled = k * (beta * tl.exp(total))[:, None]
        read = tl.dot(solved, scaled, input_precision=PRECISION)
        tl.store(read_ptr + to, read.to(read_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=PER_STEP)
def scan_kernel(
    heads_ptr,
    total_ptr,
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
            total = tl.load(total_ptr + token * HV + head, mask=i < count, other=0.0)
            last = tl.load(total_ptr + (first + count - 1).to(tl.int64) * HV + head)
            by_head = (token * HV + head)[:, None]
            read = tl.load(read_ptr + by_head * D + d, mask=inside, other=0.0).to(tl.float32)
            own = tl.load(own_ptr + by_head * D + value, mask=inside, other=0.0).to(tl.float32)
            new = own - tl.dot(read, state, input_precision=PRECISION)
            q = tl.load(heads_ptr + token[:, None] * C + key_head * D + d, mask=inside, other=0.0).to(tl.float32)
            output = tl.dot(q * tl.exp(total)[:, None], state, input_precision=PRECISION)
            within = tl.load(within_ptr + by_head * SIZE + i, mask=inside, other=0.0).to(tl.float32)
            output += tl.dot(within, new, input_precision=PRECISION)
            to = out_ptr + by_head * D + value
            tl.store(to, output.to(out_ptr.dtype.element_ty), mask=inside)
            k = tl.load(heads_ptr + token[:, None] * C + (HK + key_head) * D + d, mask=inside, other=0.0).to(tl.float32)
            k *= tl.exp(last - total)[:, None]
            state = state * tl.exp(last) + tl.dot(tl.trans(k), new, input_precision=PRECISION)
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
    """Write the windows of some channels of one row. Snapshots read the row's old window, which is overwritten last."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    begin, end = load_pieces(rows_ptr, row, num_rows)
    if begin < end:
        slot, start, row_first, row_count = load_row(rows_ptr, row, num_rows)
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < C
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
    precision = {"PRECISION": "tf32x3" if mixed.dtype is torch.float32 else "tf32"}
    prepared = torch.empty((tokens, channels), dtype=mixed.dtype, device=mixed.device)
    total, beta = torch.empty((2, tokens, heads), dtype=torch.float32, device=mixed.device)
    own, read = torch.empty((2, tokens, heads * width), dtype=mixed.dtype, device=mixed.device)
    within = torch.empty((tokens, heads * PIECE_TOKENS), dtype=mixed.dtype, device=mixed.device)
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
        total,
        beta,
        mixed.stride(0),
        gates.stride(0),
        window.stride(0),
        num_rows,
        TAPS=taps,
        RING=window.shape[1],
        num_warps=8,
        **shape,
    )
    solve_kernel[(num_pieces, heads)](
        prepared,
        total,
        beta,
        pieces,
        own,
        read,
        within,
        num_warps=8,
        **precision,
        **shape,
    )
    scan_width = min(width, MAX_SCAN_WIDTH)
    scan_kernel[(num_rows, heads, width // scan_width)](
        prepared,
        total,
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
        **precision,
        **shape,
    )
    del shape["HK"]
    gated_norm_kernel[(num_pieces, heads)](out, z, norm, pieces, z.stride(0), eps, **shape)
    window_kernel[(num_rows, cdiv(channels, WINDOW_BLOCK_ELEMENTS))](
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
