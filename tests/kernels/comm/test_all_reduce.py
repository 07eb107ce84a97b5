"""Sums and columns over ranks that push to each other, against float64 in the promised order."""

import pytest
import torch

from roseinfer.kernels.comm.all_reduce import all_reduce, gather, takes
from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.kernels.comm.push_blocks import gather_blocks, push_blocks
from roseinfer.kernels.comm.push_words import push_words
from tests.helpers.peers import run_ranks

LIMIT = 1 << 20  # bytes


def part(rank: int, call: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's part: in 16 bits integers with exact sums, since the interpreter does not round as a GPU does."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    if dtype is torch.float32:
        return torch.randn(shape, generator=generator) * 3
    return torch.randint(-40, 41, shape, generator=generator).to(dtype)


def total(size: int, call: int, shape: tuple[int, ...], dtype: torch.dtype, residual: bool) -> torch.Tensor:
    """Return the sum in float32 in the order of the ranks, the residual last, rounded once."""
    sum = torch.zeros(shape)
    for rank in range(size):
        sum += part(rank, call, shape, dtype).float()
    if residual:
        sum += part(99, call, shape, dtype).float()
    return sum.to(dtype)


# Calls of both kernels and of many sizes in turn, so that programs take part in some of them only.
CALLS = [
    ((1, 8), torch.bfloat16, True, push_words),
    ((3, 700), torch.bfloat16, True, push_words),
    ((2, 900), torch.float16, False, push_blocks),
    ((1, 64), torch.float32, True, push_words),
    ((2, 900), torch.float16, False, push_words),
    ((5, 2400), torch.bfloat16, True, push_blocks),
    ((5, 2400), torch.bfloat16, True, push_blocks),
    ((3, 700), torch.bfloat16, False, push_words),
    ((1, 77), torch.float32, True, push_blocks),
]


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(size, device, tmp_path):
    """Bit for bit the same, whichever kernel adds up."""

    def work(peers: Peers) -> list[torch.Tensor]:
        xs = [part(peers.rank, call, shape, dtype).to(device) for call, (shape, dtype, _, _) in enumerate(CALLS)]
        adds = [part(99, call, shape, dtype).to(device) for call, (shape, dtype, _, _) in enumerate(CALLS)]
        results = []
        for x, add, (_, _, residual, push) in zip(xs, adds, CALLS, strict=True):
            results.append(push(x, add if residual else None, peers))
            assert results[-1] is (add if residual else x)
        return [*results, peers.lost]

    ranks = run_ranks(work, PeerLayout(size, LIMIT), device, tmp_path)
    for call, (shape, dtype, residual, _) in enumerate(CALLS):
        expected = total(size, call, shape, dtype, residual)
        for rank in range(size):
            assert torch.equal(ranks[rank][call].cpu(), expected), (call, rank)
    assert not any(int(rank[-1]) for rank in ranks)


def test_columns_side_by_side_in_rows_that_lie_apart(device, tmp_path):
    shapes = [(1, 48), (3, 1000), (2, 7)]

    def work(peers: Peers) -> list[torch.Tensor]:
        xs = [part(peers.rank, call, shape, torch.bfloat16).to(device) for call, shape in enumerate(shapes)]
        outs = [torch.full((n, 2 * width + 5), -1.0, dtype=torch.bfloat16, device=device) for n, width in shapes]
        for x, out in zip(xs, outs, strict=True):
            gather_blocks(x, out[:, : 2 * x.shape[1]], peers)
        return outs

    ranks = run_ranks(work, PeerLayout(2, LIMIT), device, tmp_path)
    for call, (rows, width) in enumerate(shapes):
        parts = [part(rank, call, (rows, width), torch.bfloat16) for rank in range(2)]
        expected = torch.cat([*parts, torch.full((rows, 5), -1.0, dtype=torch.bfloat16)], 1)
        assert all(torch.equal(rank[call].cpu(), expected) for rank in ranks)


@pytest.mark.parametrize("push", [push_words, push_blocks])
def test_a_wait_for_a_missing_rank_times_out_once(push, device):
    """The first call waits for its timeout, the following calls do not wait."""
    layout = PeerLayout(2, LIMIT)
    buffers = [torch.zeros(layout.bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    peers = Peers.of(0, layout, [buffer.data_ptr() for buffer in buffers], device, 20e-9)
    result = push(torch.ones(2, 8, device=device), None, peers)
    assert result.isnan().all(), "nobody may take it for a sum"
    assert int(peers.lost) == 1
    assert int(peers.patience) == 0
    peers.lost.zero_()
    push(torch.ones(2, 8, device=device), None, peers)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert int(peers.lost) == 1


def test_sizes_decide_which_kernel_adds_up(device, tmp_path, monkeypatch):
    """No rows, one row, and more than fits words that carry their count, through one function."""
    monkeypatch.setattr("roseinfer.kernels.comm.peers.WORD_PROGRAMS", 2)
    layout = PeerLayout(2, LIMIT)
    shapes = [(0, 16), (1, 16), (8, 600)]

    def work(peers: Peers) -> list[torch.Tensor]:
        parts = [part(peers.rank, call, shape, torch.bfloat16).to(device) for call, shape in enumerate(shapes)]
        columns = part(peers.rank, 9, (2, 16), torch.bfloat16).to(device)
        out = torch.empty(2, 32, dtype=torch.bfloat16, device=device)
        return [*(all_reduce(x, None, peers) for x in parts), gather(columns, out, peers)]

    ranks = run_ranks(work, layout, device, tmp_path)
    for call, shape in enumerate(shapes):
        assert all(torch.equal(rank[call].cpu(), total(2, call, shape, torch.bfloat16, False)) for rank in ranks)
    expected = torch.cat([part(rank, 9, (2, 16), torch.bfloat16) for rank in range(2)], 1)
    assert all(torch.equal(rank[-1].cpu(), expected) for rank in ranks)


def test_supported_tensors(device):
    peers = Peers.of(0, PeerLayout(2, LIMIT), [0, 0], device, 1.0)
    x = torch.empty(LIMIT // 2, dtype=torch.bfloat16, device=device)
    assert takes(x, peers)
    assert takes(x[:4], peers)
    assert not takes(x[:3], peers), "not a multiple of what a thread moves"
    assert not takes(torch.empty(LIMIT // 2 + 4, dtype=torch.bfloat16, device=device), peers)
    assert not takes(x.view(2, -1)[:, :8], peers), "rows that lie apart"
    assert not takes(x.view(torch.int16), peers)
