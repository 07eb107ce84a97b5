"""Products of some rows by an FP8 weight (`tile_product`), where reading the weight is most of the work.

The library's products take tiles of 128 rows, mostly empty here, and load too little of the weight at a time. Here a
tile may have as few as 16 rows. The tensor memory accelerator copies inputs several blocks of columns ahead, or the
weight all at once, while the kernel before still computes the input. Bias and residual are added before the result is
written. A program takes all columns of its tile, or a share of them; then the last program to finish adds up the shares
in their order. So results are deterministic, and a row's result does not depend on the other rows (it may differ in the
last bit between numbers of rows that are compiled separately).
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.common.triton_support import cdiv, tensor_descriptor, tl, triton
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.linear.fp8_tile_configs import TileConfig
from roseinfer.kernels.linear.skinny_kernel import prefetch_rows

# Columns of the weight's rows to request into the L2 cache before the input is there.
_PREFETCHED_COLUMNS = 256
# The most float32 sums of all shares, and tiles with shares, of one product.
MAX_SUMS, MAX_TILES = 1 << 23, 1 << 12


@triton.jit
def finish_tile(
    sums,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    rows,
    out_stride,
    N: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Scale the sums of a tile unless that is done, add bias and residual, and write them."""
    if WEIGHT_FIRST:
        sums = tl.trans(sums)
    if not SCALED:
        sums *= tl.load(x_scales_ptr + tl.minimum(m, rows - 1))[:, None]
        sums *= tl.load(w_scales_ptr + n, mask=n < N, other=0.0)[None, :]
    if HAS_BIAS:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    inside = (m < rows)[:, None] & (n < N)[None, :]
    if ADD:
        sums += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_shares(sums, parts_ptr, arrived_ptr, share, SHARES: tl.constexpr):
    """Return the sum of a tile's shares, and whether it is complete: in the last of its programs."""
    last = True
    if SHARES > 1:
        HEIGHT: tl.constexpr = sums.shape[0]
        WIDTH: tl.constexpr = sums.shape[1]
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        cell = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        parts = parts_ptr + tile * (SHARES * HEIGHT * WIDTH) + cell
        tl.store(parts + share * (HEIGHT * WIDTH), sums)
        tl.debug_barrier()  # all threads have written before one of them counts
        last = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu") == SHARES - 1
        if last:
            tl.store(arrived_ptr + tile, 0)
            sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
            for i in tl.static_range(SHARES):
                sums += tl.load(parts + i * (HEIGHT * WIDTH), cache_modifier=".cg")
    return sums, last


