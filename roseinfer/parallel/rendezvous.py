"""Rendezvous of the processes that share a model."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Parameters to join one group, once. Later communication uses this machine's loopback interface.

    `store`: shared by all `size` processes. `name`: of the group, unique in each of its processes.
    """

    store: dist.Store
    name: str
    rank: int
    size: int
