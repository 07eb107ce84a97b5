"""Solution of gated DeltaNet within all pieces at once: what each needs besides the state (see `chunked_rule`)."""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import tl, triton
from roseinfer.kernels.delta.tables import BETA, DECAY_FIELD_COUNT, PER_STEP, PIECE_TOKENS, SINCE, TOTAL, load_piece

# Rows of the blocks of a piece's matrix that are inverted row by row.
INVERTED_BLOCK_ROWS = 16
# Of a float32, those that a bfloat16 has.
HIGH_BITS = tl.constexpr(-(2**16))
# The narrowest heads whose float32 factors are two of bfloat16. For 16 and 32 columns ptxas 12.8 gives products of a
# factor in registers wrong addresses, but for the first.
MIN_PARTS_WIDTH = 64


@triton.jit
def _parts(x):
    """Return two bfloat16 whose sum is x, but for its last 8 bits. The first is cut off: rounding it takes longer."""
    high = (x.to(tl.int32, bitcast=True) & HIGH_BITS).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def _product(x, y, PRECISION: tl.constexpr):
    """Return x @ y in float32. With "parts" each float32 factor is two bfloat16: they are smaller and hold more bits
    than TF32, and other factors are bfloat16.
    """
    if PRECISION != "parts":
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision=PRECISION)
    elif x.dtype == tl.float32 and y.dtype == tl.float32:
        x_high, x_low = _parts(x)
        y_high, y_low = _parts(y)
        return tl.dot(x_high, y_high, tl.dot(x_high, y_low, tl.dot(x_low, y_high)))
    elif x.dtype == tl.float32:
        high, low = _parts(x)
        return tl.dot(high, y, tl.dot(low, y))
    else:
        return tl.dot(x, y)