@triton.jit
def _product_ahead(
    x_ptr, w_ptr, x_scales, w_scales, m, first_n, first_k, rows, x_scale_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr, BLOCKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile, weight first.

    The whole weight of the tile is read before its input is there. From then on only the input, loaded in one go, is
    waited for.
    """
    n, column = first_n + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + first_k + column[None, :]
    x_rows = x_ptr + tl.minimum(m, rows - 1).to(tl.int64)[:, None] * K + first_k + column[None, :]
    kept, factors, inputs, scales = (), (), (), ()
    for i in tl.static_range(STEPS):
        kept += (tl.load(w_rows + i * BLOCK_K, eviction_policy="evict_first"),)
        if BLOCKS:
            factors += (tl.load(w_scales + (first_k + i * BLOCK_K) // 128),)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(STEPS):
        inputs += (tl.load(x_rows + i * BLOCK_K),)
    if BLOCKS:
        for i in tl.static_range(STEPS):
            scales += (tl.load(x_scales + (first_k + i * BLOCK_K) // 128 * x_scale_stride) * factors[i],)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for i in tl.static_range(STEPS):
        if BLOCKS:
            sums += tl.dot(kept[i], tl.trans(inputs[i])) * scales[i][None, :]
        else:
            sums = tl.dot(kept[i], tl.trans(inputs[i]), sums)
    return sums


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
def _tile_kernel(
    x_blocks,
    x_ptr,
    w_blocks,
    w_ptr,
    x_scales_ptr,
    w_scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    x_scale_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    AHEAD: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute, in program (m, n, share), a tile of BLOCK_M rows and BLOCK_N outputs over a share of the columns.

    Tiles of the same outputs run one after another, so that they find the weight in the L2 cache.
    """
    if OVERLAP:
        if WEIGHT_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            start = tl.program_id(1) * BLOCK_N
            at = w_ptr + start.to(tl.int64) * K + tl.program_id(2) * (K // SHARES)
            prefetch_rows(at, tl.minimum(N - start, BLOCK_N), K, PREFETCH)
        if not AHEAD:
            tl.extra.cuda.gdc_wait()
    STEPS: tl.constexpr = K // BLOCK_K // SHARES
    HEIGHT: tl.constexpr = BLOCK_N if WEIGHT_FIRST else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if WEIGHT_FIRST else BLOCK_N
    first_m, first_n, share = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    x_scales = x_scales_ptr + tl.minimum(m, rows - 1)
    w_scales = w_scales_ptr + first_n // 128 * (K // 128)
    if AHEAD:
        sums = _product_ahead(
            x_ptr, w_ptr, x_scales, w_scales, m, first_n, share * STEPS * BLOCK_K, rows, x_scale_stride,
            N, K, BLOCK_M, BLOCK_N, BLOCK_K, STEPS, BLOCKS, OVERLAP,
        )  # fmt: skip
    else:
        sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for step in tl.range(0, STEPS, num_stages=STAGES):
            k = (share * STEPS + step) * BLOCK_K
            x, w = x_blocks.load([first_m, k]), w_blocks.load([first_n, k])
            if BLOCKS:
                scale = tl.load(x_scales + k // 128 * x_scale_stride) * tl.load(w_scales + k // 128)
                if WEIGHT_FIRST:
                    sums += tl.dot(w, tl.trans(x)) * scale[None, :]
                else:
                    sums += tl.dot(x, tl.trans(w)) * scale[:, None]
            elif WEIGHT_FIRST:
                sums = tl.dot(w, tl.trans(x), sums)
            else:
                sums = tl.dot(x, tl.trans(w), sums)
    if OVERLAP and not WEIGHT_FIRST:
        # An earlier start of the successor would take the place of some of the many programs.
        tl.extra.cuda.gdc_launch_dependents()
    sums, last = add_shares(sums, parts_ptr, arrived_ptr, share, SHARES)
    if last:
        finish_tile(
            sums,
            x_scales_ptr,
            w_scales_ptr,
            bias_ptr,
            out_ptr,
            m,
            n,
            rows,
            out_stride,
            N,
            BLOCKS,
            HAS_BIAS,
            ADD,
            WEIGHT_FIRST,
        )


class Parts(NamedTuple):
    """Workspace for the sums of shares, and the number of finished shares of each tile: zero between products.

    Products of one stream may share it, since only one of them at a time writes there.
    """

    sums: torch.Tensor
    arrived: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device) -> "Parts":
        sums = torch.empty(MAX_SUMS, dtype=torch.float32, device=device)
        return cls(sums, torch.zeros(MAX_TILES, dtype=torch.int32, device=device))

    @staticmethod
    def check_room(tiles: int, shares: int, tile_sums: int) -> None:
        """Assert that there is room for so many tiles of `tile_sums` sums, if shares of a tile meet here at all."""
        assert shares == 1 or (tiles <= MAX_TILES and tiles * shares * tile_sums <= MAX_SUMS)


def tile_product(
    x: Fp8Rows,
    codes: torch.Tensor,
    scales: torch.Tensor,
    config: TileConfig,
    parts: Parts,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ (codes * scales).T + bias + residual [x.rows, N].

    codes: [N, K] float8_e4m3fn, contiguous, at a multiple of 16 bytes; K a multiple of 128. scales: float32,
    contiguous, [N] (x has a scale for each row) or [ceil(N / 128), K / 128] (x has one for each group). bias: [N].
    residual: [x.rows, N], its rows may be apart; it is overwritten and returned. Otherwise the result is new, of
    `dtype`. Sums are float32 with scales by blocks; else they have the precision of the matrix units, some 14 bits.
    Needs compute capability 9.0.
    """
    (outs, columns), blocks = codes.shape, scales.ndim == 2
    assert x.scales.shape[1] == (columns // SCALE_BLOCK if blocks else 1)
    assert columns % (config.block_k * config.shares) == 0
    assert config.block_k == SCALE_BLOCK or not blocks
    assert config.weight_first or not config.ahead
    out = torch.empty((x.rows, outs), dtype=dtype, device=codes.device) if residual is None else residual
    assert out.stride(1) == 1
    grid = (cdiv(x.rows, config.block_m), cdiv(outs, config.block_n), config.shares)
    parts.check_room(grid[0] * grid[1], config.shares, config.block_m * config.block_n)
    _tile_kernel[grid](
        tensor_descriptor(x.codes, config.block_m, config.block_k),
        x.codes,
        tensor_descriptor(codes, config.block_n, config.block_k),
        codes,
        x.scales,
        scales,
        scales if bias is None else bias,
        out,
        parts.sums,
        parts.arrived,
        x.rows,
        x.scales.stride(1),
        out.stride(0),
        N=outs,
        K=columns,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SHARES=config.shares,
        STAGES=config.stages,
        BLOCKS=blocks,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        WEIGHT_FIRST=config.weight_first,
        AHEAD=config.ahead,
        PREFETCH=min(columns // config.shares, _PREFETCHED_COLUMNS) if config.weight_first and not config.ahead else 0,
        num_warps=config.warps,
        **early_start.options(codes.device),
    )
    return out
