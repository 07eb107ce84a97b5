"""How the processes that share a model find each other: by a file, and from then on over this machine's loopback."""

from dataclasses import dataclass

import torch

from roseinfer.core.errors import ConfigError
from roseinfer.parallel.group import LiveGroup


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """`store`: path of a file that is not there before the first of `size` processes comes; this one is number `rank`.

    A file serves one group, once.
    """

    store: str
    rank: int
    size: int


def make_group(rendezvous: Rendezvous, device: torch.device) -> LiveGroup:
    """The group of processes of which each computes on such a device; returns once all of them have come.

    Raises `ConfigError` if there are no groups of such devices.
    """
    if device.type != "cpu":
        raise ConfigError(f"tensor_parallel_size: processes cannot share a model on {device.type} devices")
    from roseinfer.parallel.process_group import ProcessGroup

    return ProcessGroup(rendezvous)
