"""Choice of the group for a device."""

import torch

from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous


def make_group(rendezvous: Rendezvous, device: torch.device) -> LiveGroup:
    """Connect the processes of a group that compute on such a device. Returns once all have joined."""
    host = ProcessGroup(rendezvous)
    if device.type == "cpu":
        return host
    from roseinfer.parallel.cuda_group import connect  # imports Triton, which only GPUs have

    return connect(host, rendezvous, device)
