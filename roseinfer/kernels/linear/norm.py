"""Normalisation over the last dimension, in float32 and rounded once.

One program normalises one row, which it reads once. The products before it add residuals (`CudaMatmul`).
"""

import torch
import torch.nn.functional as F

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton

MAX_WIDTH = 16384
# Up to so many rows, the product after a norm starts while the norm waits for its input.
EARLY_ROWS = 16


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    x_stride,
    eps,
    multiplier,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    CENTRED: tl.constexpr,
    ADDED: tl.constexpr,
    SUMMED: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()  # the product reads its weight meanwhile
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SUMMED:
        x += tl.load(residual_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - tl.sum(x, 0) / N, 0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    out = x * scale * tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        out = tl.load(residual_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32) + multiplier * out
    tl.store(out_ptr + row * N + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight. x: [T, N], N <= 16384, its rows may be apart; weight: [N].

    With a residual [T, N], contiguous, return residual + multiplier * that, rounded once; it overwrites the residual.
    """
    return _launch(x, weight, None, eps, num_warps, residual, multiplier)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    *,
    summand: torch.Tensor | None = None,
    num_warps: int | None = None,
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias; shapes as for `rms_norm`, bias: [N].

    summand: [T, N], contiguous, is added to x before; the sum is not rounded.
    """
    return _launch(x, weight, bias, eps, num_warps, summand, sums=summand is not None)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    num_warps: int | None,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    *,
    sums: bool = False,
) -> torch.Tensor:
    """Launch the kernel. sums: the residual is added before the norm, and not overwritten."""
    rows, width = x.shape
    assert width <= MAX_WIDTH and x.stride(1) == 1
    block = next_power_of_2(width)
    assert residual is None or residual.is_contiguous()
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device) if residual is None or sums else residual
    if rows:
        _norm_kernel[(rows,)](
            x,
            weight,
            bias,
            residual,
            out,
            x.stride(0),
            eps,
            multiplier,
            N=width,
            BLOCK=block,
            CENTRED=bias is not None,
            ADDED=residual is not None and not sums,
            SUMMED=sums,
            EARLY=rows <= EARLY_ROWS and early_start.capable(x.device),
            num_warps=num_warps or default_warps(block),
            **early_start.options(x.device),
        )
    return out


def default_warps(block: int) -> int:
    """Return the number of warps for 16 bytes of a 16-bit type per thread, within sensible bounds."""
    return min(max(block // 256, 4), 16)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)
