"""Gated DeltaNet of rows of several tokens, in pieces of up to 64 tokens (see `chunked_rule` for the formulas).

Only the scan passes from piece to piece of a row. Before it, all pieces are computed at once: convolution, unit vectors
and decays; then what each piece needs besides the state (`solve`). Norms and windows come last.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.kernels.delta.scan import scan
from roseinfer.kernels.delta.solve import solve
from roseinfer.kernels.delta.tables import (
    BETA,
    DECAY_FIELD_COUNT,
    PER_STEP,
    PIECE_TOKENS,
    SINCE,
    TOTAL,
    UNTIL,
    load_piece,
    load_row,
)
from roseinfer.kernels.delta.windows import store_windows


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
            to = decays_ptr + (token * HV + value_head) * DECAY_FIELD_COUNT
            tl.store(to + TOTAL, sums, mask=inside)
            tl.store(to + BETA, tl.sigmoid(b), mask=inside)
            tl.store(to + SINCE, tl.exp(sums), mask=inside)
            last = tl.sum(tl.where(index == count - 1, sums, 0.0), 0)
            tl.store(to + UNTIL, tl.exp(last - sums), mask=inside)
        to = heads_ptr + token[:, None] * C + channel
        tl.store(to, total.to(heads_ptr.dtype.element_ty), mask=inside[:, None])


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
    num_pieces, tokens = pieces.shape[0], mixed.shape[0]
    if num_pieces == 0:
        return
    taps, channels = conv.shape
    key_heads = (channels // width - heads) // 2
    shape = {"HV": heads, "D": width, "SIZE": PIECE_TOKENS, **early_start.options(mixed.device)}
    prepared = torch.empty((tokens, channels), dtype=mixed.dtype, device=mixed.device)
    decays = torch.empty((tokens, heads, DECAY_FIELD_COUNT.value), dtype=torch.float32, device=mixed.device)
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
        rows.shape[1],
        HK=key_heads,
        TAPS=taps,
        RING=window.shape[1],
        num_warps=8,
        **shape,
    )
    solved = solve(prepared, decays, pieces, heads, width)
    scan(prepared, decays, *solved, memory, rows, pieces, out)
    gated_norm_kernel[(num_pieces, heads)](out, z, norm, pieces, z.stride(0), eps, num_warps=8, **shape)
    store_windows(inputs)
