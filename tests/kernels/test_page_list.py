"""Block lists against their reference: row borders, padding, tables that rows reach in any order."""

import random

import pytest
import torch

from roseinfer.kernels.page_list import PageList, list_pages, list_pages_reference


def check(context_lens: list[int], block_size: int, device: torch.device, spare: int = 0) -> None:
    rows = len(context_lens)
    counts = [-(-n // block_size) for n in context_lens]
    seats, width = rows + 3, max(counts) + 2
    tables = torch.randint(0, 2**31 - 1, (seats, width), dtype=torch.int32, device=device)
    table_rows = torch.randperm(seats, device=device)[:rows].int()
    context_len = torch.tensor(context_lens, dtype=torch.int32, device=device)
    listed, expected = (PageList.empty(rows, sum(counts), device) for _ in range(2))
    list_pages(listed, context_len, tables, table_rows, block_size, max(counts) + spare)
    list_pages_reference(expected, context_len, tables, table_rows, block_size, max(counts) + spare)
    assert expected.starts.tolist()[-1] == sum(counts)
    for name in ("starts", "last_tokens", "blocks"):
        assert torch.equal(getattr(listed, name), getattr(expected, name)), name


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_lengths_around_block_borders(block_size: int, device: torch.device) -> None:
    check([1, block_size - 1, block_size, block_size + 1, 3 * block_size, 1], block_size, device)


def test_rows_longer_than_one_program_copies(device: torch.device) -> None:
    check([16 * 600, 5, 16 * 256, 16 * 256 + 1], 16, device, spare=700)


def test_more_rows_than_are_counted_at_a_time(device: torch.device) -> None:
    rng = random.Random(0)
    check([rng.randint(1, 40) for _ in range(1030)], 16, device)


def test_one_row_of_one_token(device: torch.device) -> None:
    check([1], 16, device)


def test_what_lies_behind_the_blocks_is_left_alone(device: torch.device) -> None:
    """As in a captured graph, where the list is as long as it can ever become, and for fewer rows than it has room."""
    memory = PageList.empty(8, 100, device)
    for tensor in (memory.starts, memory.last_tokens, memory.blocks):
        tensor.fill_(-7)
    lens = torch.tensor([33, 1, 16], dtype=torch.int32, device=device)
    tables = torch.arange(40, dtype=torch.int32, device=device).view(4, 10)
    table_rows = torch.tensor([2, 0, 3], dtype=torch.int32, device=device)
    list_pages(memory.rows(3), lens, tables, table_rows, 16, longest=10)
    assert memory.starts.tolist() == [0, 3, 4, 5, -7, -7, -7, -7, -7]
    assert memory.last_tokens.tolist() == [1, 1, 16, -7, -7, -7, -7, -7]
    assert memory.blocks.tolist() == [20, 21, 22, 0, 30] + [-7] * 95
