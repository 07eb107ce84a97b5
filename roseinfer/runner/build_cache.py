"""Sizes of a loaded model's KV cache, as options and memory allow, and the runner's shape with them."""

from collections import Counter
from dataclasses import dataclass, replace

import torch

from roseinfer.attention.groups import KVGroups
from roseinfer.attention.host_store import divide_host_memory
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.errors import ConfigError
from roseinfer.core.plan import StepLimits
from roseinfer.core.runner import ContextReads
from roseinfer.models.base import CausalLM
from roseinfer.parallel.group import LiveGroup
from roseinfer.runner.assembly import Assembly, Shape, assemble
from roseinfer.runner.build_head import drafts_ahead
from roseinfer.runner.build_model import LoadedModel
from roseinfer.runner.cache_size import (
    CacheNeeds,
    PoolDemand,
    default_cpu_cache_bytes,
    default_typical_context,
    gpu_share_bytes,
    pool_sizes,
    resolve_max_model_len,
)
from roseinfer.runner.rehearsal import full_step
from roseinfer.runner.warm_up import rehearse_whole

# Memory that the driver keeps for some tens of captured decode graphs; measured at 0.1 to 0.4 GB. Steps with drafts
# have up to 15 more, which keep results of 8,640 tokens.
GRAPH_BYTES, DRAFTED_GRAPH_BYTES = 512 << 20, 160 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Sizes of the pools of one process's cache, and the context length that they allow.

    blocks: of each of `groups`. Slots are for recurrent states.
    """

    groups: KVGroups
    blocks: tuple[int, ...]
    num_slots: int
    max_model_len: int
    num_host_blocks: int = 0
    num_host_slots: int = 0


def size_cache(loaded: LoadedModel, group: LiveGroup) -> CacheSizes:
    """Return the sizes that all ranks of the group have memory for. Raise `ConfigError` if it is short."""
    config, spec, pooling = loaded.config, loaded.spec, loaded.pooling
    groups = _kv_groups(loaded)
    pools = _pools(loaded, groups)
    sizes = tuple(map(group.minimum, pool_sizes(config.cache, pools, lambda: _default_bytes(loaded, group.size))))
    blocks, num_slots = sizes[: groups.count], sum(sizes[groups.count :])
    asked = config.model.max_model_len
    max_model_len = resolve_max_model_len(asked, spec.max_position, blocks[0] * config.cache.block_size)
    if pooling is not None and pooling.max_tokens is not None and asked is None:
        max_model_len = min(max_model_len, pooling.max_tokens)
    host_blocks, host_slots = divide_host_memory(
        config.cache.kv_offloading_size / group.size,
        pools[0].item_bytes,
        num_slots / blocks[0],
        pools[-1].item_bytes if num_slots else 0,
    )
    return CacheSizes(
        groups=groups,
        blocks=blocks,
        num_slots=num_slots,
        max_model_len=max_model_len,
        num_host_blocks=host_blocks,
        num_host_slots=host_slots,
    )


def shape_of(loaded: LoadedModel, sizes: CacheSizes) -> Shape:
    """Return the shape of a runner with a cache of these sizes."""
    config = loaded.config
    limits = StepLimits.of(config.scheduler, sizes.max_model_len, config.max_step_drafts)
    return Shape(
        config.cache.block_size,
        sizes.blocks[0],
        config.scheduler.seats,
        sizes.max_model_len,
        limits,
        # A burst step takes so long that launching its kernels one by one does not matter.
        config.scheduler.max_num_batched_tokens if config.scheduler.enable_chunked_prefill else limits.max_tokens,
        backend=loaded.backend,
        kv_dtype=loaded.kv_dtype,
        graphs=not config.model.enforce_eager,
        groups=sizes.groups,
        window_blocks=sizes.blocks[1:],
        num_slots=sizes.num_slots,
        num_host_blocks=sizes.num_host_blocks,
        num_host_slots=sizes.num_host_slots,
        pooling=loaded.pooling,
        max_ahead=drafts_ahead(config.speculation),
        row_drafts=config.max_row_drafts,
        adapters=loaded.adapters,
    )


def block_bytes(loaded: LoadedModel, groups: KVGroups, group: int = 0) -> int:
    """Return the bytes of this process's part of a block of a KV group."""
    specs = groups.specs_of(group, loaded.model.attention)
    return KVStore.bytes_per_block(specs, loaded.config.cache.block_size, loaded.kv_dtype)


def state_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of a slot of recurrent states, over all ranks."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return loaded.model.spec.state_bytes(dtype, loaded.config.max_row_drafts)


def context_reads(loaded: LoadedModel) -> ContextReads:
    """Return what rows read of their contexts, by bytes. A state is read and written."""
    model, sizes = loaded.model, Counter[int | None]()
    for spec in model.attention:
        sizes[spec.window] += KVStore.bytes_per_block((spec,), 1, loaded.kv_dtype)
    token_bytes = sizes.total()
    windows = tuple([(window, size / token_bytes) for window, size in sizes.items() if window is not None])
    return ContextReads(windows, 2 * _slot_bytes(loaded) / token_bytes)


