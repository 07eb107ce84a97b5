"""The group that suits a device."""

import torch

from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous


def make_group(rendezvous: Rendezvous, device: torch.device) -> LiveGroup:
    """The group of processes of which each computes on such a device; returns once all of them have come."""
    host = ProcessGroup(rendezvous)
    if device.type == "cpu":
        return host
    from roseinfer.parallel.cuda_group import connect  # imports Triton, which only GPUs have

    return connect(host, rendezvous, device)
