"""Product of some rows by a few rows of a weight in 16 bits after an RMSNorm, in one launch (`normed_product`).

So small a product has too few outputs for a GPU's multiprocessors: programs take shares of the columns, and the last
one to finish adds up a tile's shares in their order. It also divides by the root mean squares, whose shares the
programs add up on the way. The weight is read before the input is there.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, tl, triton
from roseinfer.kernels.linear.fp8_tiles import Parts

# Rows of the input and of the weight in a tile: the least that the matrix units take.
_TILE_ROWS = 16
# Columns of a share, which a program takes at once.
_SHARE_COLUMNS = 256
MAX_ROWS = 64


@triton.jit(do_not_specialize=["rows"])
def normed_product_kernel(
    x_ptr,
    w_ptr,
    norm_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    x_stride,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
    SHARE: tl.constexpr,
    SHARES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute, in program (m, n, share), a tile of TILE rows and TILE outputs over a share of the columns."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    share = tl.program_id(2)
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    k = share * SHARE + tl.arange(0, SHARE)
    inside = (k < K)[None, :]
    w = tl.load(w_ptr + tl.minimum(n, N - 1)[:, None] * K + k[None, :], mask=inside, other=0.0)
    gain = tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    rows_at = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * x_stride
    x = tl.load(rows_at + k[None, :], mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, 1)
    # Before they are divided, inputs times the norm's weight may be too large for float16.
    FACTOR: tl.constexpr = 256.0 if w_ptr.dtype.element_ty == tl.float16 else 1.0
    sums = tl.dot((x * (gain / FACTOR)[None, :]).to(w.dtype), tl.trans(w))
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, TILE)
    # Sums of a share, then its squares.
    SIZE: tl.constexpr = TILE * (TILE + 1)
    parts = parts_ptr + tile * (SHARES * SIZE)
    cell = place[:, None] * TILE + place[None, :]
    tl.store(parts + share * SIZE + cell, sums)
    tl.store(parts + share * SIZE + TILE * TILE + place, squares)
    tl.debug_barrier()  # all threads have written before one of them counts
    if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SHARES - 1:
        tl.store(arrived_ptr + tile, 0)
        sums = tl.zeros([TILE, TILE], tl.float32)
        squares = tl.zeros([TILE], tl.float32)
        for i in tl.static_range(SHARES):
            sums += tl.load(parts + i * SIZE + cell, cache_modifier=".cg")
            squares += tl.load(parts + i * SIZE + TILE * TILE + place, cache_modifier=".cg")
        sums *= (FACTOR * tl.rsqrt(squares / K + eps))[:, None]
        written = (m < rows)[:, None] & (n < N)[None, :]
        tl.store(out_ptr + m[:, None] * N + n[None, :], sums.to(out_ptr.dtype.element_ty), mask=written)


def normed_product(
    x: torch.Tensor, weight: torch.Tensor, norm_weight: torch.Tensor, eps: float, parts: Parts
) -> torch.Tensor:
    """Return rms_norm(x) @ weight.T [M, N], for at most MAX_ROWS rows.

    x: [M, K], its rows may be apart. weight: [N, K], of x's dtype, contiguous. It may start before the stream's
    preceding kernel has ended; only x may be a result of that.
    """
    rows, (outs, columns) = len(x), weight.shape
    assert 1 <= rows <= MAX_ROWS and x.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    grid = cdiv(rows, _TILE_ROWS), cdiv(outs, _TILE_ROWS), cdiv(columns, _SHARE_COLUMNS)
    parts.check_room(grid[0] * grid[1], max(grid[2], 2), _TILE_ROWS * (_TILE_ROWS + 1))
    normed_product_kernel[grid](
        x,
        weight,
        norm_weight,
        out,
        parts.sums,
        parts.arrived,
        rows,
        x.stride(0),
        eps,
        N=outs,
        K=columns,
        TILE=_TILE_ROWS,
        SHARE=_SHARE_COLUMNS,
        SHARES=grid[2],
        num_warps=2,
        **early_start.options(x.device),
    )
    return out
