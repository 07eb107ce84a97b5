"""The group that suits a device."""

import torch

from roseinfer.core.errors import ConfigError
from roseinfer.parallel.group import LiveGroup
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous


def make_group(rendezvous: Rendezvous, device: torch.device) -> LiveGroup:
    """The group of processes of which each computes on such a device; returns once all of them have come.

    Raises `ConfigError` if there are no groups of such devices.
    """
    if device.type != "cpu":
        raise ConfigError(f"tensor_parallel_size: processes cannot share a model on {device.type} devices")
    return ProcessGroup(rendezvous)
