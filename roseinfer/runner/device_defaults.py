"""Defaults that depend on the device, chosen before the engine is built."""

from dataclasses import replace
from pathlib import Path

import torch

from roseinfer.core.config.engine import (
    BURST_TOKENS,
    DEFAULT_POLICY,
    DEFAULT_SEATS_COUNT,
    DEFAULT_STEP_TOKENS,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from roseinfer.models.encoders.registry import is_encoder
from roseinfer.models.pooling.config import read_pooling_spec
from roseinfer.runner.device import resolve_device

MIN_LARGE_GPU_BYTES = 64 << 30
# Twice the rows share one read of the weights. With more, requests would wait for KV blocks instead of seats.
LARGE_GPU_SEATS_COUNT = 512
# A step of 8,192 tokens needs 0.6 GB more than one of 2,048 with Qwen3-8B.
LARGE_GPU_BURST_TOKENS = 8192
# Prompt-only requests end with their prompts, so more of them fit in a step: 8,192 tokens are 512 texts of 16.
LARGE_GPU_POOLING_SEATS_COUNT = 1024
# No output token waits for the end of a step. On an H200, steps of 8,192 tokens compute texts 1.4 times faster than
# those of 2,048 with Qwen3-0.6B; longer ones are not faster.
LARGE_GPU_POOLING_TOKENS = 8192
_MAX_BURST_STEPS = 4  # in one burst step


def fit_to_device(config: EngineConfig, folder: Path) -> EngineConfig:
    """Return `config` with the device's defaults for seats and burst tokens, where it leaves them open, and with what
    the model in `folder` needs: an encoder computes whole prompts, of which nothing is cached.

    Raise `ConfigError` for a GPU that is missing.
    """
    if is_encoder(folder):
        config = replace(
            config,
            cache=replace(config.cache, enable_prefix_caching=False),
            scheduler=replace(config.scheduler, enable_chunked_prefill=False),
        )
    scheduler = config.scheduler
    device = resolve_device(config.model.device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    pools = is_encoder(folder) or _pools(config.model, folder)
    if scheduler.max_num_seqs is None:
        scheduler = replace(scheduler, max_num_seqs=default_seats(memory, pools=pools))
    if pools:
        return replace(config, scheduler=with_pooling(scheduler, memory))
    return replace(config, scheduler=with_bursts(scheduler, memory))


def _pools(model: ModelConfig, folder: Path) -> bool:
    return read_pooling_spec(folder, model.model, model.runner, model.pooling) is not None


def with_pooling(scheduler: SchedulerConfig, gpu_bytes: int) -> SchedulerConfig:
    """Return `scheduler` with longer steps for prompt-only requests on a large GPU. `gpu_bytes`: 0 without a GPU."""
    if gpu_bytes < MIN_LARGE_GPU_BYTES or scheduler.max_num_batched_tokens != DEFAULT_STEP_TOKENS:
        return scheduler
    return replace(scheduler, max_num_batched_tokens=LARGE_GPU_POOLING_TOKENS)


def with_bursts(scheduler: SchedulerConfig, gpu_bytes: int) -> SchedulerConfig:
    """Return `scheduler` with a default for `BURST_TOKENS` on a large GPU. `gpu_bytes`: 0 without a GPU."""
    has_option = scheduler.policy_name == DEFAULT_POLICY and scheduler.enable_chunked_prefill
    if not has_option or BURST_TOKENS in scheduler.policy_options or gpu_bytes < MIN_LARGE_GPU_BYTES:
        return scheduler
    tokens = min(_MAX_BURST_STEPS * scheduler.max_num_batched_tokens, LARGE_GPU_BURST_TOKENS)
    return replace(scheduler, policy_options={**scheduler.policy_options, BURST_TOKENS: tokens})


def default_seats(gpu_bytes: int, *, pools: bool = False) -> int:
    """Return the default number of seats. `gpu_bytes`: 0 without a GPU. `pools`: all requests are prompt-only."""
    if gpu_bytes < MIN_LARGE_GPU_BYTES:
        return DEFAULT_SEATS_COUNT
    return LARGE_GPU_POOLING_SEATS_COUNT if pools else LARGE_GPU_SEATS_COUNT
