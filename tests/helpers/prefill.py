"""`prefill_attention` over a `PagedCase`, with contexts divided or not."""

import numpy as np
import torch

from roseinfer.kernels.attention.prefill import (
    PrefillConfig,
    prefill_attention,
    prefill_attention_reference,
    queries_per_block,
)
from roseinfer.kernels.attention.prefill_shares import Division, PrefillWorkspace, map_blocks, merge_parts
from tests.helpers.paged import PagedCase


def block_map(
    case: PagedCase, config: PrefillConfig, first_row: int = 0, division: Division | None = None
) -> np.ndarray:
    group = case.q.shape[1] // case.k_cache.shape[2]
    counts, contexts = case.query_start.diff().tolist()[first_row:], case.context_len.tolist()[first_row:]
    return map_blocks(first_row, counts, contexts, queries_per_block(config, group), division)


def attend(
    case: PagedCase, config: PrefillConfig, blocks: np.ndarray, window: int = 0, slots: int | None = None
) -> torch.Tensor:
    """Attend. slots: of a workspace for divided contexts; None for a kernel without one."""
    on_device = torch.from_numpy(blocks).to(case.q.device)
    kv_heads, head_dim = case.k_cache.shape[2:]
    parts = None
    if slots is not None:
        parts = PrefillWorkspace.allocate(slots, kv_heads, config.block_m, head_dim, case.q.device)
    prefill_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.table_rows,
        case.query_start,
        case.context_len,
        case.out,
        on_device,
        case.scale,
        config,
        window,
        parts,
        case.kv_scales,
        case.sinks,
    )
    if parts is not None:
        merge_parts(on_device, case.query_start, parts, case.out)
    return case.out


def reference(case: PagedCase, window: int = 0) -> torch.Tensor:
    return prefill_attention_reference(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.table_rows,
        case.query_start,
        case.context_len,
        case.scale,
        window,
        case.kv_scales,
        case.sinks,
    )
