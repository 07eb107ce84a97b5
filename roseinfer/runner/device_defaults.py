"""Defaults that depend on the device, chosen before the engine is built."""

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

MIN_LARGE_GPU_BYTES = 64 << 30
# Twice the rows share one read of the weights. With more, requests would wait for KV blocks instead of seats.
LARGE_GPU_SEATS_COUNT = 512
# A step of 8,192 tokens needs 0.6 GB more than one of 2,048 with Qwen3-8B.
LARGE_GPU_BURST_TOKENS = 8192
_MAX_BURST_STEPS = 4  # in one burst step


def fit_to_device(config: EngineConfig) -> EngineConfig:
    """Return `config` with the device's defaults for seats and burst tokens, where it leaves them open.

    Raise `ConfigError` for a GPU that is missing.
    """
    scheduler = config.scheduler
    device = resolve_device(config.model.device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    if scheduler.max_num_seqs is None:
        scheduler = replace(scheduler, max_num_seqs=default_seats(memory))
    return replace(config, scheduler=with_bursts(scheduler, memory))


def with_bursts(scheduler: SchedulerConfig, gpu_bytes: int) -> SchedulerConfig:
    """Return `scheduler` with a default for `BURST_TOKENS` on a large GPU. `gpu_bytes`: 0 without a GPU."""
    has_option = scheduler.policy_name == DEFAULT_POLICY and scheduler.enable_chunked_prefill
    if not has_option or BURST_TOKENS in scheduler.policy_options or gpu_bytes < MIN_LARGE_GPU_BYTES:
        return scheduler
    tokens = min(_MAX_BURST_STEPS * scheduler.max_num_batched_tokens, LARGE_GPU_BURST_TOKENS)
    return replace(scheduler, policy_options={**scheduler.policy_options, BURST_TOKENS: tokens})


def default_seats(gpu_bytes: int) -> int:
    """Return the default number of seats. `gpu_bytes`: 0 without a GPU."""
    return LARGE_GPU_SEATS_COUNT if gpu_bytes >= MIN_LARGE_GPU_BYTES else DEFAULT_SEATS_COUNT
