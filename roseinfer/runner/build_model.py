"""Loading of a runner's model, with its draft head and slots for adapters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from roseinfer.adapters.memory import AdapterMemory
from roseinfer.attention.kv_fp8 import kv_dtype_of
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.select import resolve_backend
from roseinfer.core.adapters import AdapterRead
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.speculation import EagleValues, SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.pooling import PoolingTask
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.generation import GenerationDefaults, read_generation_config
from roseinfer.models.loader import load_model, resolve_dtype
from roseinfer.models.pooling.config import PoolingSpec, read_pooling_spec
from roseinfer.models.spec import ModelSpec
from roseinfer.parallel.group import LiveGroup
from roseinfer.runner.build_adapters import adapting_of, check_no_adapters, with_slots
from roseinfer.runner.build_head import HeadSpec, check_head_backend, read_head, with_draft_head
from roseinfer.runner.cache_size import check_context
from roseinfer.runner.device import rank_device
from roseinfer.runner.start_notes import without_head


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Model that is ready to run, or this process's part of it.

    config: the options, less those that change nothing for this model. model: with its draft head, if it has one. spec:
    of the model without that `head`. backend: as `resolve_backend` returns. kv_dtype: format of K and V. pooling: how
    vectors are made; None for generated text. adapters: None without.
    """

    config: EngineConfig
    model: CausalLM
    spec: ModelSpec
    generation: GenerationDefaults
    backend: str
    kv_dtype: torch.dtype
    head: HeadSpec | None
    pooling: PoolingSpec | None
    adapters: AdapterMemory | None


def load_for_runner(
    config: EngineConfig, folder: Path, group: LiveGroup, on_read: Callable[[AdapterRead], None] | None = None
) -> LoadedModel:
    """Load the model in `folder`, after all checks that need no weights. Arguments and errors as of `build_runner`."""
    device = rank_device(config, group.rank, group.size)
    spec = read_model_spec(folder, config.model.max_model_len)
    pooling = read_pooling_spec(folder, config.model.model, config.model.runner, config.model.pooling)
    if pooling is not None:
        config, spec = _without_text(config, spec, pooling)
    dtype = resolve_dtype(spec, config.model.dtype, device)
    kv_dtype = kv_dtype_of(config.cache.kv_cache_dtype, dtype)
    if spec.quantization is None:
        _check_keys(spec, kv_dtype, (None,))
    _check_states(config, spec)
    head = read_head(config.speculation, spec)
    backend = _backend(config, spec, head, dtype, kv_dtype, device)
    options = config.model
    generation = read_generation_config(folder, options.generation_config, options.override_generation_config)
    check_context(options.max_model_len, spec.max_position)
    adapting = adapting_of(config.adapters, device)
    steady = config.speculation.recorded
    target = load_model(folder, spec, options, device, group, steady_text=steady, adapting=adapting)
    _check_keys(spec, kv_dtype, target.kv_scales)
    adapters = None if adapting is None else with_slots(config, adapting, target, group.size, on_read)
    return LoadedModel(
        config=config,
        model=target if head is None else with_draft_head(config, head, target, folder),
        spec=spec,
        generation=generation,
        backend=backend,
        kv_dtype=kv_dtype,
        head=head,
        pooling=pooling,
        adapters=adapters,
    )


def _without_text(config: EngineConfig, spec: ModelSpec, pooling: PoolingSpec) -> tuple[EngineConfig, ModelSpec]:
    """Return the options and the spec of a model that makes vectors: nothing is generated."""
    check_no_adapters(config.adapters, spec.architecture)
    config = replace(config, speculation=SpeculationConfig(speculation="off"))
    if pooling.task is not PoolingTask.EMBED:
        return config, spec
    # The head is not needed, and may be missing.
    return replace(config, model=without_head(config.model)), replace(spec, tied_embeddings=True)


def _backend(
    config: EngineConfig,
    spec: ModelSpec,
    head: HeadSpec | None,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> str:
    """Return the attention backend for all layers of the model and its head."""
    asked = config.model.attention_backend
    layers = spec.attention if head is None else (*spec.attention, head.attention)
    backend = resolve_backend(asked, layers, dtype, device, kv_dtype)
    if head is not None:
        check_head_backend(asked, backend, device)
    return backend


def _check_keys(spec: ModelSpec, kv_dtype: torch.dtype, scales: Sequence[KVScales | None]) -> None:
    """Raise `ConfigError` if the model's keys do not fit `kv_dtype`. `scales`: one per layer."""
    if kv_dtype == CODES and spec.qkv_bias and not spec.qk_norm and None in scales:
        raise ConfigError(
            f"kv_cache_dtype is fp8, but the keys of {spec.architecture} have a bias, which makes some of their "
            "dimensions too large for FP8 without scales, and the checkpoint has none"
        )


def _check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise `ConfigError` for options that exclude a model with recurrent states."""
    if spec.deltas and isinstance(config.speculation.values, EagleValues):
        name = config.speculation.speculation
        raise ConfigError(f"speculation {name!r} is not supported by {spec.architecture}, which has recurrent states")
