from dataclasses import replace

import pytest

from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig
from roseinfer.core.errors import ConfigError
from roseinfer.runner import cache_size
from roseinfer.runner.cache_size import (
    CONTEXT_BYTES,
    DEFAULT_TYPICAL_TOKENS,
    CacheNeeds,
    default_typical_context,
    gpu_share_bytes,
    pool_sizes,
    resolve_max_model_len,
    spare_from,
)


def unused() -> int:
    raise AssertionError("the default was looked at although a setting overrides it")


NEEDS = CacheNeeds(block_size=16, seats=40, context=16_000, typical_context=1600, step_tokens=64)
# Blocks of 100 bytes in 5 seats of 160 tokens.
ONE_GROUP = [replace(NEEDS, seats=5, context=160).all_tokens(100)]
# A typical context takes 100 blocks of 50 bytes, and 6 of 500 for the window.
WINDOWED = [NEEDS.all_tokens(50), NEEDS.window(500, 64)]
# It takes 2 slots of 2,500 bytes.
STATEFUL = [NEEDS.all_tokens(50), NEEDS.states(2500, None)]


def test_explicit_blocks_come_before_bytes_before_the_default():
    assert pool_sizes(CacheConfig(num_kv_blocks=7, kv_cache_memory_bytes=10**9), ONE_GROUP, unused) == (7,)
    assert pool_sizes(CacheConfig(kv_cache_memory_bytes=999), ONE_GROUP, unused) == (9,)
    assert pool_sizes(CacheConfig(), ONE_GROUP, lambda: 1234) == (12,)


def test_the_default_is_no_more_than_full_seats_need():
    assert pool_sizes(CacheConfig(), ONE_GROUP, lambda: 10**9) == (50,)
    assert pool_sizes(CacheConfig(), WINDOWED, lambda: 10**9) == (40 * 1000, 2 * 40 * 6 + 4)


def test_no_room_for_a_block_names_the_option():
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes is 99, but one block takes 100; raise it"):
        pool_sizes(CacheConfig(kv_cache_memory_bytes=99), ONE_GROUP, unused)
    for left in (99, -5):
        with pytest.raises(ConfigError, match="num_kv_blocks"):
            pool_sizes(CacheConfig(), ONE_GROUP, lambda left=left: left)
    with pytest.raises(ConfigError, match="takes 50, and the least windows and states take 4500; raise it"):
        pool_sizes(CacheConfig(kv_cache_memory_bytes=4549), WINDOWED, unused)


