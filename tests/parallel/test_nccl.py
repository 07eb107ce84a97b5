"""What NCCL is told where there is none: what PyTorch's group finds when it is made."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from roseinfer.parallel.nccl import Nccl


class Found:
    """Instead of `ProcessGroupNCCL`. `environment`: while it is made, and while it connects."""

    Options = SimpleNamespace

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self.environment = [dict(os.environ)]

    def allreduce(self, tensors: object, options: object) -> None:
        self.environment.append(dict(os.environ))

    def _allgather_base(self, out: object, x: object, options: object) -> None:
        self.environment.append(dict(os.environ))


def test_nobody_looks_into_the_store_when_all_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file is removed then. The process finds its own environment again."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Found, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    before = dict(os.environ)
    found = Nccl(dist.HashStore(), 0, 2, torch.device("cpu"))._nccl.environment
    assert len(found) == 3
    for environment in found:
        assert environment["NCCL_SOCKET_IFNAME"] == "lo"
        assert environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == environment["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert dict(os.environ) == before
