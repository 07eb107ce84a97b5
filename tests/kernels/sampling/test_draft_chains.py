"""Kernels of chains of drafts against their references."""

from dataclasses import fields

import pytest
import torch

from roseinfer.kernels.sampling.draft_chains import (
    Chains,
    begin_chains,
    begin_chains_reference,
    end_draft_step,
    end_draft_step_reference,
    prepare_draft_step,
    prepare_draft_step_reference,
)

ROWS, MOST, HIDDEN, SEATS, BLOCK_SIZE, SPARE = 6, 3, 24, 9, 4, 8


def pair(device: torch.device) -> tuple[Chains, Chains]:
    ours, theirs = (Chains.allocate(ROWS, MOST, HIDDEN, 2, torch.float32, device) for _ in range(2))
    return ours, theirs


def assert_same(ours: Chains, theirs: Chains) -> None:
    for field in fields(Chains):
        torch.testing.assert_close(getattr(ours, field.name), getattr(theirs, field.name), equal_nan=True)


def begin(device: torch.device, drafts: list[list[int]], ahead: list[int], sampled: list[int]) -> tuple[Chains, Chains]:
    """Begin chains of rows with these drafts in seats 1, 2, ..., whose samples follow each other."""
    most, place, layout = max(map(len, drafts)), 0, []
    for row, own in enumerate(drafts):
        layout.append([row + 1, 2 * place, place, 10 * row + 5, ahead[row], *own, *[-1] * (most - len(own))])
        place += 1 + len(own)
    states = torch.randn(2 * place + MOST, HIDDEN, device=device)
    found = pair(device)
    lasts = [torch.zeros(SEATS, HIDDEN, device=device) for _ in found]
    rows = torch.tensor(layout, dtype=torch.int32, device=device)
    tokens = torch.tensor(sampled, device=device)
    begin_chains(rows, tokens, states, lasts[0], found[0])
    begin_chains_reference(rows, tokens, states, lasts[1], found[1])
    assert torch.equal(*lasts)
    return found


@pytest.mark.parametrize(
    ("drafts", "sampled", "next_positions", "tokens"),
    [
        ([[7, 8, 9], [5], []], [7, 8, 9, 3, 5, 6, 4], [8, 16, 25], [3, 6, 4]),  # all right
        ([[7, 8, 9], [5], []], [7, 1, 9, 3, 6, 6, 4], [6, 15, 25], [1, 6, 4]),
        ([[7, 8], [5, 6]], [-1, 8, 9, 5, -2, 7], [5, 16], [0, 0]),  # samples that failed
        ([[], []], [3, 4], [5, 15], [3, 4]),
    ],
)
def test_where_chains_begin(
    drafts: list[list[int]],
    sampled: list[int],
    next_positions: list[int],
    tokens: list[int],
    device: torch.device,
) -> None:
    ours, theirs = begin(device, drafts, [3, 1, 0][: len(drafts)], sampled)
    assert_same(ours, theirs)
    count = len(drafts)
    assert ours.next[:count].tolist() == next_positions and ours.tokens[:count].tolist() == tokens


def test_steps_until_all_chains_are_complete(device: torch.device) -> None:
    ours, theirs = begin(device, [[7, 8], [], [4]], [3, 2, 0], [7, 1, 2, 3, 4, 5])
    tables = torch.randint(50, (2, SEATS, 20), dtype=torch.int32, device=device)
    settings = torch.rand(SEATS, 3, dtype=torch.float64, device=device)
    settings[2, 0] = 0.0
    width, targets = 300, torch.randperm(1000, device=device)[:300]
    for step in range(3):
        for chains, prepare in ((ours, prepare_draft_step), (theirs, prepare_draft_step_reference)):
            prepare(chains, 5, tables, BLOCK_SIZE, SPARE)
        assert_same(ours, theirs)
        assert ours.rows[:5].tolist() == [1, 2 if step < 2 else SPARE, SPARE, SPARE, SPARE]
        logits = 5 * torch.randn(5, width, device=device)
        logits[1, 7] = torch.nan if step else 0.0
        drafted = torch.tensor([3, -1 if step else 7, 5, 5, 5], device=device)
        for chains, end in ((ours, end_draft_step), (theirs, end_draft_step_reference)):
            end(chains, logits, drafted, targets, settings)
        assert_same(ours, theirs)
    assert ours.made.tolist() == [3, 2, 0, 0, 0, 0]
    assert ours.drafts[0].tolist() == [int(targets[3])] * 3 and bool(ours.chances[1, 1].isnan())