@triton.jit(do_not_specialize=PER_STEP)
def pairs_kernel(
    heads_ptr,
    decays_ptr,
    pieces_ptr,
    lower_ptr,
    within_ptr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write of one value head of one piece, [T, HV * SIZE]: A (`lower`), and q k^T D with its diagonal (`within`)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        head = tl.program_id(1)
        key_head = head // (HV // HK)
        C: tl.constexpr = (2 * HK + HV) * D
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        inside = i < count
        token = (first + i).to(tl.int64)
        at = heads_ptr + token[:, None] * C + key_head * D + d
        q = tl.load(at, mask=inside[:, None], other=0.0)
        k = tl.load(at + HK * D, mask=inside[:, None], other=0.0)
        decays = decays_ptr + (token * HV + head) * DECAY_FIELD_COUNT
        total = tl.load(decays + TOTAL, mask=inside, other=0.0)
        beta = tl.load(decays + BETA, mask=inside, other=0.0)
        # Above the diagonal the exponent may be large.
        seen = (i[:, None] >= i[None, :]) & inside[:, None]
        decay = tl.exp(tl.where(seen, total[:, None] - total[None, :], float("-inf")))
        to = (token * HV + head)[:, None] * SIZE + i
        within = _product(q, tl.trans(k), PRECISION) * decay
        tl.store(within_ptr + to, within.to(within_ptr.dtype.element_ty), mask=inside[:, None])
        lower = _product(k, tl.trans(k), PRECISION) * decay * beta[:, None]
        tl.store(lower_ptr + to, tl.where(i[:, None] > i[None, :], lower, 0.0), mask=inside[:, None])


@triton.jit(do_not_specialize=PER_STEP)
def invert_kernel(
    lower_ptr,
    pieces_ptr,
    HV: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Overwrite the blocks on the diagonal of one head's A by the inverses of I + A's.

    Rows of all blocks are substituted at the same time, which is as exact as substitution of the whole. A thread holds
    a column of a block's inverse.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        i, column = tl.arange(0, BLOCK), tl.arange(0, SIZE)
        start = column // BLOCK * BLOCK  # of its block
        of_piece = lower_ptr + (first.to(tl.int64) * HV + tl.program_id(1)) * SIZE
        inverse = tl.where(i[:, None] == (column % BLOCK)[None, :], 1.0, 0.0)
        for step in tl.static_range(1, BLOCK):
            earlier = (i[:, None] < step) & (start + step < count)[None, :]
            at = of_piece + ((start + step) * HV * SIZE + start)[None, :] + i[:, None]
            found = tl.sum(tl.load(at, mask=earlier, other=0.0) * inverse, 0)
            inverse -= tl.where(i[:, None] == step, found[None, :], 0.0)
        tl.debug_barrier()  # all have read before one writes
        to = of_piece + (start[None, :] + i[:, None]) * HV * SIZE + column[None, :]
        tl.store(to, inverse, mask=(start[None, :] + i[:, None]) < count)


@triton.jit(do_not_specialize=PER_STEP)
def solve_kernel(
    heads_ptr,
    decays_ptr,
    pieces_ptr,
    lower_ptr,
    own_ptr,
    read_ptr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write of one value head of one piece: (I + A)^-1 beta v (`own`) and (I + A)^-1 beta e^G k (`read`) [T, HV * D].

    `lower`: A with blocks on the diagonal that are inverted. With N the product of these and the rest, which has only
    four blocks a row, (I + N)^-1 = (I - N) (I + N^2).
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    _row, first, count, _snapshot = load_piece(pieces_ptr, tl.program_id(0))
    if count > 0:
        head = tl.program_id(1)
        key_head = head // (HV // HK)
        C: tl.constexpr = (2 * HK + HV) * D
        EXACT: tl.constexpr = "parts" if PRECISION == "parts" else "tf32x3"
        i, d = tl.arange(0, SIZE), tl.arange(0, D)
        inside = i < count
        token = (first + i).to(tl.int64)
        of_head = token * HV + head
        lower = tl.load(lower_ptr + of_head[:, None] * SIZE + i, mask=inside[:, None], other=0.0)
        inverse = tl.where((i[:, None] // BLOCK) == (i[None, :] // BLOCK), lower, 0.0)
        below = _product(inverse, lower - inverse, EXACT)
        inverse += _product(_product(below, below, EXACT), inverse, EXACT)
        inverse -= _product(below, inverse, EXACT)
        at = heads_ptr + token[:, None] * C + d
        to = of_head[:, None] * D + d
        scale = tl.load(decays_ptr + of_head * DECAY_FIELD_COUNT + BETA, mask=inside, other=0.0)
        v = tl.load(at + (2 * HK + head) * D, mask=inside[:, None], other=0.0)
        own = _product(inverse * scale[None, :], v, PRECISION)
        tl.store(own_ptr + to, own.to(own_ptr.dtype.element_ty), mask=inside[:, None])
        scale *= tl.load(decays_ptr + of_head * DECAY_FIELD_COUNT + SINCE, mask=inside, other=0.0)
        k = tl.load(at + (HK + key_head) * D, mask=inside[:, None], other=0.0)
        read = _product(inverse * scale[None, :], k, PRECISION)
        tl.store(read_ptr + to, read.to(read_ptr.dtype.element_ty), mask=inside[:, None])


def solve(
    heads: torch.Tensor, decays: torch.Tensor, pieces: torch.Tensor, value_heads: int, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `own` and `read` [T, HV * D], and `within` [T, HV * PIECE_TOKENS], of which only pieces' tokens are
    defined.

    heads: queries, keys and values [T, (2 HK + HV) D]. decays: [T, HV, DECAY_FIELD_COUNT] float32.
    """
    tokens, device, dtype = len(heads), heads.device, heads.dtype
    # Without a GPU there are no products of bfloat16.
    if dtype is torch.bfloat16 and heads.is_cuda and width >= MIN_PARTS_WIDTH:
        precision = "parts"
    else:
        precision = tf32(dtype)
    own, read = torch.empty((2, tokens, value_heads * width), dtype=dtype, device=device)
    within = torch.empty((tokens, value_heads * PIECE_TOKENS), dtype=dtype, device=device)
    lower = torch.empty(within.shape, dtype=torch.float32, device=device)
    key_heads = (heads.shape[1] // width - value_heads) // 2
    blocks = {"HV": value_heads, "SIZE": PIECE_TOKENS, **early_start.options(device)}
    shape = {"HK": key_heads, "D": width, "PRECISION": precision, **blocks}
    grid = (len(pieces), value_heads)
    pairs_kernel[grid](heads, decays, pieces, lower, within, **shape)
    invert_kernel[grid](lower, pieces, BLOCK=INVERTED_BLOCK_ROWS, num_warps=2, **blocks)
    solve_kernel[grid](heads, decays, pieces, lower, own, read, BLOCK=INVERTED_BLOCK_ROWS, **shape)
    return own, read, within


def tf32(dtype: torch.dtype) -> str:
    """Return the precision of products: TF32 holds all bits of 16-bit numbers, three products hold those of float32."""
    return "tf32x3" if dtype is torch.float32 else "tf32"