def compile_kernels(assembly: Assembly, model: CausalLM, shape: Shape) -> None:
    """Compile all kernels if they are ours. Other backends' kernels would run on memory that ours have not written."""
    if shape.backend == "triton" and model.device.type == "cuda":
        from roseinfer.runner.compile_ahead import compile_ahead

        compile_ahead(assembly, model, shape.limits)


def free_cuda_bytes(loaded: LoadedModel) -> int:
    """Return GPU memory for the KV cache: the configured share of the total, less memory in use and that of a full
    step.

    A full step runs over a small scratch cache to measure its peak. CUDA graphs need a pool of the size of a decode
    step, and the driver keeps memory for the graphs.
    """
    config, model = loaded.config, loaded.model
    shape, lengths = _scratch_shape(loaded)
    limits = shape.limits
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    assembly = assemble(model, shape)
    compile_kernels(assembly, model, shape)
    torch.cuda.reset_peak_memory_stats(model.device)
    try:
        rehearse_whole(assembly, shape, lengths, -1 if loaded.adapters is None else 0)
    except torch.OutOfMemoryError as error:
        chunked = config.scheduler.enable_chunked_prefill
        options = "max_num_batched_tokens" if chunked else "max_model_len, or let prompts be chunked"
        raise ConfigError(f"out of memory for a step of {limits.max_tokens} tokens; lower {options}") from error
    step_bytes = torch.cuda.max_memory_allocated(model.device) - before
    captures = assembly.graphable and not config.model.enforce_eager
    del assembly
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    sets = 1 if loaded.adapters is None else 2  # steps with adapters have graphs of their own
    each = GRAPH_BYTES + (DRAFTED_GRAPH_BYTES if limits.max_drafts else 0)
    graphs = sets * each + step_bytes * shape.captured_tokens // limits.max_tokens // 2 if captures else 0
    return gpu_share_bytes(config, free, total, torch.cuda.memory_reserved(model.device)) - step_bytes - graphs


def _scratch_shape(loaded: LoadedModel) -> tuple[Shape, list[int]]:
    """Return the shape of a runner whose cache holds the prompts of a full step, and the lengths of these.

    If the cache is too small, the context will be shorter than here; then the estimate is cautious.
    """
    config, groups = loaded.config, _kv_groups(loaded)
    limits = StepLimits.of(config.scheduler, _context(loaded), config.max_step_drafts)
    lengths = full_step(limits, config.scheduler.enable_chunked_prefill)
    num_blocks = sum(length // config.cache.block_size + 1 for length in lengths)
    scratch = CacheSizes(
        groups=groups,
        blocks=(num_blocks,) * groups.count,
        num_slots=2,  # states of all rows would take most of the memory, so rows share them
        max_model_len=min(_context(loaded), limits.max_tokens),
    )
    return replace(shape_of(loaded, scratch), limits=limits, graphs=False, max_num_seqs=limits.max_rows), lengths


def _context(loaded: LoadedModel) -> int:
    """Return the longest context in tokens, if the cache holds it."""
    return loaded.config.model.max_model_len or loaded.model.spec.max_position


def _default_bytes(loaded: LoadedModel, ranks: int) -> int:
    """Return the memory of the KV cache if no option says it."""
    if loaded.model.device.type == "cpu":
        adapters = loaded.adapters
        return default_cpu_cache_bytes(loaded.config.engines * ranks, 0 if adapters is None else adapters.device_bytes)
    return free_cuda_bytes(loaded)


def _kv_groups(loaded: LoadedModel) -> KVGroups:
    """Return the model's KV groups. Blocks in host memory hold all layers, so there is one group then."""
    cache, attention = loaded.config.cache, loaded.model.attention
    if not cache.enable_window_groups or cache.kv_offloading_size:
        return KVGroups.single(len(attention))
    return KVGroups.by_window(attention, _context(loaded))


def _pools(loaded: LoadedModel, groups: KVGroups) -> list[PoolDemand]:
    """Return the demand of each KV group, and then of the model's recurrent states if it has any."""
    config, context = loaded.config, _context(loaded)
    first, *further = [block_bytes(loaded, groups, group) for group in range(groups.count)]
    needs = CacheNeeds(
        block_size=config.cache.block_size,
        seats=config.scheduler.seats,
        context=context,
        typical_context=config.cache.typical_context or default_typical_context(groups.windows, context),
        step_tokens=StepLimits.of(config.scheduler, context, config.max_step_drafts).max_tokens,
    )
    pools = [needs.all_tokens(first), *map(needs.window, further, groups.windows)]
    if slot_bytes := _slot_bytes(loaded):
        pools.append(needs.states(slot_bytes, config.cache.state_slots))
    return pools


def _slot_bytes(loaded: LoadedModel) -> int:
    """Return the bytes of this process's part of a slot of recurrent states, 0 for a model without them."""
    return sum(spec.bytes_per_slot for spec in loaded.model.state_specs(loaded.config.max_row_drafts))
