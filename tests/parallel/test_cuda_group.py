"""RankGroup of GPUs, tested without any: forked ranks under Triton's interpreter, without NCCL."""

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from roseinfer.core.errors import EngineDeadError
from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.parallel.cuda_group import CudaGroup, connect, own_limit
from roseinfer.parallel.group import RankGroup, SingleRank, sum_partials
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.symmetric_memory import SharedMemory
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.checkpoints import make_reference, save_reference
from tests.helpers.interpreter import hurry
from tests.helpers.loaded import load
from tests.helpers.peers import run_ranks

CPU = torch.device("cpu")
LIMIT = 1 << 20
TOKENS = [5, 17, 3, 88, 42, 9, 1, 60]

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU"),
]


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    hurry()


@dataclass
class MirrorLibrary:
    """A library of two ranks with equal tensors."""

    sums: list[int] = field(default_factory=list)
    ends: threading.Event = field(default_factory=threading.Event)

    def all_reduce(self, x: torch.Tensor) -> None:
        self.sums.append(x.nbytes)
        x.mul_(2)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])

    def abort(self) -> None:
        self.ends.set()


class TwoRanks(SingleRank):
    """RankGroup of two hosts, without communication."""

    def __init__(self, rank: int) -> None:
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "size", 2)


def test_the_size_decides_between_kernels_and_library(tmp_path: Path) -> None:
    """Our kernels add the residual to a small sum; for a large one, rank 0's part includes it."""
    small, large = torch.full((2, 8), 3.0), torch.full((LIMIT // 8 + 1, 2), 3.0)

    def work(peers: Peers) -> list[torch.Tensor]:
        library = MirrorLibrary()
        group = CudaGroup(TwoRanks(peers.rank), library, peers)
        assert group.adds_residual(small) and not group.adds_residual(large)
        sums = [sum_partials(group, x.clone(), torch.ones_like(x)) for x in (small, large)]
        sums.append(group.all_reduce(large.clone(), torch.ones_like(large)))
        assert library.sums == [large.nbytes] * 2
        wide, rows = torch.empty(2, 20), torch.arange(8.0).view(2, 4)
        columns = [group.gather(rows), group.gather(rows, wide[:, :8]), group.gather(large)]
        group.check()
        return [*sums, *columns]

    for sums in run_ranks(work, PeerLayout(2, LIMIT), CPU, tmp_path):
        assert torch.equal(sums[0], torch.full((2, 8), 7.0))
        assert torch.equal(sums[1], large * 2), "the residual is in rank 0's part"
        assert torch.equal(sums[2], large * 2 + 1)
        twice = torch.arange(8.0).view(2, 4).repeat(1, 2)
        assert torch.equal(sums[3], twice) and torch.equal(sums[4], twice)
        assert torch.equal(sums[5], large.repeat(1, 2))


def test_without_peer_access_the_library_exchanges_all() -> None:
    library = MirrorLibrary()
    group = CudaGroup(TwoRanks(0), library, None)
    x = torch.ones(2, 8)
    assert not group.adds_residual(x)
    assert torch.equal(group.all_reduce(x), torch.full((2, 8), 2.0)) and library.sums == [64]
    group.ready()
    group.check()


def test_a_timeout_of_the_kernels_is_an_error() -> None:
    layout = PeerLayout(2, LIMIT)
    buffers = [torch.zeros(layout.bytes, dtype=torch.uint8) for _ in range(2)]
    peers = Peers.of(1, layout, [buffer.data_ptr() for buffer in buffers], CPU, 1.0)
    group = CudaGroup(TwoRanks(1), MirrorLibrary(), peers, step_timeout_s=20e-9)
    group.ready()
    group.check()
    group.all_reduce(torch.ones(2, 8))
    with pytest.raises(EngineDeadError, match="rank 1 timed out waiting for another rank's part"):
        group.check()


def test_closing_does_not_wait_for_a_library_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.parallel.cuda_group.CLOSE_TIMEOUT_S", 0.01)
    library, over = MirrorLibrary(), threading.Event()
    monkeypatch.setattr(library, "abort", lambda: (library.ends.set(), over.wait()))
    group = CudaGroup(TwoRanks(0), library, None)
    group.abort()
    group.close()
    assert library.ends.wait(10)
    over.set()


def test_closing_at_interpreter_exit_works_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    closed: list[str] = []
    host = TwoRanks(0)
    object.__setattr__(host, "close", lambda: closed.append("host"))
    monkeypatch.setattr(SharedMemory, "close", lambda memory: closed.append(memory.name))
    monkeypatch.setattr(threading.Thread, "start", start)
    CudaGroup(host, MirrorLibrary(), None, SharedMemory("gpus", [0, 0])).close()
    assert closed == ["gpus", "host"]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_with_more_ranks_the_library_exchanges_smaller_tensors(size: int) -> None:
    assert own_limit(size) >= 1 << 18
    assert own_limit(size) > own_limit(size + 1)


def opened(*args: object) -> SharedMemory:
    return SharedMemory("gpus", [0, 0])


def refused(*args: object) -> SharedMemory:
    raise RuntimeError("operation not permitted")


@pytest.mark.parametrize(
    ("reach", "memory", "ours"), [(True, opened, True), (True, refused, False), (False, opened, False)]
)
def test_without_shared_memory_the_library_exchanges_all(
    reach: bool, memory: object, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.parallel.nccl.Nccl", lambda *args: MirrorLibrary())
    monkeypatch.setattr("roseinfer.parallel.symmetric_memory.all_reach_each_other", lambda size: reach)
    monkeypatch.setattr("roseinfer.parallel.symmetric_memory.open_memory", memory)
    group = connect(TwoRanks(0), Rendezvous(dist.HashStore(), "gpus", 0, 2), CPU)
    assert group.adds_residual(torch.ones(2, 8)) == ours


def logits(folder: Path, group: RankGroup) -> torch.Tensor:
    """Return logits of a chunk of the tokens, then of the other tokens one by one."""
    runner = HandRunner(load(folder, group=group))
    table, rows = runner.blocks.table(len(TOKENS)), []
    for start, count in ((0, 6), (6, 1), (7, 1)):
        rows += runner.run([HandRow(tokens=TOKENS, table=table, start=start, count=count)])
    return torch.cat(rows)


@pytest.mark.parametrize("family", ["qwen3", "llama-tied", "qwen3-moe"])
def test_a_model_summed_by_the_kernels_equals_the_whole_model(family: str, tmp_path: Path) -> None:
    folder = save_reference(make_reference(family), tmp_path)

    def work(peers: Peers) -> list[torch.Tensor]:
        return [logits(folder, CudaGroup(TwoRanks(peers.rank), MirrorLibrary(), peers))]

    first, second = (results[0] for results in run_ranks(work, PeerLayout(2, LIMIT), CPU, tmp_path))
    expected = logits(folder, SingleRank())
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
