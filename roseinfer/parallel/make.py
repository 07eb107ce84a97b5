"""Choice of the group for a device."""

import torch

from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous


def make_group(rendezvous: Rendezvous, device: torch.device, *, on_one_gpu: bool = False) -> LiveGroup:
    """Connect the processes of a group that compute on such a device. Returns once all have joined.

    on_one_gpu: it is the same GPU for all of them. Raises `ConfigError` if they cannot share it.
    """
    host = ProcessGroup(rendezvous)
    if device.type == "cpu":
        return host
    if on_one_gpu:
        from roseinfer.parallel.one_gpu import connect_on_one_gpu

        return connect_on_one_gpu(host, rendezvous, device)
    from roseinfer.parallel.cuda_group import connect  # imports Triton, which only GPUs have

    return connect(host, rendezvous, device)
