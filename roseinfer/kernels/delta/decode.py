"""Gated DeltaNet of rows of one token: convolution, gates, state and gated norm in one launch.

One program computes one value head of one row, whose state it reads and writes once.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.delta.inputs import DeltaInputs
from roseinfer.kernels.delta.tables import PER_STEP, load_row


@triton.jit
def _convolved(
    mixed_ptr, conv_ptr, window_ptr, ring, channel, token, start, mixed_stride, C: tl.constexpr, TAPS: tl.constexpr
):
    """Return silu(convolution) of some channels at position `start`, and the input there, both in float32."""
    current = tl.load(mixed_ptr + token * mixed_stride + channel)
    total = current.to(tl.float32) * tl.load(conv_ptr + (TAPS - 1) * C + channel)
    for tap in tl.static_range(TAPS - 1):
        position = start - (TAPS - 1) + tap
        entry = tl.maximum(position, 0) % TAPS
        held = tl.load(window_ptr + ring + entry * C + channel, mask=position >= 0, other=0.0)
        total += held.to(tl.float32) * tl.load(conv_ptr + tap * C + channel)
    return total * tl.sigmoid(total), current


@triton.jit
def _copy_window(window_ptr, ring, target, channel, start, C: tl.constexpr, TAPS: tl.constexpr):
    """Copy the inputs before the token at position `start` to another slot."""
    for back in tl.static_range(1, TAPS):
        position = start - back
        at = (tl.maximum(position, 0) % TAPS) * C + channel
        held = tl.load(window_ptr + ring + at, mask=position >= 0, other=0.0)
        tl.store(window_ptr + target + at, held, mask=position >= 0)


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
    rows_ptr,
    out_ptr,
    mixed_stride,
    z_stride,
    gates_stride,
    memory_stride,
    window_stride,
    num_rows,
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    TAPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0), tl.program_id(1)
    slot, start, first, count = load_row(rows_ptr, row, num_rows)
    if count == 1:
        C: tl.constexpr = (2 * HK + HV) * D
        GROUP: tl.constexpr = HV // HK
        token = first.to(tl.int64)
        key_head = head // GROUP
        d = tl.arange(0, D)
        at_q, at_k, at_v = key_head * D + d, (HK + key_head) * D + d, (2 * HK + head) * D + d
        ring = slot * window_stride
        q, q_input = _convolved(mixed_ptr, conv_ptr, window_ptr, ring, at_q, token, start, mixed_stride, C, TAPS)
        k, k_input = _convolved(mixed_ptr, conv_ptr, window_ptr, ring, at_k, token, start, mixed_stride, C, TAPS)
        v, v_input = _convolved(mixed_ptr, conv_ptr, window_ptr, ring, at_v, token, start, mixed_stride, C, TAPS)
        q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * D**-0.5
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        b = tl.load(gates_ptr + token * gates_stride + head).to(tl.float32)
        a = tl.load(gates_ptr + token * gates_stride + HV + head).to(tl.float32) + tl.load(dt_bias_ptr + head)
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        kept = tl.exp(tl.load(decay_ptr + head) * softplus)
        # State [K, V].
        part = head * D * D + d[:, None] * D + d[None, :]
        state = tl.load(memory_ptr + slot * memory_stride + part, mask=(start > 0) & (part >= 0), other=0.0) * kept
        new = (v - tl.sum(state * k[:, None], 0)) * tl.sigmoid(b)
        state += k[:, None] * new[None, :]
        tl.store(memory_ptr + slot * memory_stride + part, state)
        # Programs of the same key head read other entries of the window than this one.
        entry = ring + (start % TAPS) * C
        writes = head % GROUP == 0
        tl.store(window_ptr + entry + at_q, q_input, mask=writes & (d >= 0))
        tl.store(window_ptr + entry + at_k, k_input, mask=writes & (d >= 0))
        tl.store(window_ptr + entry + at_v, v_input)
        # The norm of the output, and its gate.
        output = tl.sum(state * q[:, None], 0)
        output *= tl.rsqrt(tl.sum(output * output, 0) / D + eps) * tl.load(norm_ptr + d)
        z = tl.load(z_ptr + token * z_stride + head * D + d).to(tl.float32)
        output *= z * tl.sigmoid(z)
        tl.store(out_ptr + token * (HV * D) + head * D + d, output.to(out_ptr.dtype.element_ty))
        snapshot = tl.load(rows_ptr + 4 * num_rows + row).to(tl.int64)
        if snapshot >= 0:
            tl.store(memory_ptr + snapshot * memory_stride + part, state)
            target = snapshot * window_stride
            _copy_window(window_ptr, ring, target, at_q, start, C, TAPS)
            _copy_window(window_ptr, ring, target, at_k, start, C, TAPS)
            _copy_window(window_ptr, ring, target, at_v, start, C, TAPS)
            entry = target + (start % TAPS) * C
            tl.store(window_ptr + entry + at_q, q_input)
            tl.store(window_ptr + entry + at_k, k_input)
            tl.store(window_ptr + entry + at_v, v_input)


def delta_decode(inputs: DeltaInputs, out: torch.Tensor, *, num_warps: int = 4) -> None:
    """Compute all rows of one token: write their outputs to `out` [T, HV * D], and update the slots of the rows and
    their snapshots.
    """
    mixed, z, gates, conv, decay, dt_bias, norm, memory, window, rows, _, eps = inputs
    heads, width = memory.shape[1], memory.shape[2]
    assert memory.shape[3] == width and mixed.stride(1) == z.stride(1) == gates.stride(1) == 1
    num_rows = rows.shape[1]
    if num_rows == 0:
        return
    delta_decode_kernel[(num_rows, heads)](
        mixed,
        z,
        gates,
        conv,
        decay,
        dt_bias,
        norm,
        memory,
        window,
        rows,
        out,
        mixed.stride(0),
        z.stride(0),
        gates.stride(0),
        memory.stride(0),
        window.stride(0),
        num_rows,
        eps,
        HK=(conv.shape[1] // width - heads) // 2,
        HV=heads,
        D=width,
        TAPS=conv.shape[0],
        num_warps=num_warps,
        **early_start.options(mixed.device),
    )
