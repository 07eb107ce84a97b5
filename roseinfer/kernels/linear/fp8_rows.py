"""Rows of activations rounded to FP8 (e4m3fn), together with the operations before a product.

Each row has one scale, its largest magnitude / 448, or one for each 128 columns. Norm and activation are computed in
float32 and rounded once, to the code: the input of a product in eight bits is never written in 16 bits.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import CODES, KERNEL_MAX_CODE, MAX_CODE, SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton
from roseinfer.kernels.linear.activation import activate, activate_reference
from roseinfer.kernels.linear.norm import MAX_WIDTH

# Scales by groups are read four rows at a time, so the number of rows of codes is a multiple of this.
MULTIPLE_ROWS = 4
# Steps of so many rows are allocated a multiple of 128 rows: their products go by tiles, and the copy engine is slow if
# a tile is partly outside of the matrix. On an H200 a layer of Qwen3-8B without its attention takes 83 us for 72 and
# for 128 rows, but 119 for 72 rows in a matrix of 72 (channel scales; block: 92 and 112). From 257 rows on it makes no
# difference.
_TILED_ROWS, _TILE_ROWS = range(65, 257), 128
# Elements of a row that a program of `gated_rows` and `plain_rows` holds at once: by groups, and of a whole row.
_GROUPED_BLOCK, _WHOLE_BLOCK = 1024, 16384
# Above so many rows, programs of `plain_rows` by groups have fewer warps, then more elements: on an H200 8,192 rows of
# 4,096 take 26 us instead of 40, 2,048 take 7.1 instead of 10.3, 536 take 3.2 instead of 3.6.
_MAX_FEW_ROWS, _MAX_MANY_ROWS = 256, 1024


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Matrix codes * scales, of which the first `rows` rows are defined.

    codes: [R, K] float8_e4m3fn, contiguous, rows <= R. scales: float32, [R, 1] (one a row) or [R, K / 128] with its
    columns contiguous (one a group).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int

    def widen(self) -> torch.Tensor:
        """Return the matrix, [rows, K] float32."""
        width = self.codes.shape[1] // self.scales.shape[1]
        return (self.codes.float() * self.scales.repeat_interleave(width, 1))[: self.rows]

    @classmethod
    def empty(cls, rows: int, width: int, grouped: bool, device: torch.device) -> "Fp8Rows":
        """Allocate [rows, width]; grouped, width is a multiple of 128."""
        held = _allocated_rows(rows, grouped)
        codes = torch.empty((held, width), dtype=CODES, device=device)
        if grouped:
            scales = torch.empty((width // SCALE_BLOCK, held), dtype=torch.float32, device=device).t()
        else:
            scales = torch.empty((held, 1), dtype=torch.float32, device=device)
        return cls(codes, scales, rows)


def _allocated_rows(rows: int, grouped: bool) -> int:
    """Return the number of rows to allocate for so many."""
    multiple = _TILE_ROWS if rows in _TILED_ROWS else MULTIPLE_ROWS if grouped else 1
    return cdiv(rows, multiple) * multiple


@triton.jit
def scale_of(largest):
    """Return the scale of numbers up to `largest`: never zero, nor so small that its inverse is infinite."""
    return tl.maximum(largest, 1e-30) * (1.0 / KERNEL_MAX_CODE)


@triton.jit
def code_of(x, scale):
    code = tl.clamp(x * (1.0 / scale), -KERNEL_MAX_CODE, KERNEL_MAX_CODE, propagate_nan=tl.PropagateNan.ALL)
    return code.to(tl.float8e4nv)


@triton.jit
def _columns(first, N: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr):
    """Return BLOCK columns from `first`, and which a row has: [BLOCK], or GROUPED [groups, 128] and [groups, 1]."""
    if GROUPED:
        group = first // 128 + tl.arange(0, BLOCK // 128)
        return group[:, None] * 128 + tl.arange(0, 128)[None, :], (group < N // 128)[:, None]
    else:
        column = first + tl.arange(0, BLOCK)
        return column, column < N


@triton.jit
def _sum(x, GROUPED: tl.constexpr):
    return tl.sum(tl.sum(x, 1), 0) if GROUPED else tl.sum(x, 0)


@triton.jit
def _store_rounded(
    x, codes_ptr, scales_ptr, scale_stride, first, N: tl.constexpr, BLOCK: tl.constexpr, GROUPED: tl.constexpr
):
    """Round the columns x of `_columns`, a whole row or, GROUPED, some groups, and store them at the row's pointers."""
    column, inside = _columns(first, N, BLOCK, GROUPED)
    if GROUPED:
        scale = scale_of(tl.max(tl.abs(x), 1))
        code = code_of(x, scale[:, None])
        group = first // 128 + tl.arange(0, BLOCK // 128)
        tl.store(scales_ptr + group.to(tl.int64) * scale_stride, scale, mask=group < N // 128)
    else:
        scale = scale_of(tl.max(tl.abs(x), 0))
        code = code_of(x, scale)
        tl.store(scales_ptr, scale)
    tl.store(codes_ptr + column, code, mask=inside)


@triton.jit
def _normed_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    scale_stride,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    CENTRED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the product reads its weight meanwhile
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column, inside = _columns(0, N, BLOCK, GROUPED)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x = tl.where(inside, x - _sum(x, GROUPED) / N, 0.0)
    x *= tl.rsqrt(_sum(x * x, GROUPED) / N + eps)
    x *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        x += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    _store_rounded(x, codes_ptr + row * N, scales_ptr + row, scale_stride, 0, N, BLOCK, GROUPED)


@triton.jit
def _read(x_ptr, column, inside, N: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr):
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    x = activate(x, ACTIVATION)
    if GATED:
        x *= tl.load(x_ptr + N + column, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    x_stride,
    scale_stride,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Round rows. GROUPED: program (row, part of it); else one program takes a row, in pieces if it exceeds BLOCK."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the product reads its weight meanwhile
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    codes_ptr += row * N
    scales_ptr += row
    first = tl.program_id(1) * BLOCK
    column, inside = _columns(first, N, BLOCK, GROUPED)
    if GROUPED or BLOCK >= N:
        x = _read(x_ptr, column, inside, N, ACTIVATION, GATED)
        _store_rounded(x, codes_ptr, scales_ptr, scale_stride, first, N, BLOCK, GROUPED)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, N, BLOCK):
            x = _read(x_ptr, column + start, column + start < N, N, ACTIVATION, GATED)
            largest = tl.maximum(largest, tl.abs(x))
        scale = scale_of(tl.max(largest, 0))
        tl.store(scales_ptr, scale)
        for start in tl.range(0, N, BLOCK):
            x = _read(x_ptr, column + start, column + start < N, N, ACTIVATION, GATED)
            tl.store(codes_ptr + column + start, code_of(x, scale), mask=column + start < N)


def normed_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    grouped: bool,
) -> Fp8Rows:
    """Return norm(x), rounded: RMSNorm without a bias, LayerNorm with one (see `kernels/linear/norm.py`).

    x: [T, N], N <= 16384 and, grouped, a multiple of 128; its rows may be apart.
    """
    rows, width = x.shape
    assert width <= MAX_WIDTH and x.stride(1) == 1
    out = Fp8Rows.empty(rows, width, grouped, x.device)
    block = next_power_of_2(width)
    if rows:
        _normed_rows_kernel[(rows,)](
            x,
            weight,
            bias,
            out.codes,
            out.scales,
            x.stride(0),
            out.scales.stride(1),
            eps,
            N=width,
            BLOCK=block,
            GROUPED=grouped,
            CENTRED=bias is not None,
            num_warps=_warps(block, grouped),
            **early_start.options(x.device),
        )
    return out


