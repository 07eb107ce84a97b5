"""Size of each KV group in blocks, and the context length that it allows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import mul

from roseinfer.core.config.engine import CacheConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.memory import available_memory_bytes

CPU_CACHE_SHARE = 0.25  # upper bound of the default cache, in available memory
CPU_CACHE_BYTES = 4 * 2**30
# Full contexts whose blocks a CPU's default cache uses. Blocks beyond them serve concurrent requests only: memory is
# taken at first use, and old prefixes do not justify taking all of it.
MAX_CPU_CACHED_CONTEXTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDemand:
    """Needs of a model's KV groups. The first one keeps all tokens, each further one those of its window.

    block_bytes: size of a KV block in each group. windows: of the further groups. seats: requests that run at once.
    context, typical_context: the longest context and a typical one in tokens. step_tokens: those of a full step.
    """

    block_size: int
    block_bytes: tuple[int, ...]
    windows: tuple[int, ...] = ()
    seats: int
    context: int
    typical_context: int
    step_tokens: int

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def of_typical_context(self) -> tuple[int, ...]:
        """Blocks of each group for a typical context. A window may begin and end within a block."""
        whole = self.blocks(min(self.typical_context, self.context))
        return (whole, *(min(whole, self.blocks(window) + 2) for window in self.windows))

    @property
    def least_windows(self) -> tuple[int, ...]:
        """Blocks of each window group for one request, in a full step of its tokens."""
        return tuple(self.blocks(window + self.step_tokens) + 1 for window in self.windows)

    @property
    def most(self) -> tuple[int, ...]:
        """Blocks that are of use: for full contexts in all seats. Windows of as many cached prefixes are also kept."""
        windows = (2 * self.seats * (self.blocks(window) + 2) for window in self.windows)
        return (self.seats * self.blocks(self.context), *(self.blocks(self.step_tokens) + blocks for blocks in windows))


def num_kv_blocks(config: CacheConfig, demand: CacheDemand, default_bytes: Callable[[], int]) -> tuple[int, ...]:
    """Return the blocks of each KV group.

    The first group has `num_kv_blocks` if it is set. Else the memory is `kv_cache_memory_bytes` if that is set, else
    `default_bytes()`, of which no more is taken than is of use. Raise `ConfigError` if not even one block fits.
    """
    if config.num_kv_blocks is not None:
        contexts = Fraction(config.num_kv_blocks, demand.of_typical_context[0])
        return config.num_kv_blocks, *_window_blocks(demand, contexts)
    if config.kv_cache_memory_bytes is not None:
        blocks = _divide(config.kv_cache_memory_bytes, demand)
        if blocks[0] <= 0:
            given = config.kv_cache_memory_bytes
            raise ConfigError(f"kv_cache_memory_bytes is {given}, but {_least(demand)}; raise it")
        return blocks
    available = default_bytes()
    first, *windows = _divide(available, demand)
    if first <= 0:
        raise ConfigError(
            f"{max(0, available)} bytes of memory are left for the KV cache, but {_least(demand)}; "
            "set num_kv_blocks or kv_cache_memory_bytes, or raise gpu_memory_utilization on a GPU"
        )
    return min(first, demand.most[0]), *windows


def _divide(memory: int, demand: CacheDemand) -> tuple[int, ...]:
    """Return the blocks of each group in so many bytes. All groups are full with the same number of typical contexts,
    unless a window group has its most or least blocks.
    """
    first_bytes, *window_bytes = demand.block_bytes
    windows = _window_blocks(demand, Fraction(memory, _total(demand.block_bytes, demand.of_typical_context)))
    return (memory - _total(window_bytes, windows)) // first_bytes, *windows


def _window_blocks(demand: CacheDemand, contexts: Fraction) -> tuple[int, ...]:
    """Return the blocks of each window group in a cache of so many typical contexts."""
    sizes = zip(demand.of_typical_context[1:], demand.least_windows, demand.most[1:], strict=True)
    return tuple(max(least, min(int(contexts * each), most)) for each, least, most in sizes)


def _total(block_bytes: Sequence[int], blocks: Sequence[int]) -> int:
    return sum(map(mul, block_bytes, blocks))


def _least(demand: CacheDemand) -> str:
    """Return what the smallest cache takes, as the end of a sentence."""
    first_bytes, *window_bytes = demand.block_bytes
    if not window_bytes:
        return f"one block takes {first_bytes}"
    return f"one block takes {first_bytes}, and the attention windows of a full step take " + str(
        _total(window_bytes, demand.least_windows)
    )


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


def default_cpu_cache_bytes(engines: int = 1) -> int:
    """Return the default cache size of each of `engines` on this machine."""
    return min(int(available_memory_bytes() * CPU_CACHE_SHARE) // engines, CPU_CACHE_BYTES)
