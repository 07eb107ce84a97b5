"""K and V in FP8, widened for the kernel that takes 16 bits: on a GPU where there is one, else interpreted."""

import numpy as np
import pytest
import torch

from roseinfer.kernels.attention.paged import gathered
from roseinfer.kernels.attention.prefill import PrefillConfig
from roseinfer.kernels.attention.prefill_bulk import BLOCK_M, BLOCK_N, prefill_bulk
from roseinfer.kernels.attention.prefill_shares import IN_BULK, PARTS
from roseinfer.kernels.common.gluon_support import HAS_GLUON
from tests.helpers.paged import PagedCase, assert_near, paged_case
from tests.helpers.prefill import block_map, reference
from tests.kernels.attention.test_prefill_bulk import needs_hopper

if not HAS_GLUON:
    pytest.skip("needs Triton with Gluon", allow_module_level=True)

from roseinfer.kernels.attention.wide_contexts import WideContexts, widen_contexts

TILES = PrefillConfig(BLOCK_M, 128, 8, 3)
# Contexts that end before, on and after a page of the scratch; chunks of several blocks after cached tokens.
ROWS = [(0, 1), (3, 130), (200, 9), (64, 64), (0, 65)]


def scratch(case: PagedCase, tokens: int) -> WideContexts:
    wide = WideContexts.allocate(tokens, *case.k_cache.shape[2:], case.q.dtype, case.q.device)
    for tensor in (wide.keys, wide.values):
        tensor.fill_(float("nan"))
    return wide


def widened(case: PagedCase, wide: WideContexts, first_row: int = 0, padding: int = 0) -> torch.Tensor:
    """Return the placed map, on the device, with padding."""
    found = block_map(case, TILES, first_row)
    assert wide.place(found, first_row, case.context_len.tolist()[first_row:])
    blocks = torch.from_numpy(found).to(case.q.device)
    blocks = torch.cat((blocks, blocks.new_full((padding, 4), -1)))
    group = case.q.shape[1] // case.k_cache.shape[2]
    where = (case.tables, case.table_rows, case.query_start, case.context_len)
    assert case.kv_scales is not None
    widen_contexts(case.k_cache, case.v_cache, case.kv_scales, *where, blocks, group, wide)
    return blocks


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "first_row"),
    [(8, 2, 64, 16, 0), (3, 3, 16, 1, 2), (4, 1, 128, 64, 1)],
)
def test_contexts_lie_one_behind_the_other(heads, kv_heads, head_dim, block_size, first_row, device) -> None:
    case = paged_case(ROWS, heads, kv_heads, head_dim, block_size, torch.bfloat16, device, codes=True)
    wide = scratch(case, 2048)
    widened(case, wide, first_row, padding=3)
    page = 0
    for row, context in enumerate(case.context_len.tolist()[first_row:], start=first_row):
        pages = slice(page, page + -(-context // BLOCK_N))
        parts = (wide.keys, case.k_cache, case.kv_scales[0]), (wide.values, case.v_cache, case.kv_scales[1])
        for found, cache, scales in parts:
            expected = gathered(cache, case.tables[case.table_rows[row]], context, kv_heads, scales)
            # The interpreter truncates where a GPU rounds.
            torch.testing.assert_close(found[pages].flatten(0, 1)[:context].float(), expected, rtol=2**-7, atol=0)
        page = pages.stop
    assert wide.keys[page:].isnan().all() and wide.values[page:].isnan().all()


def test_contexts_that_do_not_fit_are_left_to_the_other_kernel(device) -> None:
    case = paged_case(ROWS, 8, 2, 64, 16, torch.bfloat16, device, codes=True)
    pages = sum(-(-context // BLOCK_N) for context in case.context_len.tolist())
    before = block_map(case, TILES)
    for room, fits in ((pages, True), (pages - 1, False)):
        found = before.copy()
        assert scratch(case, room * BLOCK_N).place(found, 0, case.context_len.tolist()) == fits
        assert (found[:, PARTS] == IN_BULK).all() if fits else np.array_equal(found, before)


@needs_hopper
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (12, 12, 64)])
def test_attention_over_widened_contexts(heads, kv_heads, head_dim, device) -> None:
    rows = [*ROWS, (127, 1), (1000, 65), (2000, 33), (0, 1024)]
    case = paged_case(rows, heads, kv_heads, head_dim, 16, torch.bfloat16, device, codes=True)
    wide = scratch(case, 8192)
    blocks = widened(case, wide, padding=5)
    case.out.fill_(float("nan"))
    where = (case.tables, case.table_rows, case.query_start, case.context_len)
    prefill_bulk(case.q, wide.pages, *where, case.out, blocks, case.scale, wide.page, in_order=True)
    assert_near(case.out, reference(case))
