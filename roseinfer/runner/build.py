"""Construction of a runner that is ready for its first plan, from a configuration and a model folder."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch

from roseinfer.adapters.memory import AdapterMemory
from roseinfer.attention.groups import KVGroups
from roseinfer.attention.host_store import GIB, check_host_memory, divide_host_memory
from roseinfer.attention.kv_fp8 import kv_dtype_of
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.select import resolve_backend
from roseinfer.core.adapters import AdapterFiles, AdapterRead
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.speculation import EagleValues, SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import StepLimits
from roseinfer.core.pooling import PoolingTask
from roseinfer.core.runner import ContextReads, ExpertChoice, RunnerFacts, StatePool, WindowPool
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.models.base import CausalLM
from roseinfer.models.config import read_model_spec
from roseinfer.models.encoders.registry import is_encoder
from roseinfer.models.generation import GenerationDefaults, read_generation_config
from roseinfer.models.loader import load_model, resolve_dtype
from roseinfer.models.pooling.config import PoolingSpec, read_pooling_spec
from roseinfer.models.spec import ModelSpec
from roseinfer.parallel.group import LiveGroup, SingleRank
from roseinfer.runner.assembly import Assembly, Shape, assemble, pooling_head
from roseinfer.runner.build_adapters import adapting_of, check_no_adapters, with_slots
from roseinfer.runner.build_encoder import build_encoder
from roseinfer.runner.build_head import check_head_backend, drafts_ahead, read_head, with_draft_head, without_used_head
from roseinfer.runner.cache_size import (
    CacheNeeds,
    PoolDemand,
    check_context,
    default_cpu_cache_bytes,
    default_typical_context,
    gpu_share_bytes,
    pool_sizes,
    resolve_max_model_len,
    spare_from,
)
from roseinfer.runner.device import rank_device
from roseinfer.runner.host_copies import CopyTimes, time_copies
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.phases import phase
from roseinfer.runner.pooling_runner import PoolingRunner
from roseinfer.runner.rehearsal import EDITED, FILTERED, GREEDY, PLAIN, full_step, rehearse
from roseinfer.runner.start_notes import log_start_notes, warn_of_small_cache, warn_of_unused_sizes, without_head

# Memory that the driver keeps for some tens of captured decode graphs; measured at 0.1 to 0.4 GB. Steps with drafts
# have up to 15 more, which keep results of 8,640 tokens.
GRAPH_BYTES, DRAFTED_GRAPH_BYTES = 512 << 20, 160 << 20
# A rehearsal on a CPU only loads what is loaded lazily; a full prefill would take seconds.
CPU_REHEARSAL_TOKENS = 32


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
        device = rank_device(config, group.rank, group.size)
        spec = read_model_spec(folder, config.model.max_model_len)
        pooling = read_pooling_spec(folder, config.model.model, config.model.runner, config.model.pooling)
        if pooling is not None:
            check_no_adapters(config.adapters, spec.architecture)
            config = replace(config, speculation=SpeculationConfig(speculation="off"))  # nothing is generated
            if pooling.task is PoolingTask.EMBED:
                spec = replace(spec, tied_embeddings=True)  # the head is not needed, and may be missing
                config = replace(config, model=without_head(config.model))
        dtype = resolve_dtype(spec, config.model.dtype, device)
        kv_dtype = kv_dtype_of(config.cache.kv_cache_dtype, dtype)
        if spec.quantization is None:
            _check_keys(spec, kv_dtype, (None,))
        _check_states(config, spec)
        head_spec = read_head(config.speculation, spec)
        layers = spec.attention if head_spec is None else (*spec.attention, head_spec.attention)
        backend = resolve_backend(config.model.attention_backend, layers, dtype, device, kv_dtype)
        if head_spec is not None:
            check_head_backend(config.model.attention_backend, backend, device)
        generation = read_generation_config(
            folder, config.model.generation_config, config.model.override_generation_config
        )
        check_context(config.model.max_model_len, spec.max_position)
        adapting = adapting_of(config.adapters, device)
        target = load_model(
            folder,
            spec,
            dtype=config.model.dtype,
            device=device,
            load_format=config.model.load_format,
            seed=config.model.seed,
            quantization=config.model.quantization,
            lm_head_dtype=config.model.lm_head_dtype,
            group=group,
            steady_text=config.speculation.recorded,
            adapting=adapting,
        )
        _check_keys(spec, kv_dtype, target.kv_scales)
        adapters = None if adapting is None else with_slots(config, adapting, target, group.size, on_read)
        model: CausalLM = target if head_spec is None else with_draft_head(config, head_spec, target, folder)
    with phase(startup_s, "cache"):
        groups = _kv_groups(config, model)
        pools = _pools(config, model, kv_dtype, groups)
        default_bytes = partial(_default_bytes, config, model, backend, kv_dtype, group.size, pooling, adapters)
        sizes = tuple(map(group.minimum, pool_sizes(config.cache, pools, default_bytes)))
        blocks, num_slots = sizes[: groups.count], sum(sizes[groups.count :])
        num_blocks, *window_blocks = blocks
        asked, cache_tokens = config.model.max_model_len, num_blocks * config.cache.block_size
        max_model_len = resolve_max_model_len(asked, spec.max_position, cache_tokens)
        if pooling is not None and pooling.max_tokens is not None and asked is None:
            max_model_len = min(max_model_len, pooling.max_tokens)
        if group.rank == 0:
            noted = without_used_head(spec, head_spec)
            warn_of_unused_sizes(config.cache, groups, num_slots)
            warn_of_small_cache(asked, spec.max_position, cache_tokens)
            hosted = config.cache.kv_offloading_size > 0
            log_start_notes(noted, folder, max_model_len, groups, blocks, num_slots, hosted=hosted)
        limits = StepLimits.of(config.scheduler, max_model_len, config.max_step_drafts)
        bytes_per_block = pools[0].item_bytes
        slot_bytes = pools[-1].item_bytes if num_slots else 0
        host_blocks, host_slots = divide_host_memory(
            config.cache.kv_offloading_size / group.size, bytes_per_block, num_slots / num_blocks, slot_bytes
        )
        shape = _shape(config, blocks, max_model_len, backend, kv_dtype, limits, groups)
        shape = replace(shape, num_slots=num_slots, pooling=pooling, adapters=adapters)
        shape = replace(shape, num_host_blocks=host_blocks, num_host_slots=host_slots)
        assembly = assemble(model, shape, group)
        _compile(assembly, model, shape)
    with phase(startup_s, "warm-up"):
        slots = (-1,) if adapters is None else (-1, 0)
        for slot in slots:
            _rehearse_whole(assembly, config, limits, _rehearsed(config, limits, device), blocks, pooling, slot)
        if device.type == "cuda":  # products of few rows use separate kernels
            for few in (1, 2, 4, 8, 16):
                for slot in slots:
                    rehearse(assembly.runner, assembly.seats, blocks, [min(few, limits.max_tokens)], adapter_slot=slot)
            for params in () if pooling else (PLAIN, EDITED):  # masks apply to logits of either dtype
                rehearse(assembly.runner, assembly.seats, blocks, [1], (params,), guided=True)
        copies = CopyTimes()
        if assembly.copier is not None:
            copies = time_copies(assembly.copier, num_blocks, host_blocks)
    if assembly.graphs:
        with phase(startup_s, "graphs"):
            assembly.capture()
            for params in (GREEDY, PLAIN, FILTERED, EDITED):
                pair = full_step(StepLimits(min(2, limits.max_rows), min(8, limits.max_tokens)), chunked=True)
                rehearse(assembly.runner, assembly.seats, blocks, pair, (params,))
    group.ready()
    facts = RunnerFacts(
        model_type=spec.architecture,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        spare_from=spare_from(config.cache, max_model_len, device.type),
        limits=limits,
        vocab_size=spec.vocab_size,
        eos_token_ids=generation.eos_token_ids,
        dtype=str(model.dtype).removeprefix("torch."),
        weights=model.weights,
        device=str(device),
        default_sampling=_default_sampling(generation),
        startup_s=startup_s,
        num_host_blocks=host_blocks,
        num_host_slots=host_slots,
        load_s=copies.load_s,
        store_s=copies.store_s,
        experts=None if spec.experts is None else ExpertChoice(spec.experts.count, spec.experts.top_k),
        block_bytes=bytes_per_block * group.size,
        pooling=None if pooling is None else pooling.info(pooling_head(model, pooling).width),
        windows=tuple(map(WindowPool, groups.windows, window_blocks)),
        states=StatePool(num_slots, _state_bytes(config, model)) if num_slots else None,
        adapters=None if adapters is None else adapters.pool(),
        reads=_reads(config, model, kv_dtype),
    )
    return BuiltRunner(assembly.runner, facts, adapters)


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


def _check_keys(spec: ModelSpec, kv_dtype: torch.dtype, scales: Sequence[KVScales | None]) -> None:
    """Raise `ConfigError` if the model's keys do not fit `kv_dtype`. `scales`: one per layer."""
    if kv_dtype == CODES and spec.qkv_bias and not spec.qk_norm and None in scales:
        raise ConfigError(
            f"kv_cache_dtype is fp8, but the keys of {spec.architecture} have a bias, which makes some of their "
            "dimensions too large for FP8 without scales, and the checkpoint has none"
        )


