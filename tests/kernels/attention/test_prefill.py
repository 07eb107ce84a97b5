"""Prefill attention against softmax over gathered K and V: on a GPU where there is one, else interpreted."""

import random

import numpy as np
import pytest
import torch

from roseinfer.kernels.attention.prefill import (
    MAX_SMALL_STEP_TOKENS,
    PrefillConfig,
    choose_prefill_config,
    queries_per_block,
)
from roseinfer.kernels.attention.prefill_shares import IN_BULK, PARTS, ROW
from tests.helpers.cases import cases
from tests.helpers.paged import assert_near, hide_before, paged_case, with_sinks
from tests.helpers.prefill import attend, block_map, reference

SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
# Position of the first query, count of queries: whole prompts, chunks after a prefix, single tokens, borders of tiles.
ROWS = [(0, 1), (0, 5), (3, 17), (15, 1), (16, 16), (0, 33), (31, 2), (40, 3)]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@cases(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(2, 2, 64, 16), (4, 2, 80, 256), (7, 1, 96, 1), (16, 1, 8, 16)],
    exhaustive=[(2, 2, 64, 1), (8, 2, 128, 16), (8, 1, 256, 32)],
)
def test_every_shape(heads, kv_heads, head_dim, block_size, device) -> None:
    case = paged_case(ROWS[:6], heads, kv_heads, head_dim, block_size, torch.float32, device)
    assert_near(attend(case, SMALL, block_map(case, SMALL)), reference(case))


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (32, 16), (16, 64), (64, 32)])
def test_every_kind_of_tile(block_m, block_n, device) -> None:
    """Blocks of queries that end before, on and after a border of key tiles."""
    config = PrefillConfig(block_m, block_n, 4, 2)
    case = paged_case(ROWS, 4, 2, 16, 16, torch.float16, device)
    assert_near(attend(case, config, block_map(case, config)), reference(case))


@pytest.mark.filterwarnings("ignore:invalid value")  # rows that only pad a tile are not stored
@cases(
    ("window", "block_m", "block_n", "block_size"),
    [(1, 16, 16, 16), (16, 16, 16, 16), (17, 16, 64, 32), (33, 64, 16, 1)],
    exhaustive=[(7, 64, 16, 1), (33, 16, 64, 32), (60, 16, 16, 16)],
)
def test_windows(window, block_m, block_n, block_size, device) -> None:
    """Windows narrower and wider than tiles, chunks that begin before, in and after the first window."""
    config = PrefillConfig(block_m, block_n, 4, 2)
    case = paged_case([*ROWS[:7], (70, 40)], 4, 2, 16, block_size, torch.float32, device)
    assert_near(attend(case, config, block_map(case, config), window), reference(case, window))


@pytest.mark.filterwarnings("ignore:invalid value")  # rows that only pad a tile are not stored
@pytest.mark.parametrize("window", [0, 128])
def test_sinks(window, device) -> None:
    case = with_sinks(paged_case([(0, 5), (0, 140), (126, 4), (300, 20)], 6, 2, 16, 16, torch.float32, device))
    config = PrefillConfig(32, 16, 4, 2)
    assert_near(attend(case, config, block_map(case, config), window), reference(case, window))


def test_tokens_before_a_window_are_not_read(device) -> None:
    case = paged_case([(70, 18), (33, 5), (0, 40)], 2, 1, 16, 4, torch.float32, device)
    expected = reference(case, 10)
    hide_before(case, [70 - 9, 33 - 9, 0])
    assert_near(attend(case, SMALL, block_map(case, SMALL), 10), expected)


def test_random_chunks(device) -> None:
    rng = random.Random(0)
    for _ in range(4):
        rows = [(rng.choice((0, rng.randint(1, 60))), rng.randint(1, 40)) for _ in range(rng.randint(1, 4))]
        case = paged_case(rows, 6, 2, 16, 32, torch.float32, device)
        assert_near(attend(case, SMALL, block_map(case, SMALL)), reference(case))


def test_rows_before_the_first_are_left_alone(device) -> None:
    case = paged_case([(8, 1), (19, 1), (4, 9), (0, 20)], 4, 2, 16, 16, torch.float32, device)
    out = attend(case, SMALL, block_map(case, SMALL, first_row=2))
    assert out[:2].isnan().all()
    assert_near(out[2:], reference(case)[2:])


def test_a_map_may_be_padded(device) -> None:
    case = paged_case([(0, 9), (5, 20)], 4, 2, 16, 16, torch.float32, device)
    blocks = block_map(case, SMALL)
    padded = np.full((len(blocks) + 3, 4), -1, dtype=np.int32)
    padded[1:-2] = blocks
    assert_near(attend(case, SMALL, padded), reference(case))


def test_blocks_for_the_other_kernel_are_passed_over(device) -> None:
    case = paged_case([(0, 9), (5, 20)], 4, 2, 16, 16, torch.float16, device)
    blocks = block_map(case, SMALL)
    blocks[blocks[:, ROW] == 1, PARTS] = IN_BULK
    out = attend(case, SMALL, blocks)
    assert out[9:].isnan().all()
    assert_near(out[:9], reference(case)[:9])


def test_a_row_does_not_depend_on_hidden_tokens(device) -> None:
    """Infinities are included, since they would survive a multiplication by a weight of zero."""
    case = paged_case([(3, 18), (0, 5)], 2, 1, 16, 16, torch.float32, device)
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=float("inf"))
    assert_near(attend(case, SMALL, block_map(case, SMALL)), reference(case))


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [(1, 64, torch.float16), (4, 128, torch.float16), (4, 128, torch.float32), (2, 256, torch.float16)],
)
def test_chosen_configs_fit(group, head_dim, dtype, device) -> None:
    case = paged_case([(70, 70), (0, 130)], group, 1, head_dim, 16, dtype, device)
    for config in {choose_prefill_config(tokens, group, head_dim, dtype) for tokens in (1, 4096)}:
        case.out.fill_(float("nan"))
        assert_near(attend(case, config, block_map(case, config)), reference(case))


def test_tiles_grow_with_the_step_and_hold_any_group() -> None:
    tiles = [
        choose_prefill_config(tokens, 4, 128, torch.bfloat16).block_m
        for tokens in (1, MAX_SMALL_STEP_TOKENS, MAX_SMALL_STEP_TOKENS + 1)
    ]
    assert tiles[0] == tiles[1] < tiles[2]
    for group in (1, 71, 128):
        for tokens in (1, 4096):
            assert queries_per_block(choose_prefill_config(tokens, group, 64, torch.bfloat16), group) >= 1


@needs_gpu
def test_bfloat16_with_long_prompts(device) -> None:
    rows = [(0, 2000), (1024, 1000), (1777, 65), (0, 65), (4000, 3)]
    for heads, kv_heads, head_dim in ((32, 8, 128), (12, 12, 64), (28, 4, 128)):
        case = paged_case(rows, heads, kv_heads, head_dim, 16, torch.bfloat16, device)
        for tokens in (1, 4096):
            config = choose_prefill_config(tokens, heads // kv_heads, head_dim, torch.bfloat16)
            case.out.fill_(float("nan"))
            assert_near(attend(case, config, block_map(case, config)), reference(case))
