"""Sums of `shrink` times B, added to the outputs of a product: the second half of what adapters add.

Few rows: `add_delta` within the product's own kernel (`skinny_linear`), after its bias and before its activation. More
rows: a kernel of its own, which adds to the product's outputs in place. Tokens without an adapter are not written.
"""

from typing import Any

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton
from roseinfer.kernels.lora.shrink import tile_rows
from roseinfer.kernels.lora.slots import SlotSums

# Places of the rank that a thread adds at once: a load of 16 bytes.
_PIECE: tl.constexpr = tl.constexpr(8)
_MAX_UNROLLED: tl.constexpr = tl.constexpr(32)
_RANK_COLUMNS = 16
_SMALL_TILE_COLUMNS, _TILE_COLUMNS = 128, 64
# Up to so many tokens, each slot of a tile has a program of its own.
_MAX_SPREAD_TOKENS = 256


def launch_options(sums: SlotSums | None) -> dict[str, Any]:
    """Return the arguments of a kernel that calls `add_delta`; none without adapters."""
    if sums is None:
        return {}
    values, slots, matrices = sums
    assert len(values) == 1, "only sums of few rows are whole"
    return {
        "sums_ptr": values,
        "slots_ptr": slots,
        "ranks_ptr": matrices.ranks,
        "b_ptr": matrices.b,
        "starts_ptr": matrices.starts,
        "RANK": matrices.max_rank,
        "COLUMNS": matrices.columns,
    }


@triton.jit
def _piece(b_tile, s_tile, ranks, first):
    """Return what the places of the rank from `first` on add."""
    place = (first + tl.arange(0, _PIECE))[None, None, :]
    there = place < ranks[:, None, None]
    b = tl.load(b_tile[:, :, None] + place, mask=there, other=0.0).to(tl.float32)
    return tl.sum(b * tl.load(s_tile + place, mask=there, other=0.0), 2)


@triton.jit
def add_delta(
    result, w_rows, m, rows, sums_ptr, slots_ptr, ranks_ptr, b_ptr, starts_ptr, outs,
    RANK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile's outputs [rows m, outputs w_rows] with what each row's adapter adds; float32. outs: rows of B.

    The places of a rank are added in their order, so a row's outputs do not depend on the other rows. Rows without an
    adapter are returned as they are.
    """
    slots = tl.load(slots_ptr + m, mask=m < rows, other=-1)
    ranks = tl.load(ranks_ptr + slots, mask=slots >= 0, other=0)
    b_tile = b_ptr + (slots.to(tl.int64) * outs * RANK)[:, None] + w_rows[None, :] * tl.multiple_of(ranks, 8)[:, None]
    s_tile = sums_ptr + (m[:, None] * COLUMNS + tl.load(starts_ptr + w_rows)[None, :])[:, :, None]
    delta = tl.zeros(result.shape, tl.float32)
    if RANK <= _MAX_UNROLLED:  # a loop would keep a loop around it from being pipelined
        for first in tl.static_range(0, RANK, _PIECE):
            delta += _piece(b_tile, s_tile, ranks, first)
    else:
        for first in tl.range(0, tl.max(ranks, 0), _PIECE):
            delta += _piece(b_tile, s_tile, ranks, first)
    return tl.where((ranks > 0)[:, None], result + delta, result)


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
    OUT: tl.constexpr,
    R: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add, in program (i, tile, share), to outputs i * BLOCK_N and following of a tile's tokens, whose slots are the
    share's: those that leave the remainder `share` divided by SHARES.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    slots = tl.load(slots_ptr + row, mask=row < tokens, other=-1)
    slots = tl.where(slots % SHARES == tl.program_id(2), slots, -1)
    slot = tl.max(slots, 0)
    if slot >= 0:
        inside = n < OUT
        starts = tl.load(starts_ptr + tl.minimum(n, OUT - 1))
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        while slot >= 0:  # the slots of the tile, the highest first
            rank = tl.multiple_of(tl.load(ranks_ptr + slot), 8)
            for start in tl.range(tl.min(starts, 0), tl.max(starts, 0) + 1, R):  # mostly one module
                for first in tl.range(0, rank, BLOCK_R):
                    place = first + tl.arange(0, BLOCK_R)
                    there = (place < rank)[None, :]
                    s = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
                    for part in tl.static_range(PARTS):
                        at = sums_ptr + (part * tokens + row).to(tl.int64)[:, None] * COLUMNS + (start + place)[None, :]
                        s += tl.load(at, mask=(slots == slot)[:, None] & there, other=0.0)
                    at = b_ptr + slot.to(tl.int64) * (OUT * R) + n[:, None] * rank + place[None, :]
                    b = tl.load(at, mask=(inside & (starts == start))[:, None] & there, other=0.0)
                    sums = tl.dot(s, tl.trans(b.to(tl.float32)), sums, input_precision=PRECISION)
            slot = tl.max(tl.where(slots < slot, slots, -1), 0)
        at = y_ptr + row.to(tl.int64)[:, None] * stride_y + n[None, :]
        own = (slots >= 0)[:, None] & inside[None, :]
        y = tl.load(at, mask=own, other=0.0).to(tl.float32) + sums
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=own)


def expand(y: torch.Tensor, sums: SlotSums) -> torch.Tensor:
    """Add what adapters change to y [T, out] in place, and return y; its rows may be apart."""
    rows, outs = y.shape
    values, slots, matrices = sums
    assert y.stride(1) == 1 and len(matrices.starts) == outs and values.shape[1] == rows
    tile = tile_rows(rows)
    block = _SMALL_TILE_COLUMNS if rows <= _MAX_SPREAD_TOKENS else _TILE_COLUMNS
    shares = len(matrices.b) if rows <= _MAX_SPREAD_TOKENS else 1
    lora_expand_kernel[(cdiv(outs, block), cdiv(rows, tile), shares)](
        y,
        values,
        slots,
        matrices.ranks,
        matrices.b,
        matrices.starts,
        rows,
        y.stride(0),
        OUT=outs,
        R=matrices.max_rank,
        COLUMNS=matrices.columns,
        PARTS=len(values),
        SHARES=shares,
        BLOCK_M=tile,
        BLOCK_N=block,
        BLOCK_R=_RANK_COLUMNS,
        # B is exact in TF32, and the sums keep 11 bits, as many as the model's 16-bit types or more.
        PRECISION="ieee" if y.dtype == torch.float32 else "tf32",
        num_warps=4,
        **early_start.options(y.device),
    )
    return y


def expand_reference(y: torch.Tensor, sums: SlotSums) -> torch.Tensor:
    """Return what adapters change y to, in float32, from sums by `shrink_reference`."""
    out, matrices = y.to(torch.float32, copy=True), sums.matrices
    for row, slot in enumerate(sums.slots.tolist()):
        if slot >= 0:
            _, b = matrices.content(slot)
            places = matrices.starts.long()[:, None] + torch.arange(b.shape[1], device=y.device)
            out[row] += (b.float() * sums.values.sum(0)[row][places]).sum(1)
    return out
