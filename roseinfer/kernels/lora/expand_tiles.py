"""Sums of `shrink_tiles` times B, added to the outputs of a product: the second half of what adapters add to many rows.

A program takes a tile of outputs. What follows a product of gate and up reads all of its outputs anyway, so
`gated_expanded` and `gated_rows_expanded` add to them there. Otherwise, `expand` adds in place. Tokens without an
adapter get the same bits as without this.
"""

from typing import Any

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton
from roseinfer.kernels.linear.activation import activate_gated
from roseinfer.kernels.linear.fp8_rows import Fp8Rows, code_of, scale_of
from roseinfer.kernels.lora.shrink_tiles import MAX_FEW_TOKENS, TileSums

_MIN_TILE_ROWS, _MAX_TILE_ROWS, _TILE_COLUMNS = 16, 64, 64
# Tiles of codes are twice as wide, so those of many tokens have fewer rows.
_MAX_CODE_TILE_ROWS = 32
_MAX_WARP_ELEMENTS, _MIN_WARPS = 1024, 4
_MIN_DOT_COLUMNS, _MAX_DOT_COLUMNS = 16, 64
# Sums of a row, zeros included, that are multiplied at once. Tiles of few tokens have rows of many slots.
_FEW_TOKENS_INNER_BYTES, _INNER_BYTES = 256, 64


