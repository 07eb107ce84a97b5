"""Where the processes that share a model find each other."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """`store`: that all of `size` processes have; this one is number `rank`. It serves one group, once. From then on
    the processes talk over this machine's loopback.

    `name`: of the group, the same for all, and no other's of these processes.
    """

    store: dist.Store
    name: str
    rank: int
    size: int