def test_typical_contexts_exhaust_all_groups_together():
    for contexts in (2, 7, 30):
        memory = contexts * (100 * 50 + 6 * 500)
        assert pool_sizes(CacheConfig(), WINDOWED, lambda memory=memory: memory) == (contexts * 100, contexts * 6)
        assert pool_sizes(CacheConfig(num_kv_blocks=contexts * 100), WINDOWED, unused)[1] == contexts * 6
    assert pool_sizes(CacheConfig(), WINDOWED, lambda: 100 * 8000) == ((100 * 8000 - 484 * 500) // 50, 484)


@pytest.mark.parametrize(
    ("full", "windowed", "window", "most"),
    [(12, 12, 128, 0.52), (10, 52, 1024, 0.3)],
    ids=["gpt-oss-20b", "Gemma 3 27B"],
)
def test_long_contexts_take_little_memory_beyond_the_windows(full, windowed, window, most):
    needs = replace(NEEDS, context=131_072, typical_context=32_768)
    pools = [needs.all_tokens(full), needs.window(windowed, window)]
    assert sum(pool.item_bytes * pool.typical for pool in pools) <= most * (full + windowed) * pools[0].typical


def test_a_small_cache_holds_the_windows_of_one_full_step():
    # A window of 64 tokens and a step of 64.
    assert pool_sizes(CacheConfig(num_kv_blocks=3), WINDOWED, unused) == (3, 9)
    assert pool_sizes(CacheConfig(kv_cache_memory_bytes=4550), WINDOWED, unused) == (1, 9)


def test_by_default_a_typical_context_is_between_window_and_context():
    assert default_typical_context((1024, 128), 16_384) == 4096
    assert default_typical_context((), 16_384) == DEFAULT_TYPICAL_TOKENS


def test_a_typical_context_is_no_longer_than_the_longest():
    short = replace(NEEDS, context=320, typical_context=8192)
    pools = [short.all_tokens(50), short.window(500, 64)]
    assert pool_sizes(CacheConfig(num_kv_blocks=200), pools, unused) == (200, 60)


def test_slots_of_states_are_divided_like_blocks():
    assert pool_sizes(CacheConfig(), STATEFUL, lambda: 7 * 10_000) == (700, 14)
    assert pool_sizes(CacheConfig(num_kv_blocks=150), STATEFUL, unused) == (150, 3)
    assert pool_sizes(CacheConfig(num_kv_blocks=3), STATEFUL, unused) == (3, 2), "a request and a snapshot"
    assert pool_sizes(CacheConfig(), STATEFUL, lambda: 10**9)[1] == 4 * 40
    fixed = [NEEDS.all_tokens(50), NEEDS.window(500, 64), NEEDS.states(2500, 9)]
    assert pool_sizes(CacheConfig(), fixed, lambda: 9 * 2500 + 7 * 8000) == (700, 42, 9)


def test_context_is_the_models_limited_by_the_cache():
    assert resolve_max_model_len(None, 1024, 4096) == 1024
    assert resolve_max_model_len(None, 1024, 320) == 320
    assert resolve_max_model_len(512, 1024, 4096) == 512


def test_an_impossible_context_is_refused_by_name():
    with pytest.raises(ConfigError, match="max_model_len is 2048, but the model's context is 1024"):
        resolve_max_model_len(2048, 1024, 4096)
    with pytest.raises(ConfigError, match="max_model_len is 512, but the KV cache holds 320"):
        resolve_max_model_len(512, 1024, 320)


def test_a_cpus_default_cache_covers_some_full_contexts():
    """Use 16 contexts of 100 tokens, 7 blocks each."""
    assert spare_from(CacheConfig(), 100, "cpu") == 16 * 7
    assert spare_from(CacheConfig(), 100, "cuda") is None
    assert spare_from(CacheConfig(num_kv_blocks=500), 100, "cpu") is None
    assert spare_from(CacheConfig(kv_cache_memory_bytes=10**9), 100, "cpu") is None


def test_engines_on_one_cpu_share_the_default_cache(monkeypatch):
    monkeypatch.setattr(cache_size, "available_memory_bytes", lambda: 8 * 2**30)
    assert [cache_size.default_cpu_cache_bytes(engines) for engines in (1, 2, 4)] == [2**31, 2**30, 2**29]


def test_ranks_on_one_gpu_share_its_memory() -> None:
    """Memory of the other ranks is in use, but no part of this one's share."""
    total, reserved = 100 << 30, 10 << 30
    config = EngineConfig(model=ModelConfig(tensor_parallel_size=2), cache=CacheConfig(gpu_memory_utilization=0.5))
    free = total - 2 * reserved
    assert gpu_share_bytes(config, free, total, reserved) == total // 2 - 2 * reserved
    config = replace(config, ranks_on_one_gpu=True)
    own = total // 4 - reserved - CONTEXT_BYTES
    assert gpu_share_bytes(config, free, total, reserved) == own
    assert gpu_share_bytes(config, 20 << 30, total, reserved) == 10 << 30, "other programs use the GPU"


def test_models_on_one_gpu_have_shares_of_their_own() -> None:
    total, reserved = 100 << 30, 10 << 30
    config = EngineConfig(cache=CacheConfig(gpu_memory_utilization=0.5), shares_gpu=True)
    assert gpu_share_bytes(config, total // 2, total, reserved) == total // 2 - reserved - CONTEXT_BYTES
