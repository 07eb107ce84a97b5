"""Decode attention against softmax over gathered K and V: on a GPU where there is one, else interpreted."""

import random

import pytest
import torch

from roseinfer.kernels.attention.decode import plan_decode
from roseinfer.kernels.attention.decode_config import ELEMENTWISE, MATRIX, TOKENS, DecodeConfig, choose_decode_config
from roseinfer.kernels.common.triton_support import cdiv
from tests.helpers.cases import cases, each_value
from tests.helpers.decode import attend, decodes, reference, workspace_of
from tests.helpers.paged import PagedCase, assert_near, hide_before, paged_case, with_sinks

TILE = 16
BORDERS = (1, 15, 16, 17, 33, 31, 32, 64, 65)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def config_of(form: int, *, tile: int = TILE, least_tiles: int = 1) -> DecodeConfig:
    return DecodeConfig(form, tile, 4, 2, 1, least_tiles)


@cases(
    ("form", "heads", "kv_heads", "head_dim", "block_size", "shares"),
    [
        (ELEMENTWISE, 2, 2, 80, 1, 3),
        (ELEMENTWISE, 1, 1, 128, 256, 2),
        (MATRIX, 4, 2, 80, 256, 2),
        (MATRIX, 7, 1, 96, 1, 3),
        (MATRIX, 17, 1, 8, 16, 5),
    ],
    exhaustive=[
        (ELEMENTWISE, 3, 3, 64, 16, 5),
        (MATRIX, 2, 2, 64, 16, 3),
        (MATRIX, 8, 2, 128, 16, 5),
        (MATRIX, 16, 1, 256, 32, 2),
    ],
)
def test_every_shape(form, heads, kv_heads, head_dim, block_size, shares, device) -> None:
    case = paged_case(decodes(BORDERS), heads, kv_heads, head_dim, block_size, torch.float32, device)
    workspace = workspace_of(case, config_of(form), shares)
    assert_near(attend(case, workspace), reference(case))


@each_value(form=[ELEMENTWISE, MATRIX], shares=[2, 7, 40])
def test_any_number_of_shares(form, shares, device) -> None:
    heads = 2 if form == ELEMENTWISE else 4
    for contexts in ((100,), (1,), (16, 16), (5, 90, 1, 1, 40, 17)):
        case = paged_case(decodes(contexts), heads, 2, 16, 16, torch.float16, device)
        assert_near(attend(case, workspace_of(case, config_of(form), shares)), reference(case))


def test_one_workspace_serves_one_batch_after_another(device) -> None:
    rng = random.Random(0)
    workspace = None
    for _ in range(6):
        contexts = tuple(rng.choice((1, rng.randint(1, 20), rng.randint(20, 120))) for _ in range(rng.randint(1, 12)))
        case = paged_case(decodes(contexts), 4, 2, 16, 32, torch.float32, device)
        workspace = workspace or workspace_of(case, config_of(MATRIX), 4)
        assert_near(attend(case, workspace), reference(case))
        assert not workspace.arrived.any(), "counters are left as they were found"


def test_rows_that_are_not_planned_are_left_alone(device) -> None:
    case = paged_case(decodes((20, 35, 7)), 4, 2, 16, 16, torch.float32, device)
    out = attend(case, workspace_of(case, config_of(MATRIX), 3), num_rows=2)
    assert_near(out[:2], reference(case)[:2])
    assert out[2].isnan().all()


def test_rows_of_no_context_are_passed_over(device) -> None:
    case = paged_case(decodes((20, 35, 7, 9)), 4, 2, 16, 16, torch.float32, device)
    expected = reference(case)
    case.context_len[2:] = 0
    workspace = workspace_of(case, config_of(MATRIX), 3)
    out = attend(case, workspace)
    assert_near(out[:2], expected[:2])
    assert out[2:].isnan().all()
    case.context_len.zero_()
    out.fill_(float("nan"))
    assert attend(case, workspace).isnan().all()


def test_a_row_does_not_depend_on_hidden_tokens(device) -> None:
    """Infinities are included, since they would survive a multiplication by a weight of zero."""
    case = paged_case(decodes((21, 40)), 2, 1, 16, 16, torch.float32, device)
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=float("inf"))
    assert_near(attend(case, workspace_of(case, config_of(MATRIX), 2)), reference(case))


@each_value(form=[ELEMENTWISE, MATRIX], size=[(1, 16), (16, 16), (17, 1), (40, 16)])
def test_windows(form, size, device) -> None:
    """Contexts shorter than the window, as long and longer; windows that begin within, before and on a tile."""
    window, block_size = size
    heads = 2 if form == ELEMENTWISE else 4
    contexts = tuple(sorted({1, 2, 16, 17, 64, 90, window, window + 1, window + 16} - {1000, 1001, 1016}))
    case = paged_case(decodes(contexts), heads, 2, 16, block_size, torch.float32, device)
    for shares in (1, 3, 7):
        case.out.fill_(float("nan"))
        workspace = workspace_of(case, config_of(form), shares, window=window)
        assert_near(attend(case, workspace), reference(case, window))
        assert not workspace.arrived.any()


@each_value(form=[ELEMENTWISE, MATRIX, TOKENS], window=[0, 128], codes=[False, True], shares=[1, 7, 40])
def test_sinks(form, window, codes, shares, device) -> None:
    """A row's parts add its sinks once."""
    heads = 2 if form == ELEMENTWISE else 8
    if form == ELEMENTWISE and codes:
        pytest.skip("that form takes no codes")
    case = paged_case(decodes((1, 127, 128, 129, 300)), heads, 2, 16, 16, torch.float32, device, codes=codes)
    case = with_sinks(case)
    workspace = workspace_of(case, config_of(form), shares, window=window)
    assert_near(attend(case, workspace), reference(case, window))


