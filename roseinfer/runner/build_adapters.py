"""Construction of a runner's slots for LoRA adapters."""

import os
from collections.abc import Callable

import torch

from roseinfer.adapters.adapting import Adapting
from roseinfer.adapters.memory import AdapterMemory, max_rank_of, slots_bytes
from roseinfer.adapters.slots import DeviceSlots
from roseinfer.core.adapters import AdapterRead
from roseinfer.core.config.adapters import DEFAULT_MAX_RANK_COUNT, AdapterConfig
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.memory import available_memory_bytes
from roseinfer.models.base import CausalLM
from roseinfer.models.families import known_prefixes


def adapting_of(config: AdapterConfig, device: torch.device) -> Adapting | None:
    """Return what records the layers of a model while it is loaded; None if adapters are off."""
    return Adapting(known_prefixes(), device) if config.enabled else None


def check_no_adapters(config: AdapterConfig, model: str) -> None:
    """Raise `ConfigError` if adapters are on, for a `model` that has none."""
    if config.enabled:
        why = f"LoRA adapters are not supported by {model}, which returns vectors instead of text"
        raise ConfigError(f"{config.given[0]}: {why}")


def with_slots(
    config: EngineConfig,
    adapting: Adapting,
    model: CausalLM,
    processes: int,
    on_read: Callable[[AdapterRead], None] | None,
) -> AdapterMemory:
    """Return the memory of adapters of a loaded model, with the adapters that the options name.

    processes: that share the model. on_read: as for `build_runner`. Raise `ConfigError` if memory is short, or an
    adapter cannot be used.
    """
    options = config.adapters
    if options.lora_dir is not None and not os.path.isdir(options.lora_dir):
        raise ConfigError(f"lora_dir: no such folder {options.lora_dir!r}")
    max_rank = _max_rank(options)
    wanted = slots_bytes(adapting, options.slots, max_rank, model.dtype.itemsize)
    lower = "lower lora_slots or lora_max_rank"
    if model.device.type == "cpu" and wanted * processes > available_memory_bytes():
        raise ConfigError(f"out of memory for {options.slots} LoRA adapters of rank {max_rank}; {lower}")
    try:
        slots = DeviceSlots(adapting.shapes, options.slots, max_rank, model.dtype, model.device)
    except (MemoryError, RuntimeError) as error:
        raise ConfigError(f"out of memory for {options.slots} LoRA adapters of rank {max_rank}; {lower}") from error
    adapting.attach(slots)
    adapting.model = config.model.model
    memory = AdapterMemory(adapting, slots, max_rank, processes, on_read)
    for name, path in options.named.items():
        memory.read_now(name, path)
    return memory


def _max_rank(options: AdapterConfig) -> int:
    if options.lora_max_rank is not None:
        return options.lora_max_rank
    found = max_rank_of(list(options.named.values()))
    return max(found, DEFAULT_MAX_RANK_COUNT) if options.lora_dir is not None or not found else found
