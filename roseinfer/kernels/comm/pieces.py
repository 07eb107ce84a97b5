"""Meetings of ranks, and sums of pieces that a copy engine has brought from the other rank (`parallel.piece_sums`)."""

import torch

from roseinfer.kernels.comm.peers import TURN_COUNT, Peers, pointer_to, read_bases, wait_for_flag
from roseinfer.kernels.common.triton_support import cdiv, tl, triton

_BLOCK, _WARPS = 4096, 8


@triton.jit
def meet_kernel(
    bases_ptr, calls_ptr, missed_ptr, patience_ptr, lost_ptr, meetings, RANK: tl.constexpr, SIZE: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """Signal to the other ranks that this one has arrived, and wait for them. See `meet`.

    A rank that has given up signals no more, so that the others miss it, too.
    """
    FLAG: tl.constexpr = tl.pointer_type(tl.int32)
    bases = read_bases(bases_ptr, SIZE)
    call = tl.load(calls_ptr) + 1
    patience = tl.load(patience_ptr)
    flags = meetings + (call & 1) * SIZE * 4
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            tl.atomic_xchg((bases[rank] + flags + RANK * 4).to(FLAG), call, patience > 0, sem="release", scope="sys")
    arrived = meetings >= 0
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            own = (bases[RANK] + flags + rank * 4).to(FLAG)
            arrived = arrived & wait_for_flag(own, call, patience, patience_ptr, lost_ptr, COMPILED)
    tl.store(missed_ptr, tl.where(arrived, 0, 1))
    tl.store(calls_ptr, call)


def meet(peers: Peers) -> None:
    """Wait on the current stream until every rank's has come to the same meeting."""
    meet_kernel[(1,)](
        peers.bases,
        peers.meeting_calls,
        peers.missed,
        peers.patience,
        peers.lost,
        peers.layout.meetings,
        RANK=peers.rank,
        SIZE=peers.layout.size,
        COMPILED=peers.bases.is_cuda,
        num_warps=1,
    )


@triton.jit
def add_piece_kernel(
    x_ptr, residual_ptr, out_ptr, bases_ptr, missed_ptr, piece, count, RANK: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Add, in program i, BLOCK elements from i * BLOCK on. See `add_piece`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    piece_ptr = pointer_to(read_bases(bases_ptr, SIZE)[RANK], piece, x_ptr.dtype.element_ty)
    theirs = tl.load(piece_ptr + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    total = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + theirs
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.where(tl.load(missed_ptr) == 0, total, float("nan"))
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_piece(x: torch.Tensor, residual: torch.Tensor | None, peers: Peers, turn: int) -> torch.Tensor:
    """Return x plus the other rank's piece and a residual, in x's place or the residual's.

    turn: the place, 0 or 1, to which the other rank copied its piece before the last meeting; the sum is NaN if that
    timed out. All have one float dtype, are contiguous, and have at most `peers.layout.piece_bytes`. Sums are float32
    and rounded once, so both ranks get the same bits.
    """
    assert 0 <= turn < TURN_COUNT and peers.layout.size == 2 and x.nbytes <= peers.layout.piece_bytes
    out = x if residual is None else residual
    assert x.is_contiguous() and out.is_contiguous() and out.shape == x.shape and out.dtype == x.dtype
    if x.numel():
        add_piece_kernel[(cdiv(x.numel(), _BLOCK),)](
            x,
            out,
            out,
            peers.bases,
            peers.missed,
            peers.layout.pieces + turn * peers.layout.piece_bytes,
            x.numel(),
            RANK=peers.rank,
            SIZE=peers.layout.size,
            BLOCK=_BLOCK,
            HAS_RESIDUAL=residual is not None,
            num_warps=_WARPS,
        )
    return out
