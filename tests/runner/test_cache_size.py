import pytest

from roseinfer.core.config.engine import CacheConfig
from roseinfer.core.errors import ConfigError
from roseinfer.runner import cache_size
from roseinfer.runner.cache_size import num_kv_blocks, resolve_max_model_len, spare_from


def unused() -> int:
    raise AssertionError("the default was looked at although a setting overrides it")


def test_explicit_blocks_come_before_bytes_before_the_default():
    assert num_kv_blocks(CacheConfig(num_kv_blocks=7, kv_cache_memory_bytes=10**9), 100, 50, unused) == 7
    assert num_kv_blocks(CacheConfig(kv_cache_memory_bytes=999), 100, 5, unused) == 9
    assert num_kv_blocks(CacheConfig(), 100, 50, lambda: 1234) == 12


def test_the_default_is_no_more_than_full_seats_need():
    assert num_kv_blocks(CacheConfig(), 100, 5, lambda: 10**9) == 5


def test_no_room_for_a_block_names_the_option():
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        num_kv_blocks(CacheConfig(kv_cache_memory_bytes=99), 100, 5, unused)
    for left in (99, -5):
        with pytest.raises(ConfigError, match="num_kv_blocks"):
            num_kv_blocks(CacheConfig(), 100, 5, lambda left=left: left)


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
