"""`decode_attention` over a `PagedCase`."""

import torch

from roseinfer.kernels.attention.decode import (
    DecodeWorkspace,
    decode_attention,
    decode_attention_reference,
    plan_decode,
)
from roseinfer.kernels.attention.decode_config import DecodeConfig
from tests.helpers.paged import PagedCase


def workspace_of(
    case: PagedCase, config: DecodeConfig, shares: int, max_rows: int = 20, window: int = 0
) -> DecodeWorkspace:
    heads, head_dim = case.q.shape[1:]
    kv_heads = case.k_cache.shape[2]
    processors = shares * kv_heads
    return DecodeWorkspace.allocate(
        config, max_rows, heads, kv_heads, head_dim, processors, case.q.device, window=window
    )


def attend(case: PagedCase, workspace: DecodeWorkspace, num_rows: int | None = None) -> torch.Tensor:
    plan_decode(case.context_len, len(case.context_len) if num_rows is None else num_rows, workspace)
    decode_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.table_rows,
        case.context_len,
        case.out,
        case.scale,
        workspace,
        case.kv_scales,
        case.sinks,
    )
    return case.out


def reference(case: PagedCase, window: int = 0) -> torch.Tensor:
    return decode_attention_reference(
        case.q,
        case.k_cache,
        case.v_cache,
        case.tables,
        case.table_rows,
        case.context_len,
        case.scale,
        window,
        case.kv_scales,
        sinks=case.sinks,
    )


def decodes(contexts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return rows of one query each, for `paged_case`."""
    return [(context - 1, 1) for context in contexts]
