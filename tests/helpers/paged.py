"""Queries over a paged KV cache drawn at random, for tests of attention kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from roseinfer.kernels.common.fp8_codes import CODES
from tests.helpers.attention import store_of
from tests.helpers.batches import Blocks

LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class PagedCase:
    """The arguments that attention kernels share. `out` is poisoned, as are all parts of the cache without a token."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    table_rows: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor
    out: torch.Tensor
    scale: float
    kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None
    sinks: torch.Tensor | None = None


def with_sinks(case: PagedCase) -> PagedCase:
    """Return the case with sinks of which some take nothing, and some nearly all."""
    return replace(case, sinks=torch.linspace(-6, 9, case.q.shape[1], device=case.q.device))


def hide_before(case: PagedCase, positions: Sequence[int]) -> None:
    """Poison the blocks of each row that end before its position, as if they were another sequence's by now."""
    for row, position in enumerate(positions):
        hidden = case.tables[case.table_rows[row], : max(0, position) // case.k_cache.shape[1]].long()
        for cache in (case.k_cache, case.v_cache):
            cache[hidden] = float("nan")


def paged_case(
    rows: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    codes: bool = False,
) -> PagedCase:
    """Return a random case. rows: position of the first query, and count of queries, of each row.

    Queries are in packed projections, block tables in more seats than there are rows, K and V in one of several layers.
    Unused entries of a block table are invalid. codes: store K and V in FP8, with a scale for each KV head.
    """
    contexts = [start + count for start, count in rows]
    num_blocks = sum(-(-context // block_size) for context in contexts) + 2
    store = store_of(num_blocks, LAYERS, block_size, kv_heads, head_dim, CODES if codes else dtype, device)
    store.data.fill_(float("nan"))
    caches = store.layer(LAYER)
    blocks = Blocks(num_blocks, block_size)
    table_rows = torch.randperm(len(rows) + 2)[: len(rows)].to(device, torch.int32)
    width = max(-(-context // block_size) for context in contexts) + 1
    tables = torch.full((len(rows) + 2, width), -(10**6), dtype=torch.int32, device=device)
    for table_row, context in zip(table_rows.tolist(), contexts, strict=True):
        table = torch.tensor(blocks.table(context), device=device)
        tables[table_row, : len(table)] = table
        position = torch.arange(context, device=device)
        at = table[position // block_size], position % block_size
        for cache in caches:
            numbers = torch.randn(context, kv_heads, head_dim, device=device).to(cache.dtype)
            if codes:
                cache.view(torch.uint8)[at] = numbers.view(torch.uint8)
            else:
                cache[at] = numbers
    starts = list(accumulate((count for _, count in rows), initial=0))
    qkv = torch.randn(starts[-1], heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    q = qkv[:, :heads]
    return PagedCase(
        q,
        *caches,
        tables,
        table_rows,
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.full(q.shape, float("nan"), dtype=dtype, device=device),
        head_dim**-0.5,
        tuple(0.5 + torch.rand(kv_heads, device=device) for _ in range(2)) if codes else None,
    )


def assert_near(out: torch.Tensor, expected: torch.Tensor, roundings: int = 1) -> None:
    """Check equality up to some roundings to their dtype, by the norm of the difference; NaN never passes."""
    limit = roundings * {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[out.dtype]
    error = (out.double() - expected.double()).norm() / expected.double().norm()
    assert error < limit, f"relative error {error:.2e}"
