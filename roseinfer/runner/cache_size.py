"""Sizes of the pools of blocks and slots, and the context length that it allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from roseinfer.core.config.engine import CacheConfig, EngineConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.memory import available_memory_bytes

CPU_CACHE_SHARE = 0.25  # upper bound of the default cache, in available memory
CPU_CACHE_BYTES = 4 * 2**30
# Full contexts whose blocks a CPU's default cache uses. Blocks beyond them serve concurrent requests only: memory is
# taken at first use, and old prefixes do not justify taking all of it.
MAX_CPU_CACHED_CONTEXTS = 16
# GPU memory of a process outside of PyTorch's allocator: its context, the code of its kernels, and what GPUs exchange.
CONTEXT_BYTES = 1 << 30


# Slots of recurrent states for each typical context: the state of a running request, and a snapshot. All seats together
# use no more than four each.
TYPICAL_SLOT_COUNT, MAX_SEAT_SLOT_COUNT, MIN_SLOT_COUNT = 2, 4, 2
DEFAULT_TYPICAL_TOKENS = 8192


def default_typical_context(windows: Sequence[int], context: int) -> int:
    """Return the default of `typical_context`. windows: of the KV groups. context: the longest, in tokens.

    Between windows and context it is the geometric mean. A smaller value costs long contexts, a larger one short ones.
    """
    return isqrt(max(windows) * context) if windows else DEFAULT_TYPICAL_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDemand:
    """Demand for the blocks of a KV group, or for slots of recurrent states.

    item_bytes: size of a block or slot. typical: how many a typical context takes. least, most: bounds of the pool.
    """

    item_bytes: int
    typical: int
    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheNeeds:
    """Facts by which the pools of a cache are sized.

    seats: requests that run at once. context, typical_context: the longest context and a typical one in tokens.
    step_tokens: those of a full step.
    """

    block_size: int
    seats: int
    context: int
    typical_context: int
    step_tokens: int

    def all_tokens(self, block_bytes: int) -> PoolDemand:
        """Return the demand of the first KV group, which keeps all tokens. More than all seats fill is of no use."""
        typical = self._blocks(min(self.typical_context, self.context))
        return PoolDemand(
            item_bytes=block_bytes, typical=typical, least=1, most=self.seats * self._blocks(self.context)
        )

    def window(self, block_bytes: int, window: int) -> PoolDemand:
        """Return the demand of a KV group that keeps windows.

        At least one request runs in a full step. Windows of all seats and of as many cached prefixes are of use. A
        window may begin and end within a block.
        """
        each, step = self._blocks(window) + 2, self._blocks(self.step_tokens)
        return PoolDemand(
            item_bytes=block_bytes,
            typical=min(self._blocks(min(self.typical_context, self.context)), each),
            least=self._blocks(window + self.step_tokens) + 1,
            most=2 * self.seats * each + step,
        )

    def states(self, slot_bytes: int, wanted: int | None) -> PoolDemand:
        """Return the demand of recurrent states. wanted: number of slots if it is set."""
        if wanted is not None:
            return PoolDemand(item_bytes=slot_bytes, typical=0, least=wanted, most=wanted)
        most = MAX_SEAT_SLOT_COUNT * self.seats
        return PoolDemand(item_bytes=slot_bytes, typical=TYPICAL_SLOT_COUNT, least=MIN_SLOT_COUNT, most=most)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)


def pool_sizes(config: CacheConfig, pools: Sequence[PoolDemand], default_bytes: Callable[[], int]) -> tuple[int, ...]:
    """Return the size of each pool. The first one is that of the first KV group.

    It has `num_kv_blocks` if that is set. Else the memory is `kv_cache_memory_bytes` if that is set, else
    `default_bytes()`, of which no more is taken than is of use. Raise `ConfigError` if not even one block fits.
    """
    first, *others = pools
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks, *_for_contexts(others, Fraction(config.num_kv_blocks, first.typical))
    if config.kv_cache_memory_bytes is not None:
        sizes = _divide(config.kv_cache_memory_bytes, pools)
        if sizes[0] <= 0:
            given = config.kv_cache_memory_bytes
            raise ConfigError(f"kv_cache_memory_bytes is {given}, but {_least(pools)}; raise it")
        return sizes
    available = default_bytes()
    blocks, *rest = _divide(available, pools)
    if blocks <= 0:
        raise ConfigError(
            f"{max(0, available)} bytes of memory are left for the KV cache, but {_least(pools)}; "
            "set num_kv_blocks or kv_cache_memory_bytes, or raise gpu_memory_utilization on a GPU"
        )
    return min(blocks, first.most), *rest


def _divide(memory: int, pools: Sequence[PoolDemand]) -> tuple[int, ...]:
    """Return the sizes of pools in so many bytes. All are full with the same number of typical contexts, unless one has
    its least or most size. The first one gets the rest.
    """
    first, *others = pools
    fixed = sum(pool.item_bytes * pool.least for pool in others if not pool.typical)
    each = sum(pool.item_bytes * pool.typical for pool in pools)
    sizes = _for_contexts(others, Fraction(memory - fixed, each))
    rest = memory - sum(pool.item_bytes * size for pool, size in zip(others, sizes, strict=True))
    return rest // first.item_bytes, *sizes


def _for_contexts(pools: Sequence[PoolDemand], contexts: Fraction) -> tuple[int, ...]:
    """Return the sizes of pools after the first in a cache for so many typical contexts."""
    return tuple(max(pool.least, min(int(contexts * pool.typical), pool.most)) for pool in pools)


def _least(pools: Sequence[PoolDemand]) -> str:
    """Return what the smallest cache takes, as the end of a sentence."""
    first, *others = pools
    if not others:
        return f"one block takes {first.item_bytes}"
    taken = sum(pool.item_bytes * pool.least for pool in others)
    return f"one block takes {first.item_bytes}, and the least windows and states take {taken}"


def check_context(wanted: int | None, model_context: int) -> None:
    """Raise `ConfigError` if `wanted` exceeds the model's context. Call it before weights are read."""
    if wanted is not None and wanted > model_context:
        raise ConfigError(f"max_model_len is {wanted}, but the model's context is {model_context} tokens")


