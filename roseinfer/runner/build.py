"""Construction of a runner that is ready for its first plan, from a configuration and a model folder."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from roseinfer.attention.host_store import GIB, check_host_memory
from roseinfer.core.adapters import AdapterFiles, AdapterRead
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.runner import ExpertChoice, RunnerFacts, StatePool, WindowPool
from roseinfer.models.encoders.registry import is_encoder
from roseinfer.models.generation import GenerationDefaults
from roseinfer.parallel.group import LiveGroup, SingleRank
from roseinfer.runner.assembly import Shape, assemble, pooling_head
from roseinfer.runner.build_adapters import check_no_adapters
from roseinfer.runner.build_cache import (
    CacheSizes,
    block_bytes,
    compile_kernels,
    context_reads,
    shape_of,
    size_cache,
    state_bytes,
)
from roseinfer.runner.build_encoder import build_encoder
from roseinfer.runner.build_head import without_used_head
from roseinfer.runner.build_model import LoadedModel, load_for_runner
from roseinfer.runner.cache_size import spare_from
from roseinfer.runner.host_copies import CopyTimes
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.phases import phase
from roseinfer.runner.pooling_runner import PoolingRunner
from roseinfer.runner.start_notes import log_start_notes, warn_of_small_cache, warn_of_unused_sizes
from roseinfer.runner.warm_up import warm_up, warm_up_graphs


@dataclass(frozen=True, slots=True)
class BuiltRunner:
    """Runner that is ready for plans. `adapters`: set with `facts.adapters`; its first results are the adapters of
    the options.
    """

    runner: ModelRunner | PoolingRunner
    facts: RunnerFacts
    adapters: AdapterFiles | None = None


def build_runner(
    config: EngineConfig,
    folder: Path,
    group: LiveGroup | None = None,
    on_read: Callable[[AdapterRead], None] | None = None,
) -> BuiltRunner:
    """Load the model in `folder`, or this process's part of it, and give it seats and a KV cache.

    All ranks of a `group` call this at the same time. Set torch's number of CPU threads if configured, or to leave
    other ranks their part of the cores. `on_read` gets the adapters that are read later, in the thread that reads, in
    place of `BuiltRunner.adapters.take_read`. Raise `ConfigError` naming the option that cannot be met,
    `ModelNotFoundError`, `UnsupportedModelError`.
    """
    startup_s: dict[str, float] = {}
    group = group or SingleRank()
    _set_threads(config, group)
    if is_encoder(folder):
        check_no_adapters(config.adapters, folder.name)
        runner, facts = build_encoder(config, folder, group)
        return BuiltRunner(runner, facts)
    check_host_memory(int(config.cache.kv_offloading_size * GIB))
    with phase(startup_s, "load"):
        loaded = load_for_runner(config, folder, group, on_read)
    with phase(startup_s, "cache"):
        sizes = size_cache(loaded, group)
        if group.rank == 0:
            _log_notes(loaded, sizes, folder)
        shape = shape_of(loaded, sizes)
        assembly = assemble(loaded.model, shape, group)
        compile_kernels(assembly, loaded.model, shape)
    with phase(startup_s, "warm-up"):
        copies = warm_up(assembly, shape, chunked=config.scheduler.enable_chunked_prefill)
    if assembly.graphs:
        with phase(startup_s, "graphs"):
            assembly.capture()
            warm_up_graphs(assembly, shape)
    group.ready()
    facts = _facts(loaded, sizes, shape, copies, startup_s, group.size)
    return BuiltRunner(assembly.runner, facts, loaded.adapters)


@cache
def found_threads() -> int:
    """Return PyTorch's number of threads before the first engine of this process changed it."""
    return torch.get_num_threads()


def _set_threads(config: EngineConfig, group: LiveGroup) -> None:
    found, threads = found_threads(), config.model.threads
    if threads is None and group.size > 1:
        threads = max(1, found // group.size)
    if threads is not None:
        torch.set_num_threads(threads)


def _log_notes(loaded: LoadedModel, sizes: CacheSizes, folder: Path) -> None:
    """Log what a user should know of the loaded model and its cache."""
    cache, spec = loaded.config.cache, loaded.spec
    warn_of_unused_sizes(cache, sizes.groups, sizes.num_slots)
    warn_of_small_cache(loaded.config.model.max_model_len, spec.max_position, sizes.blocks[0] * cache.block_size)
    log_start_notes(
        without_used_head(spec, loaded.head),
        folder,
        sizes.max_model_len,
        sizes.groups,
        sizes.blocks,
        sizes.num_slots,
        hosted=cache.kv_offloading_size > 0,
    )


def _facts(
    loaded: LoadedModel, sizes: CacheSizes, shape: Shape, copies: CopyTimes, startup_s: dict[str, float], ranks: int
) -> RunnerFacts:
    """Return what the scheduler and the server should know of the runner."""
    model, spec, pooling, adapters = loaded.model, loaded.spec, loaded.pooling, loaded.adapters
    return RunnerFacts(
        model_type=spec.architecture,
        max_model_len=sizes.max_model_len,
        num_blocks=sizes.blocks[0],
        block_size=loaded.config.cache.block_size,
        prefix_caching=loaded.config.cache.enable_prefix_caching,
        spare_from=spare_from(loaded.config.cache, sizes.max_model_len, model.device.type),
        limits=shape.limits,
        vocab_size=spec.vocab_size,
        eos_token_ids=loaded.generation.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        weights=model.weights,
        device=str(model.device),
        default_sampling=_default_sampling(loaded.generation),
        startup_s=startup_s,
        num_host_blocks=sizes.num_host_blocks,
        num_host_slots=sizes.num_host_slots,
        load_s=copies.load_s,
        store_s=copies.store_s,
        experts=None if spec.experts is None else ExpertChoice(spec.experts.count, spec.experts.top_k),
        block_bytes=block_bytes(loaded, sizes.groups) * ranks,
        pooling=None if pooling is None else pooling.info(pooling_head(model, pooling).width),
        windows=tuple(map(WindowPool, sizes.groups.windows, sizes.blocks[1:])),
        states=StatePool(sizes.num_slots, state_bytes(loaded)) if sizes.num_slots else None,
        adapters=None if adapters is None else adapters.pool(),
        reads=context_reads(loaded),
    )


def _default_sampling(generation: GenerationDefaults) -> dict[str, float | int]:
    values = asdict(generation)
    del values["eos_token_ids"]
    return {name: value for name, value in values.items() if value is not None}
