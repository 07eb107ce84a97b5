"""Adapters within the launch of a product of few rows (`skinny_linear`).

The product's first programs multiply the input, after its norm, by A of each row's slot, and count themselves when they
have stored their sums. The other programs multiply the weight as without adapters. They need the sums only at their
end, and rarely have to wait: a GPU starts programs in their order, so the first ones run as soon as any.

The counter's low 20 bits count programs of the current launch. All of a launch add up to 2^20, so the next launch,
whose programs wait for the end of this one, begins with zero again.
"""

from typing import Any

import torch

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton
from roseinfer.kernels.lora.shrink import chunk_columns, row_sums
from roseinfer.kernels.lora.slots import SlotRows

# Places of the rank that a thread adds at once: a load of 16 bytes.
_PIECE: tl.constexpr = tl.constexpr(8)
_MAX_UNROLLED: tl.constexpr = tl.constexpr(32)
# Elements of B up to which a program reads them before it waits for its input.
_MAX_EARLY: tl.constexpr = tl.constexpr(2048)
_LAUNCH: tl.constexpr = tl.constexpr(1 << 20)
# Columns of A that a program multiplies; divisors of 8.
_COLUMNS, _MANY_ROWS_COLUMNS = 1, 2


def leading_programs(rows: int, delta: SlotRows | None) -> int:
    """Return how many programs of a launch compute sums."""
    return 0 if delta is None else rows * delta.matrices.columns // _columns(rows)


def launch_options(x: torch.Tensor, delta: SlotRows | None) -> dict[str, Any]:
    """Return the arguments of a product's kernel for adapters; none without them."""
    if delta is None:
        return {}
    slots, matrices, inputs = delta
    rows, width = x.shape
    assert inputs is None or (inputs.shape == x.shape and inputs.stride() == x.stride())
    assert slots.shape == (rows,) and matrices.a.shape[1] == matrices.columns * width
    return {
        "sums_ptr": torch.empty((rows, matrices.columns), dtype=torch.float32, device=x.device),
        "lead_x_ptr": x if inputs is None else inputs,
        "slots_ptr": slots,
        "ranks_ptr": matrices.ranks,
        "a_ptr": matrices.a,
        "b_ptr": matrices.b,
        "starts_ptr": matrices.starts,
        "arrived_ptr": matrices.arrived,
        "RANK": matrices.max_rank,
        "PLACES": next_power_of_2(matrices.max_rank),
        "COLUMNS": matrices.columns,
        "LEAD": _columns(rows),
        "CHUNK": chunk_columns(width),
    }


def _columns(rows: int) -> int:
    return _COLUMNS if rows == 1 else _MANY_ROWS_COLUMNS