def resolve_max_model_len(wanted: int | None, model_context: int, cache_tokens: int) -> int:
    """Return the context in tokens: `wanted`, or the model's as far as the cache holds it.

    Raise `ConfigError` if `wanted` exceeds what the model or the cache supports.
    """
    check_context(wanted, model_context)
    if wanted is None:
        return min(model_context, cache_tokens)
    if wanted > cache_tokens:
        raise ConfigError(
            f"max_model_len is {wanted}, but the KV cache holds {cache_tokens} tokens; lower it, or raise "
            "num_kv_blocks or kv_cache_memory_bytes"
        )
    return wanted


def spare_from(config: CacheConfig, context: int, device: str) -> int | None:
    """Return the first block that is used only if no other is free; None if all are alike.

    `context`: in tokens. All blocks are alike on a GPU, and if the size of the cache was configured.
    """
    if device != "cpu" or config.num_kv_blocks is not None or config.kv_cache_memory_bytes is not None:
        return None
    return MAX_CPU_CACHED_CONTEXTS * -(-context // config.block_size)


def default_cpu_cache_bytes(engines: int = 1, others: int = 0) -> int:
    """Return the default cache size of each of `engines` on this machine. others: bytes that each of them will use
    for something else.
    """
    return min(int((available_memory_bytes() - engines * others) * CPU_CACHE_SHARE) // engines, CPU_CACHE_BYTES)


def gpu_share_bytes(config: EngineConfig, free: int, total: int, reserved: int) -> int:
    """Return the bytes that are left of a process's share of its GPU's memory.

    `free`, `total`: of the GPU. `reserved`: by PyTorch in this process. Memory of other models' engines and of other
    ranks on the GPU is no part of the share.
    """
    ranks = config.model.tensor_parallel_size if config.ranks_on_one_gpu else 1
    shared = config.shares_gpu or ranks > 1
    in_use = reserved + CONTEXT_BYTES if shared else total - free
    return min(int(total * config.cache.gpu_memory_utilization) // ranks - in_use, free // ranks)
