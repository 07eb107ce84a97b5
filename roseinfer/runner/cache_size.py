"""Size of the KV cache in blocks, and the context length that it allows."""

from collections.abc import Callable

from roseinfer.core.config.engine import CacheConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.memory import available_memory_bytes

CPU_CACHE_SHARE = 0.25  # upper bound of the default cache, in available memory
CPU_CACHE_BYTES = 4 * 2**30
# Full contexts whose blocks a CPU's default cache uses. Blocks beyond them serve concurrent requests only: memory is
# taken at first use, and old prefixes do not justify taking all of it.
MAX_CPU_CACHED_CONTEXTS = 16


def num_kv_blocks(
    config: CacheConfig, bytes_per_block: int, blocks_of_use: int, default_bytes: Callable[[], int]
) -> int:
    """Return `num_kv_blocks` if it is set, else what `kv_cache_memory_bytes` holds, else what `default_bytes()` holds.

    `blocks_of_use`: upper bound of the default; blocks that all seats with full contexts would take. Raise
    `ConfigError` if not even one block fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    if config.kv_cache_memory_bytes is not None:
        blocks = config.kv_cache_memory_bytes // bytes_per_block
        if blocks == 0:
            given = config.kv_cache_memory_bytes
            raise ConfigError(
                f"kv_cache_memory_bytes is {given}, but one KV block takes {bytes_per_block} bytes; raise it"
            )
        return blocks
    available = default_bytes()
    blocks = min(blocks_of_use, available // bytes_per_block)
    if blocks <= 0:
        raise ConfigError(
            f"{max(0, available)} bytes of memory are left for the KV cache, but one block takes {bytes_per_block}; "
            "set num_kv_blocks or kv_cache_memory_bytes, or raise gpu_memory_utilization on a GPU"
        )
    return blocks


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
