"""Options that are left to the device: it is looked at before the engine is built around what they say."""

from dataclasses import replace

import torch

from roseinfer.core.config.engine import (
    BURST_TOKENS,
    DEFAULT_POLICY,
    DEFAULT_SEATS_COUNT,
    EngineConfig,
    SchedulerConfig,
)
from roseinfer.runner.device import resolve_device

LARGE_GPU_BYTES = 64 << 30
# A step's weights are read for twice the rows. More would rather wait for KV blocks than for seats, and take each
# other's.
LARGE_GPU_SEATS = 512
# What a step of 8,192 tokens needs of memory beside one of 2,048: 0.6 GB with Qwen3-8B.
LARGE_GPU_BURST = 8192
_BURST_STEPS = 4  # steps in one, at most


def fit_to_device(config: EngineConfig) -> EngineConfig:
    """`config` with as many seats, and as many tokens of a step in a burst, as suit the device, unless it says how
    many. Raises `ConfigError` for a GPU that is not there.
    """
    scheduler = config.scheduler
    device = resolve_device(config.model.device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if scheduler.max_num_seqs is None:
        scheduler = replace(scheduler, max_num_seqs=default_seats(memory))
    return replace(config, scheduler=with_bursts(scheduler, memory))


def with_bursts(scheduler: SchedulerConfig, gpu_bytes: int) -> SchedulerConfig:
    """With a default for `BURST_TOKENS`, on a GPU with so much memory; 0 = there is none."""
    has_option = scheduler.policy_name == DEFAULT_POLICY and scheduler.enable_chunked_prefill
    if not has_option or BURST_TOKENS in scheduler.policy_options or gpu_bytes < LARGE_GPU_BYTES:
        return scheduler
    tokens = min(_BURST_STEPS * scheduler.max_num_batched_tokens, LARGE_GPU_BURST)
    return replace(scheduler, policy_options={**scheduler.policy_options, BURST_TOKENS: tokens})


def default_seats(gpu_bytes: int) -> int:
    """Of a GPU with so much memory; 0 = there is none."""
    return LARGE_GPU_SEATS if gpu_bytes >= LARGE_GPU_BYTES else DEFAULT_SEATS_COUNT