@triton.jit
def _slot_range(slots, SLOTS: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return the first slot to multiply by, and the last one that a row has; (0, 0) if all are multiplied at once."""
    if SLOTS <= AT_ONCE:
        return 0, 0
    else:
        last = tl.max(slots, 0)
        first = tl.min(tl.where(slots < 0, SLOTS, slots), 0)
        return tl.maximum(tl.minimum(first, last), 0) // AT_ONCE * AT_ONCE, last


@triton.jit
def _factors(
    n, inside, slot, place, ranks_ptr, b_ptr, SLOTS: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return B [n, AT_ONCE * BLOCK_R] of AT_ONCE slots and BLOCK_R places of their ranks; zeros beyond a rank."""
    slots, places = slot + tl.arange(0, AT_ONCE), place + tl.arange(0, BLOCK_R)
    ranks = tl.multiple_of(tl.load(ranks_ptr + slots, mask=slots < SLOTS, other=0), 8)
    at = b_ptr + (slots.to(tl.int64) * (OUT * R))[None, :, None] + n[:, None, None] * ranks[None, :, None]
    there = inside[:, None, None] & (places[None, :] < ranks[:, None])[None, :, :]
    return tl.reshape(tl.load(at + places[None, None, :], mask=there, other=0.0), [BLOCK_N, AT_ONCE * BLOCK_R])


@triton.jit
def _sums(
    module, row, slots, slot, place, sums_ptr, ranks_ptr, SLOTS: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Return a module's sums [row, AT_ONCE * BLOCK_R]; zeros but for each row's own slot, within its rank."""
    of, places = slot + tl.arange(0, AT_ONCE), place + tl.arange(0, BLOCK_R)
    ranks = tl.multiple_of(tl.load(ranks_ptr + of, mask=of < SLOTS, other=0), 8)
    own = (slots[:, None] == of[None, :])[:, :, None] & (places[None, :] < ranks[:, None])[None, :, :]
    at = sums_ptr + row[:, None, None] * COLUMNS + (module // R * R + places)[None, None, :]
    return tl.reshape(tl.load(at, mask=own, other=0.0), [BLOCK_M, AT_ONCE * BLOCK_R])


@triton.jit
def _added(
    delta, b, starts, first_n, n, row, slots, slot, place, sums_ptr, ranks_ptr, starts_ptr,
    SLOTS: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return delta and what `_factors` b add. starts: where the module's sums begin of each output or, ALIGNED, of
    all.
    """
    if ALIGNED:
        sums = _sums(starts, row, slots, slot, place, sums_ptr, ranks_ptr, SLOTS, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_R)
        delta = tl.dot(sums, tl.trans(b), delta, input_precision=PRECISION)
    else:
        for module in tl.range(tl.load(starts_ptr + first_n), tl.max(starts, 0) + 1, R, num_stages=1):
            sums = _sums(
                module, row, slots, slot, place, sums_ptr, ranks_ptr, SLOTS, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_R
            )
            of_module = tl.where((starts == module)[:, None], b, 0.0)
            delta = tl.dot(sums, tl.trans(of_module), delta, input_precision=PRECISION)
    return delta


@triton.jit
def _rest(
    delta, starts, first_n, n, inside, row, slots, first, last, sums_ptr, ranks_ptr, b_ptr, starts_ptr,
    SLOTS: tl.constexpr, OUT: tl.constexpr, R: tl.constexpr, COLUMNS: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return delta and what all slots and places of the rank add but the first ones."""
    if SLOTS > AT_ONCE or R > BLOCK_R:
        for slot in tl.range(first if R > BLOCK_R else first + AT_ONCE, last + 1, AT_ONCE, num_stages=1):
            if tl.max(((slots >= slot) & (slots < slot + AT_ONCE)).to(tl.int32), 0) > 0:
                for place in tl.range(tl.where(slot == first, BLOCK_R, 0), R, BLOCK_R, num_stages=1):
                    b = _factors(n, inside, slot, place, ranks_ptr, b_ptr, SLOTS, OUT, R, AT_ONCE, BLOCK_N, BLOCK_R)
                    delta = _added(
                        delta, b, starts, first_n, n, row, slots, slot, place, sums_ptr, ranks_ptr, starts_ptr,
                        SLOTS, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_R, ALIGNED, PRECISION,
                    )  # fmt: skip
    return delta


@triton.jit
def _starts(starts_ptr, n, inside, first_n, ALIGNED: tl.constexpr):
    """Return where the sums of each output's module begin or, ALIGNED, of all outputs' module."""
    if ALIGNED:
        return tl.load(starts_ptr + first_n)
    else:
        return tl.load(starts_ptr + n, mask=inside, other=-1)


@triton.jit(do_not_specialize=["tokens"])
def lora_expand_kernel(
    y_ptr,
    sums_ptr,
    slots_ptr,
    ranks_ptr,
    b_ptr,
    starts_ptr,
    tokens,
    stride_y,
    SLOTS: tl.constexpr,
    OUT: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add, in program (i, tile), to outputs i * BLOCK_N and following of a tile's tokens."""
    first_n = tl.program_id(0) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < OUT
    slots = tl.load(slots_ptr + row, mask=row < tokens, other=-1)
    starts = _starts(starts_ptr, n, inside, first_n, ALIGNED)
    first, last = _slot_range(slots, SLOTS, AT_ONCE)
    b = _factors(n, inside, first, 0, ranks_ptr, b_ptr, SLOTS, OUT, R, AT_ONCE, BLOCK_N, BLOCK_R)

    # From here on, results of earlier kernels may be read.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    y_ptr += tl.program_id(1).to(tl.int64) * BLOCK_M * stride_y
    at = y_ptr + tl.arange(0, BLOCK_M)[:, None] * stride_y + n[None, :]
    own = (slots >= 0)[:, None] & inside[None, :]
    y = tl.load(at, mask=own, other=0.0)
    delta = _added(
        tl.zeros([BLOCK_M, BLOCK_N], tl.float32), b, starts, first_n, n, row, slots, first, 0, sums_ptr, ranks_ptr,
        starts_ptr, SLOTS, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    delta = _rest(
        delta, starts, first_n, n, inside, row, slots, first, last, sums_ptr, ranks_ptr, b_ptr, starts_ptr,
        SLOTS, OUT, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_N, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    y = y.to(tl.float32) + delta.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=own)


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def lora_gated_kernel(
    y_ptr,
    out_ptr,
    scales_ptr,
    sums_ptr,
    slots_ptr,
    ranks_ptr,
    b_ptr,
    starts_ptr,
    tokens,
    stride_y,
    scale_stride,
    SLOTS: tl.constexpr,
    OUT: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write, in program (i, tile), activation(gate) * up of columns i * BLOCK_N and following, with what adapters add
    to gate and up. scales_ptr: the result is in FP8, with a scale for each row's BLOCK_N columns.
    """
    WIDTH: tl.constexpr = OUT // 2
    first_n = tl.program_id(0) * BLOCK_N
    n = first_n + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = n < WIDTH
    slots = tl.load(slots_ptr + row, mask=row < tokens, other=-1)
    gate_starts = _starts(starts_ptr, n, inside, first_n, ALIGNED)
    up_starts = _starts(starts_ptr, n + WIDTH, inside, first_n + WIDTH, ALIGNED)
    y_ptr += tl.program_id(1).to(tl.int64) * BLOCK_M * stride_y
    at = y_ptr + tl.arange(0, BLOCK_M)[:, None] * stride_y + n[None, :]
    there, own = (row < tokens)[:, None] & inside[None, :], (slots >= 0)[:, None]
    first, last = _slot_range(slots, SLOTS, AT_ONCE)
    gate_b = _factors(n, inside, first, 0, ranks_ptr, b_ptr, SLOTS, OUT, R, AT_ONCE, BLOCK_N, BLOCK_R)
    up_b = _factors(n + WIDTH, inside, first, 0, ranks_ptr, b_ptr, SLOTS, OUT, R, AT_ONCE, BLOCK_N, BLOCK_R)

    # From here on, results of earlier kernels may be read.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    gate, up = tl.load(at, mask=there, other=0.0), tl.load(at + WIDTH, mask=there, other=0.0)
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate_delta = _added(
        zeros, gate_b, gate_starts, first_n, n, row, slots, first, 0, sums_ptr, ranks_ptr, starts_ptr,
        SLOTS, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    up_delta = _added(
        zeros, up_b, up_starts, first_n + WIDTH, n + WIDTH, row, slots, first, 0, sums_ptr, ranks_ptr, starts_ptr,
        SLOTS, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    gate_delta = _rest(
        gate_delta, gate_starts, first_n, n, inside, row, slots, first, last, sums_ptr, ranks_ptr, b_ptr, starts_ptr,
        SLOTS, OUT, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_N, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    up_delta = _rest(
        up_delta, up_starts, first_n + WIDTH, n + WIDTH, inside, row, slots, first, last, sums_ptr, ranks_ptr, b_ptr,
        starts_ptr, SLOTS, OUT, R, COLUMNS, AT_ONCE, BLOCK_M, BLOCK_N, BLOCK_R, ALIGNED, PRECISION,
    )  # fmt: skip
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    gate, up = tl.where(own, gate + gate_delta, gate), tl.where(own, up + up_delta, up)  # -0.0 + 0.0 is 0.0
    out = activate_gated(gate, up, ACTIVATION)
    if scales_ptr is not None:
        scale = scale_of(tl.max(tl.abs(out), 1))
        out = code_of(out, scale[:, None])
        tl.store(scales_ptr + row + tl.program_id(0).to(tl.int64) * scale_stride, scale, mask=row < tokens)
    out_ptr += tl.program_id(1).to(tl.int64) * BLOCK_M * WIDTH
    to = out_ptr + tl.arange(0, BLOCK_M)[:, None] * WIDTH + n[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=there)


def expand(y: torch.Tensor, sums: TileSums) -> torch.Tensor:
    """Add what adapters change to y [T, out] in place, and return y; its rows may be apart."""
    rows = _tile_rows(len(y))
    options = _options(y, sums, rows, _TILE_COLUMNS)
    lora_expand_kernel[(cdiv(y.shape[1], _TILE_COLUMNS), cdiv(len(y), rows))](y, **options)
    return y


def gated_expanded(y: torch.Tensor, sums: TileSums, activation: str) -> torch.Tensor:
    """Return activation(gate) * up [T, I], where gate and up are y [T, 2 * I] with what adapters change."""
    out = torch.empty((len(y), y.shape[1] // 2), dtype=y.dtype, device=y.device)
    _gate(y, sums, activation, out, None, _tile_rows(len(y)), _TILE_COLUMNS)
    return out


def gated_rows_expanded(y: torch.Tensor, sums: TileSums, activation: str) -> Fp8Rows:
    """Return `gated_expanded` rounded to FP8 with a scale for each 128 columns."""
    out = Fp8Rows.empty(len(y), y.shape[1] // 2, True, y.device)
    rows = _MAX_CODE_TILE_ROWS
    if len(y) <= MAX_FEW_TOKENS:
        rows = _MIN_TILE_ROWS if len(y) <= _MIN_TILE_ROWS else _MAX_TILE_ROWS
    _gate(y, sums, activation, out.codes, out.scales, rows, SCALE_BLOCK)
    return out


def _gate(
    y: torch.Tensor,
    sums: TileSums,
    activation: str,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    rows: int,
    columns: int,
) -> None:
    options = _options(y, sums, rows, columns)
    lora_gated_kernel[(cdiv(out.shape[1], columns), cdiv(len(y), rows))](
        y,
        out,
        scales,
        scale_stride=0 if scales is None else scales.stride(1),
        ACTIVATION=activation,
        **options,
    )


def _tile_rows(tokens: int) -> int:
    return min(_MAX_TILE_ROWS, max(_MIN_TILE_ROWS, next_power_of_2(tokens)))


def _options(y: torch.Tensor, sums: TileSums, rows: int, columns: int) -> dict[str, Any]:
    """Return the arguments that all kernels of outputs y [T, out] have, for tiles of rows x columns."""
    values, slots, matrices = sums
    assert y.stride(1) == 1 and y.shape == (len(slots), len(matrices.starts))
    places = min(_MAX_DOT_COLUMNS, max(_MIN_DOT_COLUMNS, next_power_of_2(matrices.max_rank)))
    at_once = _FEW_TOKENS_INNER_BYTES if len(y) <= MAX_FEW_TOKENS else _INNER_BYTES
    at_once = min(at_once // (places * values.itemsize), next_power_of_2(len(matrices.b)))
    return {
        "sums_ptr": values,
        "slots_ptr": slots,
        "ranks_ptr": matrices.ranks,
        "b_ptr": matrices.b,
        "starts_ptr": matrices.starts,
        "tokens": len(y),
        "stride_y": y.stride(0),
        "SLOTS": len(matrices.b),
        "OUT": y.shape[1],
        "R": matrices.max_rank,
        "COLUMNS": matrices.columns,
        "AT_ONCE": max(1, at_once),
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_R": places,
        "ALIGNED": matrices.multiple % columns == 0,
        "PRECISION": "ieee",  # which only matters for float32
        "num_warps": max(_MIN_WARPS, rows * columns // _MAX_WARP_ELEMENTS),
        **early_start.options(y.device),
    }