def _kv_groups(config: EngineConfig, model: CausalLM) -> KVGroups:
    """Return the model's KV groups. Blocks in host memory hold all layers, so there is one group then."""
    if not config.cache.enable_window_groups or config.cache.kv_offloading_size:
        return KVGroups.single(len(model.attention))
    return KVGroups.by_window(model.attention, config.model.max_model_len or model.spec.max_position)


def _pools(config: EngineConfig, model: CausalLM, kv_dtype: torch.dtype, groups: KVGroups) -> list[PoolDemand]:
    """Return the demand of each KV group, and then of the model's recurrent states if it has any."""
    layers = [groups.specs_of(group, model.attention) for group in range(groups.count)]
    first, *further = [KVStore.bytes_per_block(specs, config.cache.block_size, kv_dtype) for specs in layers]
    context = config.model.max_model_len or model.spec.max_position
    needs = CacheNeeds(
        block_size=config.cache.block_size,
        seats=config.scheduler.seats,
        context=context,
        typical_context=config.cache.typical_context or default_typical_context(groups.windows, context),
        step_tokens=StepLimits.of(config.scheduler, context, config.max_step_drafts).max_tokens,
    )
    pools = [needs.all_tokens(first), *map(needs.window, further, groups.windows)]
    specs = model.state_specs(config.max_row_drafts)
    if specs:
        slot_bytes = sum(spec.bytes_per_slot for spec in specs)
        pools.append(needs.states(slot_bytes, config.cache.state_slots))
    return pools


