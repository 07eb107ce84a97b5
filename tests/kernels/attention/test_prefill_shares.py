"""Contexts of prompt chunks in parts: which are divided, and that parts add up to the undivided results."""

import random

import numpy as np
import pytest
import torch

from roseinfer.kernels.attention import prefill_shares
from roseinfer.kernels.attention.prefill import PrefillConfig, choose_prefill_config, queries_per_block
from roseinfer.kernels.attention.prefill_shares import Division, map_blocks, part_count
from tests.helpers.cases import cases
from tests.helpers.paged import PagedCase, assert_near, paged_case, with_sinks
from tests.helpers.prefill import attend, block_map, reference

SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
H200 = Division.of(132, 8, 64)
QWEN = 16  # queries of a block of 64 (query, head) pairs in groups of 4 heads

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def cut(case: PagedCase, config: PrefillConfig, parts: list[int]) -> np.ndarray:
    """Return the map with its blocks in as many parts as the list says in turn."""
    whole = block_map(case, config)
    found = []
    for number, (row, first, _, _) in enumerate(whole.tolist()):
        count = parts[number % len(parts)]
        found += [(row, first, part, count) for part in range(count)]
    return np.array(found, dtype=np.int32)


# --- which contexts are divided -----------------------------------------------------------------------------------
def test_the_map_of_no_rows() -> None:
    assert map_blocks(3, [], [], 4).shape == (0, 4)
    assert map_blocks(3, [], [], 4, H200).shape == (0, 4)


@pytest.mark.parametrize("division", [None, Division(16, 32, 16)])
def test_the_map_has_every_query_once_and_long_contexts_first(division) -> None:
    counts, contexts = [5, 12, 1, 8], [5, 1112, 31, 8]
    entries = map_blocks(2, counts, contexts, 4, division).tolist()
    blocks = [(row, first) for row, first, part, _ in entries if part == 0]
    queries = [(row, query) for row, first in blocks for query in range(first, min(first + 4, counts[row - 2]))]
    assert sorted(queries) == [(row + 2, query) for row, count in enumerate(counts) for query in range(count)]
    assert all(first % 4 == 0 for _, first in blocks)
    if division is None:
        ends = [contexts[row - 2] - counts[row - 2] + first for row, first in blocks]
        assert ends == sorted(ends, reverse=True)
        assert all(entry[2:] == [0, 1] for entry in entries)
    else:
        assert entries[0][3] > 1


def test_the_parts_of_a_block_stand_side_by_side_and_before_undivided_ones() -> None:
    entries = map_blocks(0, [40, 20, 90, 16], [28_040, 20, 4_090, 9_000], QWEN, H200).tolist()
    divided = [entry for entry in entries if entry[3] > 1]
    assert entries[: len(divided)] == divided and 2 < len(divided) <= H200.slots
    at = 0
    while at < len(divided):
        row, first, _, parts = divided[at]
        assert divided[at : at + parts] == [[row, first, part, parts] for part in range(parts)]
        at += parts
    parts = {row: parts for row, _, _, parts in entries}
    assert parts[0] > parts[3] > parts[1] == 1 and parts[0] == pytest.approx(3 * parts[3], abs=2)


def test_a_lone_block_is_divided_among_all_multiprocessors() -> None:
    entries = map_blocks(0, [16], [28_000], QWEN, H200)
    assert 0.9 * H200.programs <= len(entries) <= H200.programs


@pytest.mark.parametrize(("count", "before"), [(1024, 0), (1024, 28_000), (512, 28_000), (16, 0), (100, 300)])
def test_short_contexts_and_those_of_a_full_gpu_are_not_divided(count, before) -> None:
    assert (map_blocks(0, [count], [before + count], QWEN, H200)[:, 3] == 1).all()
    assert map_blocks(0, [count], [before + count], QWEN, H200).tolist() == (
        map_blocks(0, [count], [before + count], QWEN).tolist()
    )


def test_a_long_context_among_many_short_ones_is_divided() -> None:
    """More blocks than the GPU runs at once, of which one lasts longer than all others together."""
    counts = [16] * 40 + [16]
    entries = map_blocks(0, counts, [16] * 40 + [28_016], QWEN, H200)
    divided = entries[entries[:, 3] > 1]
    assert set(divided[:, 0].tolist()) == {40} and len(divided) > 10


def test_no_more_parts_than_there_is_room_for() -> None:
    rng = random.Random(0)
    for _ in range(300):
        counts = [rng.choice((2, 16, 60, 300)) for _ in range(rng.randint(1, 5))]
        contexts = [count + rng.choice((0, 1000, 8000, 30_000)) for count in counts]
        whole = map_blocks(0, counts, contexts, QWEN)
        found = map_blocks(0, counts, contexts, QWEN, H200)
        assert (found[:, 3] > 1).sum() <= H200.slots
        room = len(whole) + rng.randint(0, H200.slots)
        assert len(map_blocks(0, counts, contexts, QWEN, H200, room)) <= room


def test_as_many_parts_as_take_the_least_time() -> None:
    """Programs of one KV head on 132 multiprocessors: 16 have one to themselves, 33 run at once."""
    assert part_count(450, 450, 1, 33, 99) in (32, 33)  # one round
    assert part_count(450, 16 * 450, 16, 33, 99) == 2  # two on a multiprocessor are faster than one after another
    assert part_count(450, 17 * 450, 17, 33, 99) == 3  # two rounds of 150 tiles are shorter than two of 225
    assert part_count(450, 33 * 450, 33, 33, 99) == 1
    assert part_count(450, 450, 1, 33, 7) == 7
    assert part_count(9, 9, 1, 33, 99) == part_count(33, 17 * 33, 17, 33, 99) == 1  # merging would take longer


