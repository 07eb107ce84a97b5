"""Inputs times A of each row's slot, for products of few rows: the first half of what adapters add.

A program takes some columns of one row over the whole width, with the norm before it. Sums are float32, and do not
depend on the other rows. `shrink_tiles` multiplies more rows.
"""

import torch

from roseinfer.kernels.common import early_start
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton
from roseinfer.kernels.lora.slots import SlotMatrices, SlotSums

# Rows up to which every row reads its slot's matrix by itself.
MAX_ROWS = 16
_ROW_COLUMNS = 2
_MAX_ROW_BLOCK = 4096


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


def shrink(
    x: torch.Tensor,
    slots: torch.Tensor,
    matrices: SlotMatrices,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> SlotSums:
    """Multiply each row of x [T, in] by A of its slot, for at most `MAX_ROWS` rows.

    The last dimension of x is contiguous. slots: [T] int32, -1 for rows without an adapter; older than the kernel
    before. norm: weight [in] of an RMSNorm of x.
    """
    rows, width = x.shape
    assert rows <= MAX_ROWS and x.stride(1) == 1 and slots.shape == (rows,)
    assert matrices.a.shape[1] == matrices.columns * width
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


def shrink_reference(x: torch.Tensor, slots: torch.Tensor, matrices: SlotMatrices) -> SlotSums:
    """Return the sums by plain torch, and zeros where they are undefined."""
    sums = torch.zeros((len(x), matrices.columns), dtype=torch.float32, device=x.device)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            a, _ = matrices.content(slot)
            sums[row].view(matrices.modules, -1)[:, : a.shape[1]] = a.float() @ x[row].float()
    return SlotSums(sums[None], slots, matrices)