def _state_bytes(config: EngineConfig, model: CausalLM) -> int:
    """Return the bytes of a slot of recurrent states, over all ranks."""
    return model.spec.state_bytes(str(model.dtype).removeprefix("torch."), config.max_row_drafts)


def _reads(config: EngineConfig, model: CausalLM, kv_dtype: torch.dtype) -> ContextReads:
    """Return what rows read of their contexts, by bytes. A state is read and written."""
    sizes: Counter[int | None] = Counter()
    for spec in model.attention:
        sizes[spec.window] += KVStore.bytes_per_block((spec,), 1, kv_dtype)
    token_bytes = sizes.total()
    windows = tuple([(window, size / token_bytes) for window, size in sizes.items() if window is not None])
    slot_bytes = sum(spec.bytes_per_slot for spec in model.state_specs(config.max_row_drafts))
    return ContextReads(windows, 2 * slot_bytes / token_bytes if slot_bytes else 0.0)


def _check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise `ConfigError` for options that exclude a model with recurrent states."""
    if not spec.deltas:
        return
    if isinstance(config.speculation.values, EagleValues):
        name = config.speculation.speculation
        raise ConfigError(f"speculation {name!r} is not supported by {spec.architecture}, which has recurrent states")


def _default_bytes(
    config: EngineConfig,
    model: CausalLM,
    backend: str,
    kv_dtype: torch.dtype,
    ranks: int,
    pooling: PoolingSpec | None,
    adapters: AdapterMemory | None,
) -> int:
    """Return the memory of the KV cache if no option says it."""
    if model.device.type == "cpu":
        return default_cpu_cache_bytes(config.engines * ranks, 0 if adapters is None else adapters.device_bytes)
    return free_cuda_bytes(config, model, backend, kv_dtype, pooling, adapters)


def _rehearsed(config: EngineConfig, limits: StepLimits, device: torch.device) -> list[int]:
    """Return the lengths of the prompts of a rehearsal: a full step, or a small one on a CPU."""
    if device.type == "cpu":
        limits = StepLimits(min(2, limits.max_rows), min(CPU_REHEARSAL_TOKENS, limits.max_tokens))
    return full_step(limits, config.scheduler.enable_chunked_prefill)


def _rehearse_whole(
    assembly: Assembly,
    config: EngineConfig,
    limits: StepLimits,
    lengths: Sequence[int],
    num_blocks: Sequence[int],
    pooling: PoolingSpec | None,
    adapter_slot: int = -1,
) -> None:
    """Rehearse prompts of these lengths with all that their rows may ask for: every position, or drafts."""
    rehearse(
        assembly.runner,
        assembly.seats,
        num_blocks,
        lengths,
        every_position=pooling is not None and pooling.method.needs_every_position,
        drafts=_rehearsed_drafts(limits, lengths, assembly.seats.device),
        ahead=drafts_ahead(config.speculation),
        adapter_slot=adapter_slot,
    )


def _rehearsed_drafts(limits: StepLimits, lengths: Sequence[int], device: torch.device) -> int:
    """Return the drafts of a rehearsal after prompts of these lengths: those of a full step, or a few on a CPU."""
    most = min(limits.max_drafts, limits.max_tokens - len(lengths))
    return min(most, len(lengths)) if device.type == "cpu" else most


def _shape(
    config: EngineConfig,
    num_blocks: tuple[int, ...],
    max_model_len: int,
    backend: str,
    kv_dtype: torch.dtype,
    limits: StepLimits,
    groups: KVGroups,
) -> Shape:
    return Shape(
        config.cache.block_size,
        num_blocks[0],
        config.scheduler.seats,
        max_model_len,
        limits,
        # A burst step takes so long that launching its kernels one by one does not matter.
        config.scheduler.max_num_batched_tokens if config.scheduler.enable_chunked_prefill else limits.max_tokens,
        backend=backend,
        kv_dtype=kv_dtype,
        graphs=not config.model.enforce_eager,
        groups=groups,
        window_blocks=num_blocks[1:],
        max_ahead=drafts_ahead(config.speculation),
        row_drafts=config.max_row_drafts,
    )


def free_cuda_bytes(
    config: EngineConfig,
    model: CausalLM,
    backend: str,
    kv_dtype: torch.dtype,
    pooling: PoolingSpec | None = None,
    adapters: AdapterMemory | None = None,
) -> int:
    """Return GPU memory for the KV cache: the configured share of the total, less memory in use and that of a full
    step.

    A full step runs over a small scratch cache to measure its peak. CUDA graphs need a pool of the size of a decode
    step, and the driver keeps memory for the graphs.
    """
    # If the cache is too small, the context will be shorter; then this estimate is cautious.
    context = min(config.model.max_model_len or model.spec.max_position, model.spec.max_position)
    limits = StepLimits.of(config.scheduler, context, config.max_step_drafts)
    lengths = full_step(limits, config.scheduler.enable_chunked_prefill)
    context = min(context, limits.max_tokens)
    groups = _kv_groups(config, model)
    num_blocks = (sum(length // config.cache.block_size + 1 for length in lengths),) * groups.count
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    shape = _shape(config, num_blocks, context, backend, kv_dtype, limits, groups)
    # States of all rows would take most of the memory, so rows share two slots.
    shape = replace(shape, graphs=False, max_num_seqs=limits.max_rows, num_slots=2, pooling=pooling, adapters=adapters)
    assembly = assemble(model, shape)
    _compile(assembly, model, shape)
    torch.cuda.reset_peak_memory_stats(model.device)
    try:
        slot = -1 if adapters is None else 0
        _rehearse_whole(assembly, config, limits, lengths, num_blocks, pooling, slot)
    except torch.OutOfMemoryError as error:
        chunked = config.scheduler.enable_chunked_prefill
        options = "max_num_batched_tokens" if chunked else "max_model_len, or let prompts be chunked"
        raise ConfigError(f"out of memory for a step of {limits.max_tokens} tokens; lower {options}") from error
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    captures = assembly.graphable and not config.model.enforce_eager
    del assembly
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    sets = 1 if adapters is None else 2  # steps with adapters have graphs of their own
    each = GRAPH_BYTES + (DRAFTED_GRAPH_BYTES if limits.max_drafts else 0)
    graphs = sets * each + step_bytes * shape.captured_tokens // limits.max_tokens // 2 if captures else 0
    return gpu_share_bytes(config, free, total, torch.cuda.memory_reserved(model.device)) - step_bytes - graphs


def _compile(assembly: Assembly, model: CausalLM, shape: Shape) -> None:
    """Compile all kernels if they are ours. Other backends' kernels would run on memory that ours have not written."""
    if shape.backend == "triton" and model.device.type == "cuda":
        from roseinfer.runner.compile_ahead import compile_ahead

        compile_ahead(assembly, model, shape.limits)


def _default_sampling(generation: GenerationDefaults) -> dict[str, float | int]:
    values = asdict(generation)
    del values["eos_token_ids"]
    return {name: value for name, value in values.items() if value is not None}
