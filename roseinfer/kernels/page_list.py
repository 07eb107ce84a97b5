"""The blocks of several sequences in one list, for kernels that walk such a list instead of block tables."""

from dataclasses import dataclass

import torch

from roseinfer.kernels.triton_support import cdiv, tl, triton

_PAGES = 256  # blocks that one program copies
_ROWS = 1024  # rows whose blocks one program counts at a time


@dataclass(frozen=True, slots=True)
class PageList:
    """Row r owns blocks[starts[r] : starts[r + 1]], in the order of its positions; all tensors are int32.

    starts: [R + 1]. last_tokens: [R], how many tokens the row's last block holds, at least 1. blocks: [any length that
    holds every row's].
    """

    starts: torch.Tensor
    last_tokens: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def empty(cls, rows: int, blocks: int, device: torch.device) -> "PageList":
        """One allocation, unwritten."""
        sizes = (rows + 1, rows, blocks)
        return cls(*torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes))

    def rows(self, count: int) -> "PageList":
        """The same memory, for no more than `count` rows."""
        return PageList(self.starts[: count + 1], self.last_tokens[:count], self.blocks)


def list_pages(
    pages: PageList,
    context_len: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    block_size: int,
    longest: int,
) -> None:
    """Fill `pages` for R rows. Reads lengths from the device only, so it can be captured.

    context_len, table_rows: [R] int32, every length at least 1. tables: [S, B] int32, row r's blocks are the first
    ceil(context_len[r] / block_size) entries of tables[table_rows[r]]. longest: as many blocks as the longest row has,
    or more; it sets the size of the launch.
    """
    grid = (context_len.shape[0], cdiv(longest, _PAGES))
    _list_pages[grid](
        context_len,
        tables,
        table_rows,
        pages.starts,
        pages.last_tokens,
        pages.blocks,
        tables.stride(0),
        BLOCK_SIZE=block_size,
        PAGES=_PAGES,
        ROWS=_ROWS,
    )


def list_pages_reference(
    pages: PageList,
    context_len: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    block_size: int,
    longest: int,
) -> None:
    """See `list_pages`."""
    counts = (context_len + block_size - 1) // block_size
    assert int(counts.max()) <= longest
    pages.starts[0] = 0
    pages.starts[1:] = counts.cumsum(0)
    pages.last_tokens.copy_(context_len - (counts - 1) * block_size)
    for row, (start, count) in enumerate(zip(pages.starts.tolist(), counts.tolist(), strict=False)):
        pages.blocks[start : start + count] = tables[table_rows[row], :count]


@triton.jit(
    # Slices of larger buffers: whether their addresses are aligned changes from step to step, and nothing may compile.
    do_not_specialize=[
        "context_len",
        "tables",
        "table_rows",
        "starts",
        "last_tokens",
        "blocks",
        "table_stride",
    ]
)
def _list_pages(
    context_len,
    tables,
    table_rows,
    starts,
    last_tokens,
    blocks,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (r, i) copies blocks i * PAGES .. of row r, behind all blocks of the rows before it."""
    row = tl.program_id(0)
    first = tl.program_id(1) * PAGES
    context = tl.load(context_len + row)
    count = (context + BLOCK_SIZE - 1) // BLOCK_SIZE
    if first < count:
        start = row * 0
        counted = row * 0
        while counted < row:
            other = counted + tl.arange(0, ROWS)
            before = tl.load(context_len + other, mask=other < row, other=0)
            start += tl.sum((before + BLOCK_SIZE - 1) // BLOCK_SIZE)
            counted += ROWS
        if first == 0:
            tl.store(starts + row + 1, start + count)
            tl.store(last_tokens + row, context - (count - 1) * BLOCK_SIZE)
            if row == 0:
                tl.store(starts, 0)
        page = first + tl.arange(0, PAGES)
        table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        block = tl.load(table + page, mask=page < count)
        tl.store(blocks + start + page, block, mask=page < count)
