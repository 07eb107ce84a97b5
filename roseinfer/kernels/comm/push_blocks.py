"""Sums or gathered columns over all ranks, for some hundred kilobytes and more, in a single exchange.

Each program pushes its part of the data to all other ranks, sets a flag after it, and waits for the other ranks' flags.
Every rank sends all its data to every other rank: for two ranks that is the minimum.
"""

import torch

from roseinfer.kernels.comm.peers import BLOCK_BYTES, BLOCK_PROGRAMS, Peers, pointer_to, read_bases, wait_for_flag
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton

_KERNEL_WARPS = 8


@triton.jit(do_not_specialize=["rounds"])
def push_blocks_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    bases_ptr,
    calls_ptr,
    patience_ptr,
    lost_ptr,
    count,
    rounds,
    width,
    out_stride,
    blocks,
    flags,
    REGION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Push and combine, in program i, `rounds` blocks of `count` elements from i * rounds on.

    See `push_blocks` and `gather_blocks`.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    FLAG: tl.constexpr = tl.pointer_type(tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    bases = read_bases(bases_ptr, SIZE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first = program * rounds * BLOCK
    call = tl.load(calls_ptr + program) + 1
    patience = tl.load(patience_ptr)
    # Byte offsets of rank 0's part for this program, and of its flag; those of the next ranks follow.
    part = blocks + ((call & 1) * SIZE * PROGRAMS + program).to(tl.int64) * REGION
    flag = flags + ((call & 1) * SIZE * PROGRAMS + program) * 4

    for round in range(rounds):
        at = first + round * BLOCK + lane
        mine = tl.load(x_ptr + at, mask=at < count, other=0.0)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                place = pointer_to(bases[rank], part + RANK * PROGRAMS * REGION, DTYPE)
                tl.store(place + round * BLOCK + lane, mine, mask=at < count)
    tl.debug_barrier()  # one thread writes for all
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            theirs = (bases[rank] + flag + RANK * PROGRAMS * 4).to(FLAG)
            tl.atomic_xchg(theirs, call, sem="release", scope="sys")
    arrived = program >= 0
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            own = (bases[RANK] + flag + rank * PROGRAMS * 4).to(FLAG)
            arrived = arrived & wait_for_flag(own, call, patience, patience_ptr, lost_ptr, COMPILED)
    tl.debug_barrier()

    for round in range(rounds):
        at = first + round * BLOCK + lane
        inside = at < count
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(SIZE):
            if rank == RANK:
                numbers = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
            else:
                place = pointer_to(bases[RANK], part + rank * PROGRAMS * REGION, DTYPE)
                numbers = tl.load(place + round * BLOCK + lane, mask=inside, other=0.0, cache_modifier=".cg")
                numbers = tl.where(arrived, numbers.to(tl.float32), float("nan"))
            if GATHERS:
                to = out_ptr + (at // width).to(tl.int64) * out_stride + rank * width + at % width
                tl.store(to, numbers.to(DTYPE), mask=inside)
            else:
                total += numbers
        if not GATHERS:
            if HAS_RESIDUAL:
                total += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + at, total.to(DTYPE), mask=inside)
    tl.store(calls_ptr + program, call)


def push_blocks(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    peers: Peers,
    *,
    programs: int = BLOCK_PROGRAMS,
    warps: int = _KERNEL_WARPS,
) -> torch.Tensor:
    """Return the sum of all ranks' x in the order of the ranks, plus a residual, in x's place or the residual's.

    Both have one float dtype and shape, are contiguous, and have at most `peers.layout.limit` bytes. Sums are float32
    and rounded once. programs: the most; all ranks' calls agree on it. Starts early (see `early_start`).
    """
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype)
    out = x if residual is None else residual
    _launch(x, residual, out, peers, x.numel(), 0, False, programs, warps)
    return out


def gather_blocks(
    x: torch.Tensor, out: torch.Tensor, peers: Peers, *, programs: int = BLOCK_PROGRAMS, warps: int = _KERNEL_WARPS
) -> torch.Tensor:
    """Gather x [n, width] of all ranks side by side in out [n, size * width], whose rows may be apart.

    Limits as in `push_blocks`.
    """
    rows, width = x.shape
    assert out.shape == (rows, peers.layout.size * width) and out.stride(1) == 1 and out.dtype == x.dtype
    _launch(x, None, out, peers, width, out.stride(0), True, programs, warps)
    return out


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    peers: Peers,
    width: int,
    out_stride: int,
    gathers: bool,
    programs: int,
    warps: int,
) -> None:
    layout, count = peers.layout, x.numel()
    assert x.is_contiguous() and x.nbytes <= layout.limit and programs <= BLOCK_PROGRAMS
    if not count:
        return
    block = BLOCK_BYTES // x.itemsize
    rounds = cdiv(cdiv(count, block), programs)
    assert rounds * BLOCK_BYTES <= layout.region, "more than a program's part of the place"
    push_blocks_kernel[(cdiv(cdiv(count, block), rounds),)](
        x,
        x if residual is None else residual,
        out,
        peers.bases,
        peers.block_calls,
        peers.patience,
        peers.lost,
        count,
        rounds,
        width,
        out_stride,
        layout.blocks,
        layout.flags,
        REGION=layout.region,
        PROGRAMS=BLOCK_PROGRAMS,
        RANK=peers.rank,
        SIZE=layout.size,
        BLOCK=block,
        GATHERS=gathers,
        HAS_RESIDUAL=residual is not None,
        COMPILED=x.is_cuda,
        num_warps=warps,
        **early_start.options(x.device),
    )
