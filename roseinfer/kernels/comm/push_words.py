"""Sum of a few kilobytes over all ranks, where the latency of the exchange is the whole cost.

Every 32-bit word travels with the count of the call in one store of 64 bits, which arrives as a whole, as in NCCL's
protocol "LL". Readers wait on the words themselves: no fence, no flag, no second exchange. It doubles the bytes.
"""

import torch

from roseinfer.kernels.comm.peers import MAX_PROGRAM_WORDS, WORD_PROGRAMS, Peers, pointer_to, read_bases, still_waits
from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton

_KERNEL_WARPS = 4


@triton.jit
def _low(words, DTYPE: tl.constexpr):
    """Return the first of a word's two numbers in float32, or the only one."""
    if DTYPE.primitive_bitwidth == 32:
        return words.to(DTYPE, bitcast=True)
    else:
        return words.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _high(words, DTYPE: tl.constexpr):
    """Return the second of a word's two numbers in float32; if there is one only, that."""
    if DTYPE.primitive_bitwidth == 32:
        return words.to(DTYPE, bitcast=True)
    else:
        return (words >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _joined(low, high, DTYPE: tl.constexpr):
    if DTYPE.primitive_bitwidth == 32:
        return low.to(tl.int32, bitcast=True)
    else:
        low_bits = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low_bits | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _missing(arrived, call):
    """Return which words are of an earlier call."""
    return (arrived >> 32).to(tl.int32) != call


@triton.jit(do_not_specialize=["pairs"])
def push_words_kernel(
    x_ptr,
    residual_ptr,
    out_ptr,
    bases_ptr,
    calls_ptr,
    patience_ptr,
    lost_ptr,
    pairs,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAP: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Push and sum words. `pairs`: of words of x; ROOM: words of a rank's place. See `push_words`.

    A thread has a pair at a time, which is a store of 16 bytes.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    WORD: tl.constexpr = tl.pointer_type(tl.int32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    bases = read_bases(bases_ptr, SIZE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    at = tl.max_contiguous(program * BLOCK + tl.arange(0, BLOCK), 2)
    inside = at < pairs * 2
    mine = tl.load(x_ptr.to(WORD) + at, mask=inside, other=0)
    call = tl.load(calls_ptr + program) + 1
    patience = tl.load(patience_ptr)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr.to(WORD) + at, mask=inside, other=0)
    turn = (call & 1) * (SIZE * ROOM * 8)

    sent = (mine.to(tl.int64) & 0xFFFFFFFF) | (call.to(tl.int64) << 32)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            place = pointer_to(bases[rank], turn + RANK * ROOM * 8, tl.int64)
            tl.store(place + at, sent, mask=inside)

    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            low += _low(mine, DTYPE)
            high += _high(mine, DTYPE)
        else:
            place = pointer_to(bases[RANK], turn + rank * ROOM * 8, tl.int64)
            arrived = tl.load(place + at, mask=inside, other=0, volatile=True)
            waits = tl.max((_missing(arrived, call) & inside).to(tl.int32), 0) > 0
            until = tl.zeros([], tl.int64)
            while waits:
                arrived = tl.load(place + at, mask=inside, other=0, volatile=True)
                waits = tl.max((_missing(arrived, call) & inside).to(tl.int32), 0) > 0
                waits, until = still_waits(waits, until, patience, patience_ptr, lost_ptr, COMPILED)
            missing = _missing(arrived, call)
            low += tl.where(missing, float("nan"), _low(arrived.to(tl.int32), DTYPE))
            high += tl.where(missing, float("nan"), _high(arrived.to(tl.int32), DTYPE))
    if HAS_RESIDUAL:
        low += _low(residual, DTYPE)
        high += _high(residual, DTYPE)
    tl.store(out_ptr.to(WORD) + at, _joined(low, high, DTYPE), mask=inside)
    tl.debug_barrier()  # all threads have read the count
    tl.store(calls_ptr + program, call)


def push_words(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    peers: Peers,
    *,
    words: int = MAX_PROGRAM_WORDS,
    warps: int = _KERNEL_WARPS,
) -> torch.Tensor:
    """Return the sum of all ranks' x in the order of the ranks, plus a residual, in x's place or the residual's.

    Both have one float dtype of 16 or 32 bits and one shape, are contiguous, and have a multiple of 8 bytes, at most
    `peers.layout.word_limit`. Sums are float32 and rounded once. words: per program, at most `MAX_PROGRAM_WORDS`; all
    ranks' calls agree on it. Starts early (see `early_start`).
    """
    assert x.is_contiguous() and x.nbytes % 8 == 0 and x.nbytes <= peers.layout.word_limit
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape and residual.dtype == x.dtype)
    out = x if residual is None else residual
    programs = cdiv(x.nbytes // 4, words)
    assert programs <= WORD_PROGRAMS
    if programs:
        push_words_kernel[(programs,)](
            x,
            x if residual is None else residual,
            out,
            peers.bases,
            peers.word_calls,
            peers.patience,
            peers.lost,
            x.nbytes // 8,
            RANK=peers.rank,
            SIZE=peers.layout.size,
            ROOM=WORD_PROGRAMS * MAX_PROGRAM_WORDS,
            BLOCK=words,
            HAS_RESIDUAL=residual is not None,
            COMPILED=x.is_cuda,
            num_warps=warps,
            **early_start.options(x.device),
        )
    return out
