"""The option groups that commands share."""

from collections.abc import Mapping
from typing import Any

from roseinfer.core.config import CacheConfig, EngineConfig, ModelConfig, ProfileConfig, SchedulerConfig
from roseinfer.options import Group, OptionSet

MODEL = Group(ModelConfig, "model", positional="model")
CACHE = Group(CacheConfig, "KV cache")
SCHEDULER = Group(SchedulerConfig, "scheduler")
PROFILE = Group(ProfileConfig, "profiling")
ENGINE = (MODEL, CACHE, SCHEDULER, PROFILE)


def engine_config(options: OptionSet, given: Mapping[str, Any]) -> EngineConfig:
    """The engine's config from the options that were given; `options` holds the groups of ENGINE."""
    return EngineConfig(
        model=options.build(ModelConfig, given),
        cache=options.build(CacheConfig, given),
        scheduler=options.build(SchedulerConfig, given),
        profile=options.build(ProfileConfig, given),
    )