def test_a_window_leaves_less_to_divide() -> None:
    windowed = Division.of(132, 8, 64, window=8192)
    few, many = (map_blocks(0, [16], [28_000], QWEN, division) for division in (windowed, H200))
    assert 1 < len(few) < len(many)
    assert len(map_blocks(0, [16], [28_000], QWEN, Division.of(132, 8, 64, window=128))) == 1


# --- results --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(2, 2, 64, 16), (4, 2, 80, 256), (7, 1, 96, 1), (16, 1, 8, 16), (4, 1, 256, 16)],
)
def test_every_shape(heads, kv_heads, head_dim, block_size, device) -> None:
    case = paged_case([(70, 9), (0, 17), (60, 1)], heads, kv_heads, head_dim, block_size, torch.float32, device)
    blocks = cut(case, SMALL, [3, 1, 2, 5])
    assert_near(attend(case, SMALL, blocks, slots=len(blocks)), reference(case))


@pytest.mark.parametrize("parts", [2, 19])
def test_more_parts_than_tiles_and_a_merge_in_several_turns(parts, device) -> None:
    case = paged_case([(90, 7)], 4, 2, 16, 16, torch.float32, device)
    blocks = cut(case, SMALL, [parts])
    assert_near(attend(case, SMALL, blocks, slots=len(blocks)), reference(case))


@pytest.mark.filterwarnings("ignore:invalid value")  # rows that only pad a tile are not stored
@cases(("window", "block_m", "block_n"), [(17, 16, 64), (33, 64, 16)], exhaustive=[(1, 16, 16), (60, 16, 16)])
def test_windows(window, block_m, block_n, device) -> None:
    config = PrefillConfig(block_m, block_n, 4, 2)
    case = paged_case([(0, 33), (40, 3), (70, 20), (15, 1)], 4, 2, 16, 16, torch.float32, device)
    blocks = cut(case, config, [2, 5, 1, 3])
    assert_near(attend(case, config, blocks, window, slots=len(blocks)), reference(case, window))


@pytest.mark.filterwarnings("ignore:invalid value")  # rows that only pad a tile are not stored
@pytest.mark.parametrize("window", [0, 128])
def test_sinks(window, device) -> None:
    """The parts of a block add its sinks once."""
    case = with_sinks(paged_case([(0, 5), (126, 40), (300, 20)], 6, 2, 16, 16, torch.float32, device))
    config = PrefillConfig(32, 16, 4, 2)
    blocks = cut(case, config, [3, 1, 7])
    assert_near(attend(case, config, blocks, window, slots=len(blocks)), reference(case, window))


def test_a_map_may_be_padded_and_the_workspace_is_of_any_size(device) -> None:
    case = paged_case([(80, 9), (5, 20)], 4, 2, 16, 16, torch.float32, device)
    blocks = cut(case, SMALL, [4, 3, 1])
    padded = np.full((len(blocks) + 5, 4), -1, dtype=np.int32)
    padded[: len(blocks)] = blocks
    for slots in (len(blocks), len(blocks) + 9):
        case.out.fill_(float("nan"))
        assert_near(attend(case, SMALL, padded, slots=slots), reference(case))


def test_a_map_that_divides_nothing_gives_the_very_same(device) -> None:
    case = paged_case([(80, 9), (5, 20)], 4, 2, 16, 16, torch.float32, device)
    blocks = block_map(case, SMALL)
    one = attend(case, SMALL, blocks).clone()
    case.out.fill_(float("nan"))
    assert torch.equal(attend(case, SMALL, blocks, slots=8), one)


def test_a_row_does_not_depend_on_hidden_tokens(device) -> None:
    case = paged_case([(43, 18), (0, 5)], 2, 1, 16, 16, torch.float32, device)
    for cache in (case.k_cache, case.v_cache):
        cache.nan_to_num_(nan=float("inf"))
    blocks = cut(case, SMALL, [3])
    assert_near(attend(case, SMALL, blocks, slots=len(blocks)), reference(case))


def test_random_chunks_divided_as_planned(device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_shares, "MIN_DIVIDED_TILES", 2)
    rng = random.Random(0)
    divided = 0
    for _ in range(3):
        rows = [(rng.choice((0, rng.randint(300, 500))), rng.randint(1, 8)) for _ in range(rng.randint(1, 2))]
        case = paged_case(rows, 4, 2, 16, 32, torch.float32, device)
        division = Division(8, 16, SMALL.block_n)
        blocks = block_map(case, SMALL, division=division)
        divided += int(blocks[0, 3] > 1)
        assert_near(attend(case, SMALL, blocks, slots=division.slots), reference(case))
    assert divided


@needs_gpu
def test_bfloat16_with_long_prompts(device) -> None:
    rows = [(9_000, 30), (1024, 100), (20_000, 65), (0, 65), (4000, 3)]
    for heads, kv_heads, head_dim in ((32, 8, 128), (12, 12, 64), (28, 4, 128)):
        case = paged_case(rows, heads, kv_heads, head_dim, 16, torch.bfloat16, device)
        config = choose_prefill_config(1, heads // kv_heads, head_dim, torch.bfloat16)
        division = Division.of(132, kv_heads, config.block_n)
        blocks = block_map(case, config, division=division)
        assert blocks[0, 3] > 1 and queries_per_block(config, heads // kv_heads) > 1
        assert_near(attend(case, config, blocks, slots=division.slots), reference(case))
