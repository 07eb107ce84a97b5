"""Sums in pieces of two ranks, tested without GPUs: processes under Triton's interpreter, where nothing overlaps.

What overlaps on GPUs is tested there (`tests.equivalence.test_two_gpu_ranks`).
"""

import ctypes
from pathlib import Path

import pytest
import torch

from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.parallel import piece_sums
from roseinfer.parallel.cuda_group import CudaGroup
from roseinfer.parallel.piece_sums import PieceSums
from tests.helpers.interpreter import hurry
from tests.helpers.peers import run_ranks
from tests.parallel.test_cuda_group import MirrorLibrary, TwoRanks

CPU = torch.device("cpu")
LIMIT, PIECE_BYTES, WIDTH = 1 << 10, 1 << 12, 24

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU"),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry()
    monkeypatch.setattr(piece_sums, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(piece_sums, "_MULTIPLE_ROWS", 8)


def sums_of(peers: Peers) -> PieceSums:
    base = int(peers.bases[1 - peers.rank])

    def view(offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(base + offset)
        return torch.frombuffer(memory, dtype=dtype)

    return PieceSums(peers, view)


def numbers(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(-40, 41, (rows, WIDTH), generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_any_number_of_pieces_follow_each_other(dtype: torch.dtype, tmp_path: Path) -> None:
    """Two to nine pieces, equal or not; products of rows, or tensors as they are; with a residual and without."""
    sizes = (30, 64, 101, 300)

    def work(peers: Peers) -> list[torch.Tensor]:
        sums, found, seen = sums_of(peers), [], []
        for rows in sizes:
            x, residual = numbers(peers.rank, rows, dtype), numbers(9, rows, dtype)
            assert sums.takes(x)

            def negative(some: torch.Tensor) -> torch.Tensor:
                seen.append(len(some))
                return -some

            found += [sums.sum(x, residual.clone(), negative), sums.sum(x.clone(), residual), sums.sum(x, None)]
        assert sum(seen) == sum(sizes) and max(seen) * WIDTH * dtype.itemsize <= PIECE_BYTES
        return [*found, peers.lost]

    for *found, lost in run_ranks(work, PeerLayout(2, LIMIT, PIECE_BYTES), CPU, tmp_path):
        assert not lost
        for number, rows in enumerate(sizes):
            both, residual = (
                (numbers(0, rows, dtype) + numbers(1, rows, dtype)).float(),
                numbers(9, rows, dtype).float(),
            )
            products, plain, bare = found[3 * number : 3 * number + 3]
            assert torch.equal(products, (residual - both).to(dtype))
            assert torch.equal(plain, (both + residual).to(dtype)) and torch.equal(bare, both.to(dtype))


def test_meetings_may_be_counted_round(tmp_path: Path) -> None:
    def work(peers: Peers) -> list[torch.Tensor]:
        peers.meeting_calls.fill_(2**31 - 3)
        sums = sums_of(peers)
        return [sums.sum(numbers(peers.rank, 64, torch.float32), None) for _ in range(3)]

    for found in run_ranks(work, PeerLayout(2, LIMIT, PIECE_BYTES), CPU, tmp_path):
        for each in found:
            assert torch.equal(each, numbers(0, 64, torch.float32) + numbers(1, 64, torch.float32))


def test_a_rank_that_has_given_up_is_missed_by_the_other() -> None:
    """A copy of such a rank waits for nobody, so no later sum may count on it."""
    layout = PeerLayout(2, LIMIT, PIECE_BYTES)
    buffers = [torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(2)]
    first, second = (Peers.of(rank, layout, [buffer.data_ptr() for buffer in buffers], CPU, 20e-9) for rank in (0, 1))
    sums_of(first).sum(torch.ones(64, WIDTH), None)
    assert first.lost
    assert sums_of(second).sum(torch.ones(64, WIDTH), None).isnan().any()
    assert second.lost


def test_a_group_leaves_large_sums_to_pieces(tmp_path: Path) -> None:
    """Also those of tensors as they are. Products see the rows of one piece at a time."""
    rows, small = 101, 4

    def work(peers: Peers) -> list[torch.Tensor]:
        group = CudaGroup(TwoRanks(peers.rank), MirrorLibrary(), peers, pieces=sums_of(peers))
        x, residual = numbers(peers.rank, rows, torch.float32), numbers(9, rows, torch.float32)
        assert group.adds_residual(x) and group.adds_residual(x[:small])
        seen = []

        def product(some: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            assert residual is None
            seen.append(len(some))
            return -some

        found = [group.sum_products(product, x, residual.clone()), group.all_reduce(x.clone(), residual.clone())]
        assert len(seen) > 1
        found.append(group.sum_products(product, x[:small], residual[:small].clone()))
        assert seen[-1] == small
        return found

    total, residual = numbers(0, rows, torch.float32) + numbers(1, rows, torch.float32), numbers(9, rows, torch.float32)
    for products, plain, few in run_ranks(work, PeerLayout(2, LIMIT, PIECE_BYTES), CPU, tmp_path):
        assert torch.equal(products, residual - total) and torch.equal(plain, residual + total)
        assert torch.equal(few, (residual - total)[:small])


def test_what_it_takes() -> None:
    layout = PeerLayout(2, LIMIT, PIECE_BYTES)
    memory = torch.zeros(layout.bytes, dtype=torch.uint8)
    sums = sums_of(Peers.of(0, layout, [memory.data_ptr()] * 2, CPU, 1.0))
    assert sums.takes(torch.empty(30, WIDTH))
    assert not sums.takes(torch.empty(4, WIDTH)), "one exchange by a kernel is faster"
    assert not sums.takes(torch.empty(30, WIDTH, dtype=torch.int32))
    assert not sums.takes(torch.empty(WIDTH, 30).t())
    assert not sums.takes(torch.empty(2, PIECE_BYTES)), "a few rows are more than a piece"


def test_a_sum_without_the_other_rank_is_no_number() -> None:
    layout = PeerLayout(2, LIMIT, PIECE_BYTES)
    buffers = [torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(2)]
    peers = Peers.of(0, layout, [buffer.data_ptr() for buffer in buffers], CPU, 20e-9)
    assert sums_of(peers).sum(torch.ones(64, WIDTH), None).isnan().all()
    assert peers.lost
