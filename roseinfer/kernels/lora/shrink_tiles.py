"""Inputs times A of each token's slot, for products of many rows: the first half of what adapters add.

A program takes a tile of tokens and one slot, and leaves at once if no token has it. So nothing is sorted, and the host
need not know which tokens have which adapter. With few tiles, several programs share the width of the inputs; the last
one to finish adds up their sums in a fixed order. A row's sums depend on the number of tokens of the step, but not on
the other rows. They are rounded to the model's type.
"""

from typing import NamedTuple

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.matrix_units import end_products
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.lora.slots import SlotMatrices

# The most tiles of tokens and sums whose width is shared.
MAX_SHARED_TILES = 1 << 12
# Up to so many tokens, a tile has rows of many slots, and there are few tiles.
MAX_FEW_TOKENS = 256
_MIN_TILE_ROWS, _MAX_TILE_ROWS = 16, 64
# Sums of a row in a program, and columns of 16-bit inputs that it multiplies at once. Programs of few tokens are many.
_MIN_SUMS, _MAX_FEW_TOKENS_SUMS, _MAX_SUMS = 16, 16, 64
_FEW_TOKENS_STEP_COLUMNS, _STEP_COLUMNS = 128, 64
# Columns of the inputs that a program multiplies in all. On an H200 these sizes are the fastest for eight adapters of
# rank 16.
_PART_COLUMNS = 1024


class TileSums(NamedTuple):
    """Result of `shrink_tiles`: what a product adds to its outputs, once it is multiplied by B.

    values: [T, M * R] of the model's type; undefined for tokens without an adapter, and beyond the rank of the others.
    slots: [T] int32, -1 without an adapter.
    """

    values: torch.Tensor
    slots: torch.Tensor
    matrices: SlotMatrices


@triton.jit(do_not_specialize=["tokens", "scale_stride"])
def lora_tiles_kernel(
    x_ptr,
    scales_ptr,
    slots_ptr,
    ranks_ptr,
    a_ptr,
    out_ptr,
    parts_ptr,
    arrived_ptr,
    tokens,
    stride_x,
    scale_stride,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    COMPILED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute, in program (tile, slot, i), BLOCK_C sums of a tile's tokens that have the slot, over one part of the
    width. scales_ptr: of inputs in FP8, one a row or, GROUPED, one for each 128 columns.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    PART: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + PARTS - 1) // PARTS * BLOCK_K
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    part, block = tl.program_id(2) // BLOCKS, tl.program_id(2) % BLOCKS
    mine = tl.load(slots_ptr + row, mask=row < tokens, other=-1) == slot
    rank = tl.load(ranks_ptr + slot)
    used = COLUMNS // R * rank

    # From here on, results of earlier kernels may be read. Programs without work wait, too: the next kernel waits only
    # for this one.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if (tl.max(mine.to(tl.int32), 0) > 0) & (block * BLOCK_C < used):
        index = block * BLOCK_C + tl.arange(0, BLOCK_C)  # counted without gaps between modules
        column = index // rank * R + index % rank
        there = index < used
        k = part * PART + tl.arange(0, BLOCK_K)
        x_tile = x_ptr + row.to(tl.int64)[:, None] * stride_x + k[None, :]
        a_tile = a_ptr + (slot * COLUMNS + index).to(tl.int64)[:, None] * K + k[None, :]
        sums = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
            if COMPILED and scales_ptr is not None:  # x is converted in registers
                end_products()
            inside = (start + k < K)[None, :]
            x = tl.load(x_tile + start, mask=mine[:, None] & inside, other=0.0)
            a = tl.load(a_tile + start, mask=there[:, None] & inside, other=0.0)
            if GROUPED:
                first = part * PART + start
                is_read = mine & (first < K)
                scale = tl.load(scales_ptr + row + first // 128 * scale_stride, mask=is_read, other=0.0)
                sums += tl.dot(x.to(a.dtype), tl.trans(a)) * scale[:, None]
            else:
                sums = tl.dot(x.to(a.dtype), tl.trans(a), sums, input_precision=PRECISION)
        if scales_ptr is not None and not GROUPED:
            sums *= tl.load(scales_ptr + row, mask=mine, other=0.0)[:, None]
        last = True
        if PARTS > 1:
            cell = parts_ptr + row[:, None] * (BLOCKS * BLOCK_C) + block * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
            tl.store(cell + part * tokens * (BLOCKS * BLOCK_C), sums, mask=mine[:, None])
            arrived_ptr += (tl.program_id(0) * tl.num_programs(1) + slot) * BLOCKS + block
            tl.debug_barrier()  # all threads have written before one of them counts
            last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == PARTS - 1
            if last:
                tl.store(arrived_ptr, 0)
                sums = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
                for _ in tl.range(0, PARTS, num_stages=1, loop_unroll_factor=4):
                    sums += tl.load(cell, mask=mine[:, None], other=0.0, cache_modifier=".cg")
                    cell += tokens * (BLOCKS * BLOCK_C)
        if last:
            at = out_ptr + row[:, None] * COLUMNS + column[None, :]
            tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=mine[:, None] & there[None, :])


def shrink_tiles(
    x: torch.Tensor | Fp8Rows, slots: torch.Tensor, matrices: SlotMatrices, arrived: torch.Tensor
) -> TileSums:
    """Multiply each row of x [T, in] by A of its slot.

    x: its last dimension is contiguous; or rounded to FP8, as a product in eight bits reads it. slots: [T] int32, -1
    for rows without an adapter; older than the kernel before. arrived: [MAX_SHARED_TILES] int32, zero between calls;
    calls of one stream may share it.
    """
    values, scales, rows = (x.codes, x.scales, x.rows) if isinstance(x, Fp8Rows) else (x, None, len(x))
    width, columns = values.shape[1], matrices.columns
    assert values.stride(1) == 1 and matrices.a.shape[1] == columns * width and slots.shape == (rows,)
    few = rows <= MAX_FEW_TOKENS
    block_m = min(_MAX_TILE_ROWS, max(_MIN_TILE_ROWS, next_power_of_2(rows)))
    block_c = min(_MAX_FEW_TOKENS_SUMS if few else _MAX_SUMS, max(_MIN_SUMS, next_power_of_2(columns)))
    tiles, blocks, count = cdiv(rows, block_m), cdiv(columns, block_c), len(matrices.a)
    parts = max(1, width // _PART_COLUMNS) if tiles * blocks * count <= MAX_SHARED_TILES else 1
    sums = torch.empty((rows, columns), dtype=matrices.a.dtype, device=slots.device)
    shared = sums if parts == 1 else sums.new_empty((parts, rows, blocks * block_c), dtype=torch.float32)
    lora_tiles_kernel[(tiles, count, parts * blocks)](
        values,
        scales,
        slots,
        matrices.ranks,
        matrices.a,
        sums,
        shared,
        arrived,
        rows,
        values.stride(0),
        0 if scales is None else scales.stride(1),
        K=width,
        COLUMNS=columns,
        R=matrices.max_rank,
        PARTS=parts,
        GROUPED=scales is not None and scales.shape[1] > 1,
        BLOCK_M=block_m,
        BLOCK_C=block_c,
        BLOCK_K=(_FEW_TOKENS_STEP_COLUMNS if few else _STEP_COLUMNS) * 2 // matrices.a.itemsize,
        STAGES=4,
        PRECISION="ieee",  # which only matters for float32
        COMPILED=values.is_cuda,
        num_warps=4,
        **early_start.options(slots.device),
    )
    return TileSums(sums, slots, matrices)
