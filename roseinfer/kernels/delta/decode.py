"""Gated DeltaNet of rows of one token and its drafts: convolution, gates, state and gated norm in one launch.

A program computes one value head of a row, whose state it reads and writes once. It replays the drafts of the
sequence's last row that were right, from inputs that the slot keeps. Then comes the row's first token, after which the
state is written back, and then drafts, of which outputs are written and inputs kept.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.kernels.delta.tables import PER_STEP, load_drafts, load_row, load_snapshot

# Rows of a step with prompts share so many programs for each head. A captured step has room for many more rows than it
# mostly has, and to start a program takes a nanosecond.
MAX_ROW_PROGRAMS = 64


@triton.jit
def _convolved(
    mixed_ptr,
    conv_ptr,
    window_ptr,
    ring,
    channel,
    token,
    position,
    start,
    mixed_stride,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Return silu(convolution) of some channels at `position`, and the input there, both in float32.

    Inputs before position `start` are in the window, others in the step's projections.
    """
    total = tl.zeros_like(channel).to(tl.float32)
    current = total
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        at = position - back
        current = total * 0.0
        if DRAFTS or back > 0:
            held = window_ptr + ring + (tl.maximum(at, 0) % RING) * C + channel
            current += tl.load(held, mask=(at >= 0) & (at < start) & (channel >= 0), other=0.0).to(tl.float32)
        if DRAFTS or back == 0:
            new = mixed_ptr + (token - back) * mixed_stride + channel
            current += tl.load(new, mask=(at >= start) & (channel >= 0), other=0.0).to(tl.float32)
        total += current * tl.load(conv_ptr + tap * C + channel)
    return total * tl.sigmoid(total), current


@triton.jit
def _copy_window(window_ptr, ring, target, channel, position, C: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr):
    """Copy the inputs before the token at `position` to another slot."""
    for back in tl.static_range(1, TAPS):
        before = position - back
        at = (tl.maximum(before, 0) % RING) * C + channel
        held = tl.load(window_ptr + ring + at, mask=(before >= 0) & (channel >= 0), other=0.0)
        tl.store(window_ptr + target + at, held, mask=(before >= 0) & (channel >= 0))