@triton.jit
def lead(
    program, k, rows, x_ptr, norm_weight_ptr, norm_bias_ptr, stride_x, eps, sums_ptr, slots_ptr, ranks_ptr, a_ptr,
    arrived_ptr, K: tl.constexpr, NORM: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, LEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Compute the sums of a leading program, and count it if there are any. k: as in `row_sums`."""
    found = row_sums(
        program % rows, program // rows, k, x_ptr, norm_weight_ptr, norm_bias_ptr, slots_ptr, ranks_ptr, a_ptr,
        sums_ptr, stride_x, eps, K, COLUMNS, RANK, LEAD, NORM, OVERLAP,
    )  # fmt: skip
    if found:
        tl.debug_barrier()  # all threads have written before one of them counts
        tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def read_slots(m, rows, slots_ptr):
    """Return slots of rows m, -1 without an adapter."""
    return tl.load(slots_ptr + m, mask=m < rows, other=-1)


@triton.jit
def read_ranks(slots, ranks_ptr, RANK: tl.constexpr, COLUMNS: tl.constexpr, LEAD: tl.constexpr):
    """Return ranks, 0 without an adapter, and how many leading programs have work for all of these rows."""
    ranks = tl.load(ranks_ptr + slots, mask=slots >= 0, other=0)
    leads = COLUMNS // RANK * ranks // LEAD
    for _ in tl.static_range(len(ranks.shape)):
        leads = tl.sum(leads, 0)
    return ranks, leads


@triton.jit
def read_b(slots, ranks, w_rows, outs, b_ptr, RANK: tl.constexpr, PLACES: tl.constexpr):
    """Return B [rows, outputs w_rows, places of the rank], or [1] zero if it is too large to hold. outs: rows of B."""
    if slots.shape[0] * w_rows.shape[0] * PLACES <= _MAX_EARLY:
        return _read_piece(_b_tile(slots, ranks, w_rows, outs, b_ptr, RANK), ranks, 0, PLACES)
    else:
        return tl.zeros([1], tl.float32)


@triton.jit
def _b_tile(slots, ranks, w_rows, outs, b_ptr, RANK: tl.constexpr):
    at = (slots.to(tl.int64) * outs * RANK)[:, None] + w_rows[None, :] * tl.multiple_of(ranks, 8)[:, None]
    return (b_ptr + at)[:, :, None]


@triton.jit
def _read_piece(tile, ranks, first, PLACES: tl.constexpr):
    """Load places of the rank from `first` on; zeros past a row's rank."""
    place = (first + tl.arange(0, PLACES))[None, None, :]
    return tl.load(tile + place, mask=place < ranks[:, None, None], other=0.0).to(tl.float32)


@triton.jit
def arrived_of(arrived_ptr):
    """Return how many programs of this launch have counted themselves, the same number in all threads."""
    # No program reads a sum before it is there, so no cache has an older copy that an acquire would drop.
    return tl.atomic_add(arrived_ptr, 0, sem="relaxed") & (_LAUNCH - 1)


@triton.jit
def wait_for_sums(leads, arrived_ptr):
    """Wait until so many leading programs have stored their sums."""
    while arrived_of(arrived_ptr) < leads:
        pass
    tl.debug_barrier()


@triton.jit
def leave(first, programs, leads, arrived_ptr):
    """Count a program that needs the counter no more. first: it is the first of so many after the leading ones."""
    tl.atomic_add(arrived_ptr, tl.where(first, _LAUNCH - leads - programs + 1, 1), sem="relaxed")


@triton.jit
def read_sums(b, ready, ranks, m, starts, sums_ptr, PLACES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return sums for `read_b`, zeros if they are not ready; [1] zero if it returned that. starts: of the outputs."""
    if len(b.shape) == 3:
        return _read_piece(_s_tile(m, starts, sums_ptr, COLUMNS), tl.where(ready, ranks, 0), 0, PLACES)
    else:
        return b


@triton.jit
def _s_tile(m, starts, sums_ptr, COLUMNS: tl.constexpr):
    return (sums_ptr + (m[:, None] * COLUMNS + starts[None, :]))[:, :, None]


@triton.jit
def add_delta(
    result, b, s, slots, ranks, starts, w_rows, m, outs, sums_ptr, b_ptr, RANK: tl.constexpr, PLACES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a tile's outputs [rows m, outputs w_rows] with what each row's adapter adds; float32. b, s: those of
    `read_b` and `read_sums`.

    The places of a rank are added in one order, so a row's outputs do not depend on the other rows. Rows without an
    adapter are returned as they are.
    """
    if len(b.shape) == 3:
        delta = tl.sum(b * s, 2)
    else:
        b_tile, s_tile = _b_tile(slots, ranks, w_rows, outs, b_ptr, RANK), _s_tile(m, starts, sums_ptr, COLUMNS)
        delta = tl.zeros(result.shape, tl.float32)
        if RANK <= _MAX_UNROLLED:  # a loop would keep a loop around it from being pipelined
            for first in tl.static_range(0, RANK, _PIECE):
                piece = _read_piece(b_tile, ranks, first, _PIECE)
                delta += tl.sum(piece * _read_piece(s_tile, ranks, first, _PIECE), 2)
        else:
            for first in tl.range(0, tl.max(ranks, 0), _PIECE):
                piece = _read_piece(b_tile, ranks, first, _PIECE)
                delta += tl.sum(piece * _read_piece(s_tile, ranks, first, _PIECE), 2)
    return tl.where((ranks > 0)[:, None], result + delta, result)


def delta_reference(x: torch.Tensor, delta: SlotRows) -> torch.Tensor:
    """Return what adapters add to the outputs of x by plain torch, float32."""
    matrices = delta.matrices
    added = torch.zeros((len(x), len(matrices.starts)), device=x.device)
    for row, slot in enumerate(delta.slots.tolist()):
        if slot >= 0:
            a, b = matrices.content(slot)
            sums = a.float() @ x[row].float()
            added[row] = (b.float() * sums[matrices.starts.long() // matrices.max_rank]).sum(1)
    return added
