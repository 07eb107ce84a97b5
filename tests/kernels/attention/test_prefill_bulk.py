"""Prompt attention by bulk copies: on a Hopper GPU against softmax over gathered K and V, else what a CPU can check."""

import pytest
import torch

from roseinfer.kernels.attention.prefill import PrefillConfig
from roseinfer.kernels.attention.prefill_bulk import BLOCK_M, BulkPages, bulk_supports, prefill_bulk
from roseinfer.kernels.attention.prefill_shares import IN_BULK, PARTS
from roseinfer.kernels.common.gluon_support import HAS_GLUON
from tests.helpers.paged import PagedCase, assert_near, paged_case, with_sinks
from tests.helpers.prefill import block_map, reference

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
TILES = PrefillConfig(BLOCK_M, 64, 8, 3)

needs_gluon = pytest.mark.skipif(not HAS_GLUON, reason="needs Triton with Gluon")
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def attend(case: PagedCase, programs: int | None = None, padding: int = 0) -> torch.Tensor:
    found = block_map(case, TILES)
    found[:, PARTS] = IN_BULK
    blocks = torch.from_numpy(found).to(case.q.device)
    blocks = torch.cat((blocks, blocks.new_full((padding, 4), -1)))
    case.out.fill_(float("nan"))
    where = (case.tables, case.table_rows, case.query_start, case.context_len)
    pages = BulkPages.of(case.k_cache, case.v_cache)
    block_size = case.k_cache.shape[1]
    prefill_bulk(case.q, pages, *where, case.out, blocks, case.scale, block_size, programs, case.sinks)
    return case.out


@needs_gluon
def test_pages_are_found_in_a_cache_of_several_layers(device) -> None:
    """The copy engine counts rows of all KV heads of a token, `block_rows` of them from block to block."""
    case = paged_case([(0, 40)], 8, 2, 64, 16, torch.bfloat16, device)
    pages = BulkPages.of(case.k_cache, case.v_cache)
    for found, cache in ((pages.k, case.k_cache), (pages.v, case.v_cache)):
        assert tuple(found.shape) == tuple(found.base.shape) and tuple(found.strides) == (128, 1)
        for block, token, head in ((0, 3, 1), (2, 15, 0), (cache.shape[0] - 1, 15, 1)):
            row = found.base[block * pages.block_rows + token, head * 64 : (head + 1) * 64]
            assert row.data_ptr() == cache[block, token, head].data_ptr()


def test_what_it_supports() -> None:
    """A GPU of another kind, and a CPU, take the other kernel."""
    shape = (32, 8, 128, 16, torch.bfloat16)
    assert bulk_supports(*shape, torch.device("cpu")) is False
    if HOPPER:
        device = torch.device("cuda")
        assert bulk_supports(*shape, device) and bulk_supports(12, 12, 64, 16, torch.bfloat16, device)
        assert not bulk_supports(28, 4, 128, 16, torch.bfloat16, device), "7 heads do not divide a tile"
        assert not bulk_supports(32, 8, 96, 16, torch.bfloat16, device)
        assert not bulk_supports(32, 8, 128, 1, torch.bfloat16, device), "nor do blocks of one token swizzle"
        assert not bulk_supports(32, 8, 128, 16, torch.float16, device)


@needs_hopper
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(32, 8, 128, 16), (16, 8, 128, 16), (12, 12, 64, 16), (8, 1, 128, 32), (4, 2, 64, 64), (64, 1, 128, 8)],
)
def test_every_shape(heads, kv_heads, head_dim, block_size, device) -> None:
    """Chunks that begin and end before, on and after borders of tiles, with NaN in all unused memory."""
    rows = [(0, 1), (0, 127), (0, 128), (3, 129), (127, 1), (128, 300), (1000, 65), (2000, 33), (0, 1024)]
    case = paged_case(rows, heads, kv_heads, head_dim, block_size, torch.bfloat16, device)
    assert_near(attend(case), reference(case))


@needs_hopper
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(64, 8, 64), (8, 8, 128)])
def test_sinks(heads, kv_heads, head_dim, device) -> None:
    rows = [(0, 1), (0, 128), (3, 129), (1000, 65), (0, 1024)]
    case = with_sinks(paged_case(rows, heads, kv_heads, head_dim, 16, torch.bfloat16, device))
    assert_near(attend(case), reference(case))


@needs_hopper
def test_any_number_of_programs_and_padded_maps(device) -> None:
    """A program's order of blocks does not change any bit of the results."""
    case = paged_case([(0, 700), (40, 65), (900, 130)], 32, 8, 128, 16, torch.bfloat16, device)
    expected = attend(case).clone()
    assert_near(expected, reference(case))
    for programs, padding in ((1, 0), (7, 3), (33, 40), (132, 100)):
        assert torch.equal(attend(case, programs, padding), expected)
