"""Sums of `shrink` times B, added to the outputs of a product of few rows: the second half of what adapters add.

The product's own kernel calls `add_delta` (`skinny_linear`), after its bias and before its activation. `expand_tiles`
adds to products of more rows.
"""

from typing import Any

import torch

from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.lora.slots import SlotSums

# Places of the rank that a thread adds at once: a load of 16 bytes.
_PIECE: tl.constexpr = tl.constexpr(8)
_MAX_UNROLLED: tl.constexpr = tl.constexpr(32)


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


def expand_reference(y: torch.Tensor, sums: SlotSums) -> torch.Tensor:
    """Return what adapters change y to, in float32, from sums by `shrink_reference`."""
    out, matrices = y.to(torch.float32, copy=True), sums.matrices
    for row, slot in enumerate(sums.slots.tolist()):
        if slot >= 0:
            _, b = matrices.content(slot)
            places = matrices.starts.long()[:, None] + torch.arange(b.shape[1], device=y.device)
            out[row] += (b.float() * sums.values.sum(0)[row][places]).sum(1)
    return out
