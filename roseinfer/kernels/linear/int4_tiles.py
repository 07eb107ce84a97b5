"""Products of some rows by a weight in four bits (`int4_tile_product`), and the weight in 16 bits for prompts.

Tiles and their shares are those of `fp8_tiles`. Here the weight is widened in registers, and inputs are not rounded.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.matrix_units import end_products
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tensor_descriptor, tl, triton
from roseinfer.kernels.linear.fp8_tile_configs import TileConfig
from roseinfer.kernels.linear.fp8_tiles import Parts, add_shares, finish_tile
from roseinfer.kernels.linear.int4_codes import PackedInt4, int4_halves
from roseinfer.kernels.linear.nvfp4_codes import e2m1_halves
from roseinfer.kernels.linear.skinny_kernel import prefetch_rows

# Columns of the weight's rows to request into the L2 cache before the input is there.
_PREFETCHED_COLUMNS = 512
# A block of a copy in 16 bits, which one program writes.
_WIDENED_ROWS, _WIDENED_COLUMNS = 16, 512


@triton.jit
def read_scales(
    scales_ptr, outs, n, k, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, E2M1: tl.constexpr
):
    """Load the words of scales of rows n and columns from k on: [rows, BLOCK_K / 128, words in 128 columns]."""
    block = tl.minimum(k + tl.arange(0, BLOCK_K // 128) * 128, K - 128)
    at = scales_ptr + n[:, None, None]
    if GROUP < 128:
        WORDS: tl.constexpr = 2 if E2M1 else 4
        place = tl.arange(0, WORDS) * (128 // WORDS)
        return tl.load(at + (block[None, :, None] + place[None, None, :]) // GROUP * outs)
    else:
        return tl.load(at + (block // GROUP * outs)[None, :, None])


@triton.jit
def _widened(codes, words, DTYPE: tl.constexpr, E2M1: tl.constexpr, COMPILED: tl.constexpr):
    """Return the numbers [N, K] of DTYPE, bfloat16 or float16, of codes [N, K / 2] uint8, before factors of rows.

    words: of `read_scales`.
    """
    N: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = words.shape[1]
    codes = tl.reshape(codes, [N, BLOCKS, 4, 4, 4])
    if E2M1:
        low, high = e2m1_halves(codes, words, DTYPE, COMPILED)
    else:
        low, high = int4_halves(codes, words, DTYPE, COMPILED)
    numbers = tl.permute(tl.join(low, high), (0, 1, 3, 2, 5, 4))  # block, j, t, half of eight, column
    return tl.reshape(numbers, [N, BLOCKS * 128])


@triton.jit(do_not_specialize=["rows"])
def int4_tile_kernel(
    x_blocks,
    w_blocks,
    w_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    rows,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
    PREFETCH: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
    factors_ptr=None,
):
    """Compute, in program (m, n, share), a tile of BLOCK_M rows and BLOCK_N outputs over a share of the K columns, a
    multiple of 128.
    """
    first_m, first_n, share = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    if OVERLAP:
        if WEIGHT_FIRST:
            tl.extra.cuda.gdc_launch_dependents()
        if PREFETCH > 0:
            at = w_ptr + first_n.to(tl.int64) * (K // 2) + share * (K // SHARES // 2)
            prefetch_rows(at, tl.minimum(N - first_n, BLOCK_N), K // 2, PREFETCH // 2)
        tl.extra.cuda.gdc_wait()
    STEPS: tl.constexpr = K // BLOCK_K // SHARES
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(n, N - 1)
    sums = tl.zeros([BLOCK_N if WEIGHT_FIRST else BLOCK_M, BLOCK_M if WEIGHT_FIRST else BLOCK_N], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        if COMPILED and WEIGHT_FIRST:
            end_products()
        k = (share * STEPS + step) * BLOCK_K
        x = x_blocks.load([first_m, k])
        words = read_scales(scales_ptr, N, w_rows, k, K, GROUP, BLOCK_K, factors_ptr is not None)
        w = _widened(w_blocks.load([first_n, k // 2]), words, x.dtype, factors_ptr is not None, COMPILED)
        if WEIGHT_FIRST:
            sums = tl.dot(w, tl.trans(x), sums)
        else:
            sums = tl.dot(x, tl.trans(w), sums)
    if OVERLAP and not WEIGHT_FIRST:
        # An earlier start of the successor would take the place of some of the many programs.
        tl.extra.cuda.gdc_launch_dependents()
    sums, last = add_shares(sums, parts_ptr, arrived_ptr, share, SHARES)
    if last:
        if factors_ptr is not None:
            factors = tl.load(factors_ptr + w_rows)
            sums *= factors[:, None] if WEIGHT_FIRST else factors[None, :]
        finish_tile(sums, None, None, bias_ptr, out_ptr, m, n, rows, out_stride, N, True, HAS_BIAS, ADD, WEIGHT_FIRST)


@triton.jit
def int4_widening_kernel(
    w_ptr, scales_ptr, out_ptr, N, outs, columns, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, COMPILED: tl.constexpr, OVERLAP: tl.constexpr, factors_ptr=None,
):  # fmt: skip
    """Write, in program (k, n), BLOCK_N rows and BLOCK_K columns of N rows in 16 bits, of a weight with `outs` rows."""
    first_k, n = tl.program_id(0) * BLOCK_K, tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(n, N - 1)
    place = first_k // 2 + tl.arange(0, BLOCK_K // 2)
    codes = tl.load(
        w_ptr + w_rows.to(tl.int64)[:, None] * (K // 2) + place[None, :], mask=(place < K // 2)[None, :], other=0
    )
    words = read_scales(scales_ptr, outs, w_rows, first_k, K, GROUP, BLOCK_K, factors_ptr is not None)
    w = _widened(codes, words, out_ptr.dtype.element_ty, factors_ptr is not None, COMPILED)
    if factors_ptr is not None:
        w = (w.to(tl.float32) * tl.load(factors_ptr + w_rows)[:, None]).to(w.dtype)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # earlier kernels read the old values
    column = first_k + tl.arange(0, BLOCK_K)
    at = out_ptr + n.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, w, mask=(n < N)[:, None] & (column < columns)[None, :])


def int4_tile_product(
    x: torch.Tensor,
    weight: PackedInt4,
    config: TileConfig,
    parts: Parts,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias + residual [M, N].

    x: [M, K] in 16 bits, contiguous, at a multiple of 16 bytes; K a multiple of 8. bias: [N]. residual: [M, N], its
    rows may be apart; it is overwritten and returned. Sums are float32.
    """
    rows, outs, padded = len(x), len(weight.codes), weight.padded
    assert x.is_contiguous() and padded % (config.block_k * config.shares) == 0
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if residual is None else residual
    assert out.stride(1) == 1
    grid = (cdiv(rows, config.block_m), cdiv(outs, config.block_n), config.shares)
    parts.check_room(grid[0] * grid[1], config.shares, config.block_m * config.block_n)
    codes = weight.codes.view(torch.uint8)
    int4_tile_kernel[grid](
        tensor_descriptor(x, config.block_m, config.block_k),
        tensor_descriptor(codes, config.block_n, config.block_k // 2),
        codes,
        weight.scales,
        bias,
        out,
        parts.sums,
        parts.arrived,
        rows,
        out.stride(0),
        N=outs,
        K=padded,
        GROUP=weight.group,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SHARES=config.shares,
        STAGES=config.stages,
        HAS_BIAS=bias is not None,
        ADD=residual is not None,
        WEIGHT_FIRST=config.weight_first,
        PREFETCH=min(padded // config.shares, _PREFETCHED_COLUMNS) if config.weight_first else 0,
        COMPILED=x.is_cuda,
        factors_ptr=weight.factors,
        num_warps=config.warps,
        **early_start.options(x.device),
    )
    return out


def widen(weight: PackedInt4, rows: slice, out: torch.Tensor) -> None:
    """Write some rows of the weight to `out` [rows, K], contiguous, in its 16 bits."""
    codes = weight.codes[rows].view(torch.uint8)
    block_k = min(_WIDENED_COLUMNS, next_power_of_2(weight.padded))
    int4_widening_kernel[(cdiv(weight.padded, block_k), cdiv(len(codes), _WIDENED_ROWS))](
        codes,
        weight.scales[:, rows],
        out,
        len(codes),
        len(weight.codes),
        weight.columns,
        K=weight.padded,
        GROUP=weight.group,
        BLOCK_N=_WIDENED_ROWS,
        BLOCK_K=block_k,
        COMPILED=out.is_cuda,
        factors_ptr=None if weight.factors is None else weight.factors[rows],
        **early_start.options(out.device),
    )
