"""Inputs times A of each token's slot: the first half of what adapters add, once for each input of products.

Few rows: a program takes some columns of one row over the whole width, with the norm before it. More rows: a program
takes a tile of tokens and one slot, and leaves at once if no token has it. So nothing is sorted, and the host need not
know which tokens have which adapter. Sums are float32. Their order depends on the number of tokens of the step, not on
the other rows.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton
from roseinfer.kernels.lora.slots import SlotMatrices, SlotSums

# Rows up to which every row reads its slot's matrix by itself.
MAX_ROWS = 16
_ROW_COLUMNS = 2
_MAX_ROW_BLOCK = 4096
_SMALL_TILE_ROWS, _TILE_ROWS = 16, 64
_MAX_SMALL_TILE_TOKENS = 256
# With few tiles, several programs divide the width, in parts of at least so many columns. The kernel is compiled for
# their number, so there are few.
_MIN_PART_COLUMNS = 512
_SMALL_TILE_PARTS, _TILE_PARTS = 8, 4
_MAX_DIVIDED_TOKENS = 2048
_TILE_COLUMNS = 64
_BLOCK_COLUMNS = 128


@triton.jit
def lora_rows_kernel(
    x_ptr,
    norm_ptr,
    slots_ptr,
    ranks_ptr,
    a_ptr,
    out_ptr,
    stride_x,
    eps,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute, in program (t, i), the sums i * BLOCK_C and following of row t, counted without gaps between modules."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # the product reads its weight meanwhile
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    rank = tl.load(ranks_ptr + slot, mask=slot >= 0, other=0)
    used = COLUMNS // R * rank
    index = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = index // tl.maximum(rank, 1) * R + index % tl.maximum(rank, 1)
    there = index < used
    k = tl.arange(0, BLOCK_K)
    a_tile = a_ptr + (slot.to(tl.int64) * COLUMNS + index)[:, None] * K + k[None, :]
    a = tl.load(a_tile, mask=there[:, None] & (k < K)[None, :], other=0.0)

    # From here on, results of earlier kernels may be read. Programs without work wait, too: the product after this
    # kernel waits only for it.
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if tl.program_id(1) * BLOCK_C < used:
        sums = tl.zeros([BLOCK_C], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            inside = start + k < K
            if start > 0:
                a = tl.load(a_tile + start, mask=there[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_ptr + row * stride_x + start + k, mask=inside, other=0.0).to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                x *= tl.load(norm_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
            sums += tl.sum(x[None, :] * a.to(tl.float32), 1)
        if norm_ptr is not None:
            sums *= tl.rsqrt(tl.sum(squares, 0) / K + eps)
        tl.store(out_ptr + row * COLUMNS + column, sums, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def lora_tiles_kernel(
    x_ptr,
    slots_ptr,
    ranks_ptr,
    a_ptr,
    out_ptr,
    tokens,
    stride_x,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    R: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute, in program (tile, slot, i), BLOCK_C sums of a tile's tokens that have the slot, over one part of the
    width.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    part = tl.program_id(2) // BLOCKS
    first = tl.program_id(2) % BLOCKS * BLOCK_C
    mine = tl.load(slots_ptr + row, mask=row < tokens, other=-1) == slot
    rank = tl.load(ranks_ptr + slot)
    used = COLUMNS // R * rank
    if (tl.max(mine.to(tl.int32), 0) > 0) & (first < used):
        index = first + tl.arange(0, BLOCK_C)
        column = index // rank * R + index % rank
        there = index < used
        k = part * PART + tl.arange(0, BLOCK_K)
        x_tile = x_ptr + row.to(tl.int64)[:, None] * stride_x + k[None, :]
        a_tile = a_ptr + (slot.to(tl.int64) * COLUMNS + index)[:, None] * K + k[None, :]
        sums = tl.zeros([BLOCK_M, BLOCK_C], tl.float32)
        for start in tl.range(0, PART, BLOCK_K, num_stages=STAGES):
            inside = (start + k < K)[None, :]
            x = tl.load(x_tile + start, mask=mine[:, None] & inside, other=0.0)
            a = tl.load(a_tile + start, mask=there[:, None] & inside, other=0.0)
            sums = tl.dot(x, tl.trans(a), sums, input_precision=PRECISION)
        out_tile = out_ptr + (part * tokens + row).to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(out_tile, sums, mask=mine[:, None] & there[None, :])


def shrink(
    x: torch.Tensor,
    slots: torch.Tensor,
    matrices: SlotMatrices,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> SlotSums:
    """Multiply each row of x [T, in] by A of its slot.

    The last dimension of x is contiguous. slots: [T] int32, -1 for rows without an adapter; older than the kernel
    before. norm: weight [in] of an RMSNorm of x, for at most `MAX_ROWS` rows.
    """
    rows, width = x.shape
    assert x.stride(1) == 1 and matrices.a.shape[1] == matrices.columns * width and slots.shape == (rows,)
    if rows <= MAX_ROWS:
        values = torch.empty((1, rows, matrices.columns), dtype=torch.float32, device=x.device)
        lora_rows_kernel[(rows, cdiv(matrices.columns, _ROW_COLUMNS))](
            x,
            norm,
            slots,
            matrices.ranks,
            matrices.a,
            values,
            x.stride(0),
            eps,
            K=width,
            COLUMNS=matrices.columns,
            R=matrices.max_rank,
            BLOCK_C=_ROW_COLUMNS,
            BLOCK_K=min(next_power_of_2(width), _MAX_ROW_BLOCK),
            num_warps=4,
            **early_start.options(x.device),
        )
        return SlotSums(values, slots, matrices)
    assert norm is None, "only few rows are normed here"
    tile = tile_rows(rows)
    tiles, parts = cdiv(rows, tile), num_parts(rows, width)
    values = torch.empty((parts, rows, matrices.columns), dtype=torch.float32, device=x.device)
    block = min(_TILE_COLUMNS, next_power_of_2(matrices.columns))
    lora_tiles_kernel[(tiles, len(matrices.a), parts * cdiv(matrices.columns, block))](
        x,
        slots,
        matrices.ranks,
        matrices.a,
        values,
        rows,
        x.stride(0),
        K=width,
        COLUMNS=matrices.columns,
        R=matrices.max_rank,
        PART=cdiv(cdiv(width, parts), _BLOCK_COLUMNS) * _BLOCK_COLUMNS,
        BLOCK_M=tile,
        BLOCK_C=block,
        BLOCK_K=_BLOCK_COLUMNS,
        STAGES=3,
        PRECISION="ieee",  # which only matters for float32
        num_warps=4,
        **early_start.options(x.device),
    )
    return SlotSums(values, slots, matrices)


def tile_rows(tokens: int) -> int:
    """Return the tokens of a tile."""
    return _SMALL_TILE_ROWS if tokens <= _MAX_SMALL_TILE_TOKENS else _TILE_ROWS


def num_parts(tokens: int, width: int) -> int:
    """Return how many programs share the width of a tile's inputs."""
    if tokens > _MAX_DIVIDED_TOKENS:
        return 1
    return max(
        1, min(width // _MIN_PART_COLUMNS, _SMALL_TILE_PARTS if tokens <= _MAX_SMALL_TILE_TOKENS else _TILE_PARTS)
    )


def shrink_reference(x: torch.Tensor, slots: torch.Tensor, matrices: SlotMatrices) -> SlotSums:
    """Return the sums by plain torch, and zeros where they are undefined."""
    sums = torch.zeros((len(x), matrices.columns), dtype=torch.float32, device=x.device)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            a, _ = matrices.content(slot)
            sums[row].view(matrices.modules, -1)[:, : a.shape[1]] = a.float() @ x[row].float()
    return SlotSums(sums[None], slots, matrices)
