"""Environment variables for NCCL, tested without it: those present when PyTorch's group is made."""

import os
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from roseinfer.parallel.nccl import Nccl


class RecordingGroup:
    """Replacement of `ProcessGroupNCCL`. `environments`: while one is made, and while it connects."""

    Options = SimpleNamespace
    environments: ClassVar[list[dict[str, str]]] = []

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self.environments[:] = [dict(os.environ)]

    def allreduce(self, tensors: object, options: object) -> None:
        self.environments.append(dict(os.environ))

    def _allgather_base(self, out: object, x: object, options: object) -> None:
        self.environments.append(dict(os.environ))


def test_pytorch_does_not_monitor_the_store_and_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", RecordingGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    before = dict(os.environ)
    Nccl(dist.HashStore(), 0, 2, torch.device("cpu"))
    assert len(RecordingGroup.environments) == 3
    for environment in RecordingGroup.environments:
        assert environment["NCCL_SOCKET_IFNAME"] == "lo"
        assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert dict(os.environ) == before
