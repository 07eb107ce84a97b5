"""Ranks that share a GPU, tested without any: pieces under Triton's interpreter, and how the ranks connect."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from roseinfer.core.config.engine import EngineConfig, ModelConfig
from roseinfer.core.errors import ConfigError
from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.parallel.group import SingleRank
from roseinfer.parallel.one_gpu import ONE_GPU_STEP_TIMEOUT_S, ChunkLibrary, connect_on_one_gpu
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.symmetric_memory import SharedMemory
from roseinfer.runner.device import rank_device
from tests.helpers.interpreter import hurry
from tests.helpers.peers import run_ranks

CPU = torch.device("cpu")
LIMIT = 1 << 10

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (16, 16), (33, 31)])
def test_tensors_of_all_sizes_are_exchanged(shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    """The last one has several pieces, and a rest that no word holds."""
    hurry()
    x = torch.randint(80, shape).to(dtype)  # sums are exact

    def work(peers: Peers) -> list[torch.Tensor]:
        library, mine = ChunkLibrary(peers), x * (peers.rank + 1)
        columns = library.gather(mine)
        library.all_reduce(mine)
        return [mine, columns]

    for total, columns in run_ranks(work, PeerLayout(2, LIMIT), CPU, tmp_path):
        assert torch.equal(total, x * 3)
        assert torch.equal(columns, torch.stack([x, x * 2]))


def opened(*args: object) -> SharedMemory:
    return SharedMemory("gpu", [0, 0])


def refused(*args: object) -> SharedMemory:
    raise RuntimeError("operation not permitted")


def connect() -> object:
    return connect_on_one_gpu(SingleRank(0, 2), Rendezvous(dist.HashStore(), "gpu", 0, 2), CPU)


def test_waits_of_a_step_are_longer_than_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Peers] = []

    def recorded(*args: object) -> Peers:
        made.append(Peers.of(*args))  # type: ignore[arg-type]
        return made[0]

    monkeypatch.setattr("roseinfer.parallel.one_gpu.open_memory", opened)
    monkeypatch.setattr("roseinfer.parallel.one_gpu.Peers", type("Recorded", (), {"of": staticmethod(recorded)}))
    group = connect()
    group.ready()  # type: ignore[attr-defined]
    assert made[0].patience.item() == int(ONE_GPU_STEP_TIMEOUT_S * 1e9)


def test_a_gpu_whose_memory_cannot_be_shared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roseinfer.parallel.one_gpu.open_memory", refused)
    with pytest.raises(ConfigError, match=r"devices: .* cannot share a GPU's memory; .*not permitted"):
        connect()


def test_all_ranks_get_the_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    model = ModelConfig(tensor_parallel_size=2)
    for rank in range(2):
        config = EngineConfig(model=model, ranks_on_one_gpu=True)
        assert rank_device(config, rank, 2) == torch.device("cuda", 0)
    assert chosen == [0, 0]
    with pytest.raises(ConfigError, match="tensor_parallel_size is 2, but there is 1 GPU"):
        rank_device(EngineConfig(model=model), 0, 2)
