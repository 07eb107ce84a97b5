"""Expansion of a step's rows into the inputs of its forward pass for every token, in one launch.

The host knows seats and positions. Token ids, which the previous step may have sampled just before, and block tables
are on the device. The grid depends only on the numbers of tokens and rows, so that a graph can capture the launch.
"""

import torch

from roseinfer.kernels.common.triton_support import cdiv, tl, triton

# Rows of `layout`.
SEAT, START, FIRST, WRITE_FROM, COUNT = range(5)
BLOCK_TOKENS = 128

_PER_STEP = ("layout_ptr", "token_rows_ptr", "drafts_ptr", "layout_stride", "num_tokens", "num_rows")


@triton.jit(do_not_specialize=_PER_STEP)
def _expand_kernel(
    layout_ptr,
    token_rows_ptr,
    drafts_ptr,
    token_pool_ptr,
    tables_ptr,
    input_ids_ptr,
    positions_ptr,
    slots_ptr,
    context_len_ptr,
    query_start_ptr,
    layout_stride,
    pool_stride,
    tables_stride,
    group_stride,
    slots_stride,
    num_tokens,
    num_rows,
    GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    adapter_slots_ptr=None,
    adapters_ptr=None,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Fields of tokens.
    inside = index < num_tokens
    row = tl.load(token_rows_ptr + index, mask=inside, other=0)
    padding = row < 0
    at = layout_ptr + tl.maximum(row, 0)
    seat = tl.load(at, mask=inside, other=0).to(tl.int64)
    start = tl.load(at + layout_stride, mask=inside, other=0)
    first = tl.load(at + 2 * layout_stride, mask=inside, other=0)
    write_from = tl.load(at + 3 * layout_stride, mask=inside, other=0)
    position = tl.where(padding, 0, start + (index - first))
    token = tl.load(token_pool_ptr + seat * pool_stride + position, mask=inside, other=0)
    draft = tl.load(drafts_ptr + index, mask=inside, other=-1)
    token = tl.where(draft >= 0, draft, token)
    tl.store(token_pool_ptr + seat * pool_stride + position, draft, mask=draft >= 0)
    tl.store(input_ids_ptr + index, token.to(tl.int64), mask=inside)
    tl.store(positions_ptr + index, position.to(tl.int64), mask=inside)
    if adapters_ptr is not None:
        adapter = tl.load(adapter_slots_ptr + seat, mask=inside, other=-1)
        tl.store(adapters_ptr + index, tl.where(padding, -1, adapter), mask=inside)
    entry = tables_ptr + seat * tables_stride + position // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        block = tl.load(entry + group * group_stride, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        slot = tl.where(padding | (position < write_from), -1, slot)
        tl.store(slots_ptr + group * slots_stride + index, slot, mask=inside)
    # Fields of rows.
    exists = index < num_rows
    at = layout_ptr + index
    start = tl.load(at + layout_stride, mask=exists, other=0)
    count = tl.load(at + 4 * layout_stride, mask=exists, other=0)
    first = tl.load(at + 2 * layout_stride, mask=exists, other=0)
    tl.store(context_len_ptr + index, start + count, mask=exists)
    tl.store(query_start_ptr + index, tl.where(exists, first, num_tokens), mask=index <= num_rows)


def expand_rows(
    layout: torch.Tensor,
    token_rows: torch.Tensor,
    drafts: torch.Tensor,
    token_pool: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    query_start: torch.Tensor,
    adapter_slots: torch.Tensor | None = None,
    adapters: torch.Tensor | None = None,
) -> None:
    """Fill `input_ids`, `positions` ([T] int64 each), `slots` [G, T] int64, `context_len` [R] and `query_start` [R + 1]
    (int32).

    layout: [5 or more, at least R] int32, by row of the step: seat, start (position of its first token), first (packed
    index of that token), write_from (first position whose K and V are written), count of tokens. token_rows: [T] int32,
    the row of each token, or -1 for padding, which gets position 0 of row 0's seat and slot -1. drafts: [T] int32, ids
    of tokens that are drafts, and -1 elsewhere. token_pool: [S, W] int32, token ids by seat and position; gets the
    drafts. tables: [G, S, B] int32, block tables by KV group and seat; block_size: a power of two. adapter_slots: [S]
    int32, by seat; fills `adapters` [T] int32, which is -1 for padding.

    A slot is block * block_size + offset, or -1 for positions below write_from. context_len is start + count, and
    query_start ends with T.
    """
    num_tokens, num_rows = token_rows.shape[0], context_len.shape[0]
    # The kernel relies on these numbers, while a slice of a buffer that is too small would silently be shorter.
    outputs = (input_ids, positions, *slots, query_start)
    sizes = [num_tokens] * (2 + len(tables)) + [num_rows + 1]
    assert [len(output) for output in outputs] == sizes, "an output has a wrong size"
    assert adapters is None or len(adapters) == num_tokens
    more = {} if adapters is None else {"adapter_slots_ptr": adapter_slots, "adapters_ptr": adapters}
    _expand_kernel[(cdiv(max(num_tokens, num_rows + 1), BLOCK_TOKENS),)](
        layout,
        token_rows,
        drafts,
        token_pool,
        tables,
        input_ids,
        positions,
        slots,
        context_len,
        query_start,
        layout.stride(0),
        token_pool.stride(0),
        tables.stride(1),
        tables.stride(0),
        slots.stride(0),
        num_tokens,
        num_rows,
        GROUPS=len(tables),
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK_TOKENS,
        num_warps=4,
        **more,
    )


def expand_rows_reference(
    layout: torch.Tensor,
    token_rows: torch.Tensor,
    drafts: torch.Tensor,
    token_pool: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    context_len: torch.Tensor,
    query_start: torch.Tensor,
    adapter_slots: torch.Tensor | None = None,
    adapters: torch.Tensor | None = None,
) -> None:
    num_tokens, num_rows = token_rows.shape[0], context_len.shape[0]
    fields = layout[:, :num_rows].long()
    padding, row = token_rows < 0, token_rows.long().clamp_min(0)
    packed = torch.arange(num_tokens, device=layout.device)
    seat = fields[SEAT, row]
    positions.copy_(torch.where(padding, 0, fields[START, row] + packed - fields[FIRST, row]))
    at = drafts >= 0
    token_pool[seat[at], positions[at]] = drafts[at]
    input_ids.copy_(token_pool[seat, positions])
    place = tables[:, seat, positions // block_size].long() * block_size + positions % block_size
    slots.copy_(torch.where(padding | (positions < fields[WRITE_FROM, row]), -1, place))
    if adapter_slots is not None and adapters is not None:
        adapters.copy_(torch.where(padding, -1, adapter_slots[seat]))
    context_len.copy_(fields[START] + fields[COUNT])
    query_start[:num_rows] = fields[FIRST]
    query_start[num_rows] = num_tokens