@triton.jit(do_not_specialize=PER_STEP)
def delta_decode_kernel(
    mixed_ptr,
    z_ptr,
    gates_ptr,
    conv_ptr,
    decay_ptr,
    dt_bias_ptr,
    norm_ptr,
    memory_ptr,
    window_ptr,
    kept_ptr,
    rows_ptr,
    out_ptr,
    mixed_stride,
    z_stride,
    gates_stride,
    memory_stride,
    window_stride,
    kept_stride,
    num_rows,
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    DRAFTS: tl.constexpr,
    SHARES_PROGRAMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1)
    end = num_rows if SHARES_PROGRAMS else tl.program_id(0) + 1
    for row in range(tl.program_id(0), end, tl.num_programs(0)):
        slot, start, first, count = load_row(rows_ptr, row, num_rows)
        if DRAFTS:
            replayed, drafts = load_drafts(rows_ptr, row, num_rows)
        else:
            replayed, drafts = 0, 0
        if count == 1 + drafts:
            C: tl.constexpr = (2 * HK + HV) * D
            GROUP: tl.constexpr = HV // HK
            key_head = head // GROUP
            d = tl.arange(0, D)
            at_q, at_k, at_v = key_head * D + d, (HK + key_head) * D + d, (2 * HK + head) * D + d
            ring = slot * window_stride
            snapshot, snapshot_after = load_snapshot(rows_ptr, row, num_rows)
            # State [K, V].
            part = head * D * D + d[:, None] * D + d[None, :]
            begins = (start - replayed > 0) & (part >= 0)
            state = tl.load(memory_ptr + slot * memory_stride + part, mask=begins, other=0.0)
            for index in range(-replayed, drafts + 1):
                position = start + index
                token = (first + index).to(tl.int64)
                q, q_input = _convolved(
                    mixed_ptr,
                    conv_ptr,
                    window_ptr,
                    ring,
                    at_q,
                    token,
                    position,
                    start,
                    mixed_stride,
                    C,
                    TAPS,
                    RING,
                    DRAFTS,
                )
                k, k_input = _convolved(
                    mixed_ptr,
                    conv_ptr,
                    window_ptr,
                    ring,
                    at_k,
                    token,
                    position,
                    start,
                    mixed_stride,
                    C,
                    TAPS,
                    RING,
                    DRAFTS,
                )
                v, v_input = _convolved(
                    mixed_ptr,
                    conv_ptr,
                    window_ptr,
                    ring,
                    at_v,
                    token,
                    position,
                    start,
                    mixed_stride,
                    C,
                    TAPS,
                    RING,
                    DRAFTS,
                )
                q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * D**-0.5
                k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                gates_at = gates_ptr + token * gates_stride + head
                b = tl.load(gates_at, mask=index >= 0, other=0.0).to(tl.float32)
                a = tl.load(gates_at + HV, mask=index >= 0, other=0.0).to(tl.float32)
                if DRAFTS:
                    kept_at = kept_ptr + slot * kept_stride + (position % RING) * (2 * HV) + head
                    b += tl.load(kept_at, mask=index < 0, other=0.0).to(tl.float32)
                    a += tl.load(kept_at + HV, mask=index < 0, other=0.0).to(tl.float32)
                    tl.store(kept_at, b.to(kept_ptr.dtype.element_ty), mask=index > 0)
                    tl.store(kept_at + HV, a.to(kept_ptr.dtype.element_ty), mask=index > 0)
                a += tl.load(dt_bias_ptr + head)
                softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
                state *= tl.exp(tl.load(decay_ptr + head) * softplus)
                new = (v - tl.sum(state * k[:, None], 0)) * tl.sigmoid(b)
                state += k[:, None] * new[None, :]
                # Programs of the same key head read other entries of the window than this one.
                entry = ring + (position % RING) * C
                stored = (index >= 0) & (d >= 0)
                writes = (head % GROUP == 0) & stored
                tl.store(window_ptr + entry + at_q, q_input.to(window_ptr.dtype.element_ty), mask=writes)
                tl.store(window_ptr + entry + at_k, k_input.to(window_ptr.dtype.element_ty), mask=writes)
                tl.store(window_ptr + entry + at_v, v_input.to(window_ptr.dtype.element_ty), mask=stored)
                # The norm of the output, and its gate.
                output = tl.sum(state * q[:, None], 0)
                output *= tl.rsqrt(tl.sum(output * output, 0) / D + eps) * tl.load(norm_ptr + d)
                z = tl.load(z_ptr + token * z_stride + head * D + d, mask=stored, other=0.0).to(tl.float32)
                output *= z * tl.sigmoid(z)
                tl.store(out_ptr + token * (HV * D) + head * D + d, output.to(out_ptr.dtype.element_ty), mask=stored)
                if index == 0:
                    tl.store(memory_ptr + slot * memory_stride + part, state)
                if (snapshot >= 0) & (index == snapshot_after - 1):
                    tl.store(memory_ptr + snapshot * memory_stride + part, state)
                    target = snapshot * window_stride
                    _copy_window(window_ptr, ring, target, at_q, position, C, TAPS, RING)
                    _copy_window(window_ptr, ring, target, at_k, position, C, TAPS, RING)
                    _copy_window(window_ptr, ring, target, at_v, position, C, TAPS, RING)
                    entry = target + (position % RING) * C
                    tl.store(window_ptr + entry + at_q, q_input.to(window_ptr.dtype.element_ty))
                    tl.store(window_ptr + entry + at_k, k_input.to(window_ptr.dtype.element_ty))
                    tl.store(window_ptr + entry + at_v, v_input.to(window_ptr.dtype.element_ty))


def delta_decode(inputs: DeltaInputs, out: torch.Tensor, *, num_warps: int = 4) -> None:
    """Compute all rows of one token and its drafts: write their outputs to `out` [T, HV * D], and update the slots of
    the rows and their snapshots.
    """
    mixed, z, gates, conv, decay, dt_bias, norm, memory, window, kept, rows, pieces, eps = inputs
    heads, width = memory.shape[1], memory.shape[2]
    assert memory.shape[3] == width and mixed.stride(1) == z.stride(1) == gates.stride(1) == 1
    num_rows = rows.shape[1]
    if num_rows == 0:
        return
    shares = len(pieces) > 0
    delta_decode_kernel[(min(num_rows, MAX_ROW_PROGRAMS) if shares else num_rows, heads)](
        mixed,
        z,
        gates,
        conv,
        decay,
        dt_bias,
        norm,
        memory,
        window,
        window if kept is None else kept,
        rows,
        out,
        mixed.stride(0),
        z.stride(0),
        gates.stride(0),
        memory.stride(0),
        window.stride(0),
        0 if kept is None else kept.stride(0),
        num_rows,
        eps,
        HK=(conv.shape[1] // width - heads) // 2,
        HV=heads,
        D=width,
        TAPS=conv.shape[0],
        RING=window.shape[1],
        DRAFTS=kept is not None,
        SHARES_PROGRAMS=shares,
        num_warps=num_warps,
        **early_start.options(mixed.device),
    )