def _warps(block: int, grouped: bool) -> int:
    """Return the fastest number on an H200 for 16 to 4,096 columns of a program and 16 to 2,048 rows."""
    return min(max(block // 1024, 4), 16) if grouped else min(max(block // 512, 4), 8)


def plain_rows(x: torch.Tensor, *, grouped: bool) -> Fp8Rows:
    """Return x, rounded. x: [T, N], N grouped a multiple of 128; its rows may be apart."""
    return _launch(x, x.shape[1], None, False, grouped)


def activated_rows(x: torch.Tensor, activation: str, *, grouped: bool) -> Fp8Rows:
    """Return activation(x), rounded; see `plain_rows`."""
    return _launch(x, x.shape[1], activation, False, grouped)


def gated_rows(gate_up: torch.Tensor, activation: str, *, grouped: bool) -> Fp8Rows:
    """Return activation(gate) * up, rounded. gate_up: [T, 2 * I], gate first; its rows may be apart."""
    return _launch(gate_up, gate_up.shape[1] // 2, activation, True, grouped)


def _launch(x: torch.Tensor, width: int, activation: str | None, gated: bool, grouped: bool) -> Fp8Rows:
    rows = x.shape[0]
    assert x.stride(1) == 1
    out = Fp8Rows.empty(rows, width, grouped, x.device)
    most, warps = _GROUPED_BLOCK if grouped else _WHOLE_BLOCK, None
    if grouped and activation is None and rows > _MAX_FEW_ROWS:
        # With many small programs, the overhead of each weighs more than its waiting.
        most, warps = 2 * _GROUPED_BLOCK if rows > _MAX_MANY_ROWS else _GROUPED_BLOCK, 2
    block = min(next_power_of_2(width), most)
    if rows:
        _rows_kernel[(rows, cdiv(width, block) if grouped else 1)](
            x,
            out.codes,
            out.scales,
            x.stride(0),
            out.scales.stride(1),
            N=width,
            BLOCK=block,
            GROUPED=grouped,
            ACTIVATION=activation or "none",
            GATED=gated,
            num_warps=warps or _warps(block, grouped),
            **early_start.options(x.device),
        )
    return out


def rows_reference(x: torch.Tensor, *, grouped: bool) -> Fp8Rows:
    """Return x [T, N] of any float type, rounded."""
    rows, width = x.shape
    out = Fp8Rows.empty(rows, width, grouped, x.device)
    groups = x.float().view(rows, width // SCALE_BLOCK if grouped else 1, -1)
    largest = groups.abs().amax(2)
    scales = largest.clamp_(min=1e-30) * (1.0 / MAX_CODE)
    codes = (groups * (1.0 / scales)[:, :, None]).clamp_(-MAX_CODE, MAX_CODE)
    out.codes[:rows] = codes.view(rows, width).to(CODES)
    out.scales[:rows] = scales
    return out


def normed_rows_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, grouped: bool
) -> Fp8Rows:
    """`normed_rows` in plain torch."""
    if bias is None:
        return rows_reference(F.rms_norm(x.float(), weight.shape, weight.float(), eps), grouped=grouped)
    return rows_reference(F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps), grouped=grouped)


def gated_rows_reference(gate_up: torch.Tensor, activation: str, *, grouped: bool) -> Fp8Rows:
    """`gated_rows` in plain torch."""
    gate, up = gate_up.float().chunk(2, -1)
    return rows_reference(activate_reference(gate, activation) * up, grouped=grouped)
