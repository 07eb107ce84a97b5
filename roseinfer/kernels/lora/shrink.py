"""Inputs times A of each row's slot, for products of few rows: the first half of what adapters add.

A program takes some columns of one row over the whole width, with the norm before it. Sums are float32, and do not
depend on the other rows. `shrink_tiles` multiplies more rows.
"""

from roseinfer.kernels.common.triton_support import next_power_of_2, tl, triton

_MAX_CHUNK_COLUMNS = 4096
# Elements of A that a program reads before it waits for its input.
_MAX_AHEAD: tl.constexpr = tl.constexpr(16384)


def chunk_columns(width: int) -> int:
    """Return how many columns a program takes at a time."""
    return min(next_power_of_2(width), _MAX_CHUNK_COLUMNS)


@triton.jit
def _read(pointer, k, start, K: tl.constexpr):
    """Load a chunk of columns from `start` on in float32; zero past column K."""
    if start + k.shape[0] > K:
        return tl.load(pointer + start + k, mask=k + start < K, other=0.0).to(tl.float32)
    else:
        return tl.load(pointer + start + k).to(tl.float32)


@triton.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _gained(a, norm_weight_ptr, k, start, K: tl.constexpr, NORM: tl.constexpr):
    """Return a chunk of A times the norm's weight."""
    if NORM != "none":
        a *= _read(norm_weight_ptr, k, start, K)
    return a


@triton.jit
def row_sums(
    row, block, k, x_ptr, norm_weight_ptr, norm_bias_ptr, slots_ptr, ranks_ptr, a_ptr, out_ptr, stride_x, eps,
    K: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store the sums block * BLOCK_C and following of a row after its norm, counted without gaps between modules.
    Return True if there are any.

    k: 0 .. n, the columns of a chunk. Kernels of Gluon call this, too, with a layout of their own. BLOCK_C divides 8,
    and so every rank.
    """
    BLOCK_K: tl.constexpr = k.shape[0]
    slot = tl.load(slots_ptr + row)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    first = block * BLOCK_C
    found = first < COLUMNS // R * rank
    if found:
        a_row = a_ptr + (slot.to(tl.int64) * COLUMNS + first) * K
        ahead = ()
        for start in tl.static_range(0, K, BLOCK_K):
            if (start + BLOCK_K) * BLOCK_C <= _MAX_AHEAD:
                for column in tl.static_range(BLOCK_C):
                    ahead += (_gained(_read(a_row + column * K, k, start, K), norm_weight_ptr, k, start, K, NORM),)

        # From here on, results of earlier kernels may be read, and their inputs overwritten.
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        x_row = x_ptr + row.to(tl.int64) * stride_x
        mean = 0.0
        if NORM == "layer":
            total = k * 0.0
            for start in tl.static_range(0, K, BLOCK_K):
                total += _read(x_row, k, start, K)
            mean = tl.sum(total, 0) / K
        squares = k * 0.0
        sums, shifts = (), ()
        for _ in tl.static_range(BLOCK_C):
            sums += (k * 0.0,)
            shifts += (k * 0.0,)
        for start in tl.static_range(0, K, BLOCK_K):
            x = _read(x_row, k, start, K)
            if NORM == "layer":
                x = tl.where(k + start < K, x - mean, 0.0)
                shift = _read(norm_bias_ptr, k, start, K)
            if NORM != "none":
                squares += x * x
            own_sums, own_shifts = (), ()
            for column in tl.static_range(BLOCK_C):
                if (start + BLOCK_K) * BLOCK_C <= _MAX_AHEAD:
                    a = ahead[start // BLOCK_K * BLOCK_C + column]
                else:
                    a = _gained(_read(a_row + column * K, k, start, K), norm_weight_ptr, k, start, K, NORM)
                own_sums += (sums[column] + x * a,)
                if NORM == "layer":
                    own_shifts += (shifts[column] + shift * _read(a_row + column * K, k, start, K),)
            sums, shifts = own_sums, own_shifts
        for column in tl.static_range(BLOCK_C):
            if NORM == "none":
                result = tl.sum(sums[column], 0)
            else:
                result, square = tl.reduce((sums[column], squares), 0, _add_both)
                result *= tl.rsqrt(square / K + eps)
            if NORM == "layer":
                result += tl.sum(shifts[column], 0)
            index = first + column
            tl.store(out_ptr + row * COLUMNS + index // rank * R + index % rank, result)
    return found
