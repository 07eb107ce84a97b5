"""Keys and values in FP8, widened once a step for `prefill_bulk`, which supports 16 bits only.

In `prefill_attention` every block of queries widens all keys and values that it sees. Here the contexts of a step's
prompt chunks are copied in 16 bits, token after token, to a scratch buffer that all layers share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roseinfer.kernels.attention.prefill_bulk import BLOCK_M, BLOCK_N, BulkPages
from roseinfer.kernels.attention.prefill_shares import FIRST, IN_BULK, PART, PARTS, ROW
from roseinfer.kernels.common.triton_support import cdiv, next_power_of_2, tl, triton

# Codes that a program widens at a time, and programs per entry of the map.
_CHUNK_ELEMENTS = 4096
_ENTRY_PROGRAMS = 4


@dataclass(frozen=True, slots=True)
class WideContexts:
    """Scratch buffer. keys, values: [pages, BLOCK_N, kv_heads, D] of 16 bits; each context begins with a page."""

    keys: torch.Tensor
    values: torch.Tensor
    pages: BulkPages

    @classmethod
    def allocate(
        cls, tokens: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> "WideContexts":
        """Allocate for contexts of `tokens` tokens together; partly filled pages reduce this."""
        shape = (cdiv(tokens, BLOCK_N), BLOCK_N, kv_heads, head_dim)
        keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        return cls(keys, values, BulkPages.of(keys, values))

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    def place(self, block_map: np.ndarray, first_row: int, context_lens: Sequence[int]) -> bool:
        """Assign pages to each of a step's chunk rows, and all blocks of the map to `prefill_bulk`.

        Returns False, and leaves the map unchanged, if they do not fit. block_map: of `map_blocks`, undivided.
        context_lens: of rows first_row and following.
        """
        pages = -(-np.asarray(context_lens, dtype=np.int64) // BLOCK_N)
        if pages.sum() > self.keys.shape[0]:
            return False
        block_map[:, PART] = (np.cumsum(pages) - pages)[block_map[:, ROW] - first_row]
        block_map[:, PARTS] = IN_BULK
        return True


def widen_contexts(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: tuple[torch.Tensor, torch.Tensor],
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    query_start: torch.Tensor,
    context_len: torch.Tensor,
    block_map: torch.Tensor,
    group: int,
    wide: WideContexts,
) -> None:
    """Copy the contexts of the map's bulk rows, times their scales, to the pages in the map.

    k_cache, v_cache: codes (e4m3fn), as for `prefill_attention`, like the other arguments. The map's blocks are of
    `BLOCK_M` pairs of a query and one of `group` heads. Each of them copies a part of its row's context.
    """
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    _widen_kernel[(block_map.shape[0], _ENTRY_PROGRAMS)](
        k_cache,
        v_cache,
        *kv_scales,
        tables,
        table_rows,
        query_start,
        context_len,
        block_map,
        wide.keys,
        wide.values,
        k_cache.stride(0),
        tables.stride(0),
        QUERIES=BLOCK_M // group,
        KV_HEADS=kv_heads,
        D=head_dim,
        BLOCK_SIZE=block_size,
        PAGE=BLOCK_N,
        CHUNK=min(_CHUNK_ELEMENTS, next_power_of_2(block_size * kv_heads * head_dim)),
        SPLIT=_ENTRY_PROGRAMS,
        num_warps=4,
    )


_ROW: tl.constexpr = tl.constexpr(ROW)
_FIRST: tl.constexpr = tl.constexpr(FIRST)
_PART: tl.constexpr = tl.constexpr(PART)
_PARTS: tl.constexpr = tl.constexpr(PARTS)
_IN_BULK: tl.constexpr = tl.constexpr(IN_BULK)


@triton.jit
def _widen_kernel(
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    tables,
    table_rows,
    query_start,
    context_len,
    block_map,
    keys,
    values,
    block_stride,
    table_stride,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Widen, in program (e, i), every n-th block of tokens of entry e's row; n is the number of its programs."""
    entry = block_map + 4 * tl.program_id(0)
    row = tl.load(entry + _ROW)
    if (row < 0) | (tl.load(entry + _PARTS) != _IN_BULK):
        return
    WIDTH: tl.constexpr = KV_HEADS * D
    count = tl.load(query_start + row + 1) - tl.load(query_start + row)
    stride = tl.cdiv(count, QUERIES) * SPLIT
    begin = tl.load(entry + _FIRST) // QUERIES * SPLIT + tl.program_id(1)
    end = tl.cdiv(tl.load(context_len + row), BLOCK_SIZE)
    table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    target = tl.load(entry + _PART).to(tl.int64) * (PAGE * WIDTH)
    place = tl.arange(0, CHUNK)
    for block in range(begin, end, stride):
        source = tl.load(table + block).to(tl.int64) * block_stride
        into = target + block * (BLOCK_SIZE * WIDTH)
        for part in range(0, BLOCK_SIZE * WIDTH, CHUNK):
            offset = part + place
            inside = offset < BLOCK_SIZE * WIDTH
            head = offset // D % KV_HEADS
            _widen(k_cache + source + offset, k_scales + head, keys + into + offset, inside)
            _widen(v_cache + source + offset, v_scales + head, values + into + offset, inside)


@triton.jit
def _widen(codes, scales, wide, inside):
    numbers = tl.load(codes, mask=inside).to(tl.float32) * tl.load(scales, mask=inside)
    tl.store(wide, numbers.to(wide.dtype.element_ty), mask=inside)
