"""Most likely token of every row, in two launches: of each chunk of the vocabulary, then of all chunks.

Nothing waits for the device, and the grids depend only on the numbers of rows and tokens, so that a graph can capture
the launches.
"""

import torch

from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton

# Written instead of a token if none could be chosen.
NOT_FINITE = -1
NOTHING_LEFT = -2

CHUNK_TOKENS = 8192  # per program
GREEDY_CHUNK_TOKENS = 4096  # fastest at 1, 32 and 256 rows of 151,936 on an H200

_LARGEST_INT32 = tl.constexpr(0x7FFFFFFF)
_LOWEST_INT64 = tl.constexpr(-(2**63))


@triton.jit
def ordered(x):
    """Convert float32 to int32 in the same order; -0.0 sorts below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_chunk(logits_row, chunk, vocab_size, CHUNK: tl.constexpr):
    """Load a chunk's logits as float32: +inf for NaN, -inf past the end, no -0.0."""
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32) + 0.0
    return tl.where(x == x, x, float("inf"))


@triton.jit
def row_best(best_row, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    """Return the largest logit of a row and its lowest token id, from the results of `_chunk_best_kernel`."""
    chunk = tl.arange(0, CHUNKS_BLOCK)
    packed = tl.max(tl.load(best_row + chunk, mask=chunk < CHUNKS, other=_LOWEST_INT64), 0)
    key = (packed >> 32).to(tl.int32)
    best = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return best, (packed & _LARGEST_INT32).to(tl.int32) ^ _LARGEST_INT32


@triton.jit
def settle(row, token, best, seats_ptr, ends_ptr, token_pool_ptr, pool_stride, out_ptr):
    """Write a row's token to the token pool and to `out`; without one, a harmless id and the reason."""
    failed = tl.where(best == float("inf"), -1, -2)
    usable = tl.abs(best) < float("inf")
    tl.store(out_ptr + row, tl.where(usable, token, failed).to(out_ptr.dtype.element_ty))
    at = tl.load(seats_ptr + row).to(tl.int64) * pool_stride + tl.load(ends_ptr + row)
    tl.store(token_pool_ptr + at, tl.where(usable, token, 0).to(token_pool_ptr.dtype.element_ty))


@triton.jit
def _chunk_best_kernel(logits_ptr, best_ptr, vocab_size, logits_stride, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """Pack, in program (row, chunk), the chunk's largest logit and its lowest token id into an ordered int64."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    x = load_chunk(logits_ptr + row * logits_stride, chunk, vocab_size, CHUNK)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    best = tl.max(x, 0)
    first = tl.min(tl.where(x == best, token, _LARGEST_INT32), 0)
    packed = (ordered(best).to(tl.int64) << 32) | (first ^ _LARGEST_INT32)
    tl.store(best_ptr + row * CHUNKS + chunk, packed)


@triton.jit(do_not_specialize=("seats_ptr", "ends_ptr", "out_ptr"))
def _settle_kernel(
    best_ptr,
    seats_ptr,
    ends_ptr,
    token_pool_ptr,
    pool_stride,
    out_ptr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    best, token = row_best(best_ptr + row * CHUNKS, CHUNKS, CHUNKS_BLOCK)
    settle(row, token, best, seats_ptr, ends_ptr, token_pool_ptr, pool_stride, out_ptr)


def chunk_best(logits: torch.Tensor, chunk: int, num_warps: int) -> torch.Tensor:
    """Return [n, chunks] int64, for `row_best`."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    chunks = cdiv(vocab_size, chunk)
    best = torch.empty((rows, chunks), dtype=torch.int64, device=logits.device)
    _chunk_best_kernel[(rows, chunks)](
        logits, best, vocab_size, logits.stride(0), CHUNKS=chunks, CHUNK=chunk, num_warps=num_warps
    )
    return best


def greedy(
    logits: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    token_pool: torch.Tensor,
    out: torch.Tensor,
    *,
    chunk: int = GREEDY_CHUNK_TOKENS,
    num_warps: int = 4,
) -> None:
    """Write the most likely token of each row to `out` and to the token pool; of equally likely ones the lowest id.

    logits: [n, V], its rows may be apart. Row i's token goes to token_pool[seats[i], ends[i]] ([S, W] int32) and to
    out[i]. seats, ends, out: [n] integers. A row that contains NaN, or whose largest logit is +inf, has no answer:
    NOT_FINITE in `out`. A row with only -inf gives NOTHING_LEFT. Both leave token 0 in the pool.
    """
    rows = logits.shape[0]
    if rows:
        best = chunk_best(logits, chunk, num_warps)
        chunks = best.shape[1]
        _settle_kernel[(rows,)](
            best,
            seats,
            ends,
            token_pool,
            token_pool.stride(0),
            out,
            CHUNKS=chunks,
            CHUNKS_BLOCK=next_power_of_2(chunks),
            num_warps=1,
        )


def greedy_reference(
    logits: torch.Tensor, seats: torch.Tensor, ends: torch.Tensor, token_pool: torch.Tensor, out: torch.Tensor
) -> None:
    best = logits.amax(-1)
    first = (logits == best[:, None]).int().argmax(-1)
    settle_reference(first, best, seats, ends, token_pool, out)


def settle_reference(
    tokens: torch.Tensor,
    best: torch.Tensor,
    seats: torch.Tensor,
    ends: torch.Tensor,
    token_pool: torch.Tensor,
    out: torch.Tensor,
) -> None:
    failed = torch.where(best == -torch.inf, NOTHING_LEFT, NOT_FINITE)
    out.copy_(torch.where(torch.isfinite(best), tokens, failed))
    token_pool[seats.long(), ends.long()] = out.clamp_min(0).to(token_pool.dtype)