@pytest.mark.parametrize("form", [ELEMENTWISE, MATRIX])
def test_tokens_before_a_window_are_not_read(form, device) -> None:
    case = paged_case(decodes((70, 33, 40)), 2, 2, 16, 4, torch.float32, device)
    expected = reference(case, 10)
    hide_before(case, [context - 10 for context in case.context_len.tolist()])
    assert_near(attend(case, workspace_of(case, config_of(form), 2, window=10)), expected)


def test_a_windows_plan_has_only_its_tiles(device) -> None:
    contexts = (200, 10, 16, 17, 33)
    case = paged_case(decodes(contexts), 2, 2, 16, 16, torch.float32, device)
    workspace = workspace_of(case, config_of(ELEMENTWISE), 1, window=16)
    plan_decode(case.context_len, len(contexts), workspace)
    assert workspace.work.tolist() == [[0, 0, 2 + 1 + 1 + 2 + 2, 5]]


@pytest.mark.parametrize("least_tiles", [1, 3])
def test_the_plan_covers_every_tile_once(least_tiles, device) -> None:
    contexts = (1, 40, 16, 200, 17, 3)
    case = paged_case(decodes(contexts), 2, 2, 16, 16, torch.float32, device)
    workspace = workspace_of(case, config_of(ELEMENTWISE, least_tiles=least_tiles), 7)
    plan_decode(case.context_len, len(contexts), workspace)
    tiles = [(row, tile) for row, context in enumerate(contexts) for tile in range(cdiv(context, TILE))]
    size = max(cdiv(len(tiles), 7), least_tiles)
    owners: dict[int, list[int]] = {row: [] for row in range(len(contexts))}
    for share, (row, tile, count, rows) in enumerate(workspace.work.tolist()):
        own = tiles[share * size : (share + 1) * size]
        assert count == len(own) and rows == len({r for r, _ in own})
        if own:
            assert (row, tile) == own[0]
        for r in {r for r, _ in own}:
            owners[r].append(share)
    for row, (slot, parts) in enumerate(workspace.spans.tolist()[: len(contexts)]):
        begins_share = tiles.index((row, 0)) % size == 0
        assert parts == len(owners[row]) and slot == 2 * owners[row][0] + (not begins_share)


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [
        (1, 64, torch.float16),
        (1, 128, torch.float16),
        (1, 128, torch.float32),
        (2, 64, torch.float16),
        (8, 256, torch.float16),
        (8, 256, torch.float32),
    ],
)
def test_chosen_configs_fit(group, head_dim, dtype, device) -> None:
    config = choose_decode_config(group, head_dim, dtype)
    case = paged_case(decodes((1, 70, 130)), group, 1, head_dim, 16, dtype, device)
    assert_near(attend(case, workspace_of(case, config, 2)), reference(case))


@needs_gpu
def test_bfloat16_with_long_ragged_contexts(device) -> None:
    rng = random.Random(0)
    contexts = tuple(rng.randint(1, 3000) for _ in range(64))
    for heads, kv_heads, head_dim in ((32, 8, 128), (16, 8, 128), (12, 12, 64)):
        case = paged_case(decodes(contexts), heads, kv_heads, head_dim, 16, torch.bfloat16, device)
        config = choose_decode_config(heads // kv_heads, head_dim, torch.bfloat16)
        workspace = workspace_of(case, config, 132 * config.shares_per_processor // kv_heads, max_rows=64)
        for _ in range(3):
            assert_near(attend(case, workspace), reference(case))


@needs_gpu
def test_blocks_past_two_billion_elements(device) -> None:
    block_size, kv_heads, head_dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * kv_heads * head_dim) + 64
    cache = torch.empty((num_blocks, 2, block_size, kv_heads, head_dim), dtype=torch.bfloat16, device=device)
    case = paged_case(decodes((40,)), 16, kv_heads, head_dim, block_size, torch.bfloat16, device)
    tables = torch.tensor([[num_blocks - 1, 1, num_blocks - 2]], dtype=torch.int32, device=device)
    cache[tables[0].long()] = torch.randn(3, 2, block_size, kv_heads, head_dim, device=device).bfloat16()
    far = PagedCase(
        case.q, cache[:, 0], cache[:, 1], tables, torch.zeros_like(case.table_rows), case.query_start,
        case.context_len, case.out, case.scale,
    )  # fmt: skip
    config = choose_decode_config(2, head_dim, torch.bfloat16)
    assert_near(attend(far, workspace_of(far, config, 2)), reference(far))


@needs_gpu
def test_a_captured_graph_reads_lengths_from_the_device(device) -> None:
    case = paged_case(decodes((500, 900, 40, 1)), 8, 2, 128, 16, torch.bfloat16, device)
    config = choose_decode_config(4, 128, torch.bfloat16)
    workspace = workspace_of(case, config, 30)
    attend(case, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case, workspace)
    for lengths in ((500, 900, 40, 1), (1, 1, 1, 1), (17, 800, 33, 1)):
        case.context_len.copy_(torch.tensor(lengths))
        case.out.fill_(float("nan"))
        graph.replay()
        assert_near(case.out, reference(case))
