"""Options that are left to the device: it is looked at before the engine is built around what they say."""

from dataclasses import replace

import torch

from roseinfer.core.config import SEATS, EngineConfig
from roseinfer.runner.build import resolve_device

LARGE_GPU_BYTES = 64 << 30
# A step's weights are read for twice the rows. More would rather wait for KV blocks than for seats, and take each
# other's.
LARGE_GPU_SEATS = 512


def fit_to_device(config: EngineConfig) -> EngineConfig:
    """`config` with as many seats as suit the device, unless it says how many. Raises `ConfigError` for a GPU that is
    not there.
    """
    if config.scheduler.max_num_seqs is not None:
        return config
    device = resolve_device(config.model.device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    return replace(config, scheduler=replace(config.scheduler, max_num_seqs=default_seats(memory)))


def default_seats(gpu_bytes: int) -> int:
    """Of a GPU with so much memory; 0 = there is none."""
    return LARGE_GPU_SEATS if gpu_bytes >= LARGE_GPU_BYTES else SEATS
