"""Lookup in the part of a vocabulary's table that one rank holds."""

import torch

from roseinfer.kernels.common.triton_support import cdiv, tl, triton

_BLOCK_COLUMNS = 2048  # per program
_PROGRAM_WARPS = 4


@triton.jit(do_not_specialize=["start", "held"])
def _vocab_embedding_kernel(ids_ptr, table_ptr, out_ptr, start, held, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(ids_ptr + row).to(tl.int64) - start
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (at >= 0) & (at < held) & (column < WIDTH)
    values = tl.load(table_ptr + at * WIDTH + column, mask=here, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, values, mask=column < WIDTH)


def vocab_rows(ids: torch.Tensor, table: torch.Tensor, start: int) -> torch.Tensor:
    """Look up ids [T] in table [held, width]: return [T, width], row `id - start`, or zeros for other ranks' ids.

    Begins after all earlier kernels have ended, which `early_start` requires of readers of a step's inputs.
    """
    held, width = table.shape
    assert table.is_contiguous() and ids.is_contiguous()
    out = torch.empty((ids.shape[0], width), dtype=table.dtype, device=table.device)
    if len(ids):
        grid = (len(ids), cdiv(width, _BLOCK_COLUMNS))
        _vocab_embedding_kernel[grid](
            ids, table, out, start, held, WIDTH=width, BLOCK=_BLOCK_COLUMNS, num_warps=_PROGRAM_WARPS
        )
    return out


def vocab_rows_reference(ids: torch.Tensor, table: torch.Tensor, start: int) -> torch.Tensor:
    at = ids - start
    here = (at >= 0) & (at < table.shape[0])
    return table[at.where(here, 0)] * here[:, None]
