"""Config of an engine from options by name, as `LLM` and the command line take them."""

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PricedConfig,
    ProfileConfig,
    SchedulerConfig,
)
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.config.speculation import SpeculationConfig
from roseinfer.core.errors import ConfigError
from roseinfer.sched.registry import all_options, option_names, scheduler_config

Part = TypeVar(
    "Part", ModelConfig, CacheConfig, SpeculationConfig, AdapterConfig, ProfileConfig, PricedConfig, KvEventsConfig
)


_PARTS = (ModelConfig, CacheConfig, SpeculationConfig, AdapterConfig, ProfileConfig, PricedConfig, KvEventsConfig)


def engine_option_names() -> frozenset[str]:
    """Return the names of all options that `make_engine_config` takes."""
    return frozenset({f.name for kind in _PARTS for f in fields(kind) if f.metadata} | _scheduler_names())


def make_engine_config(**options: Any) -> EngineConfig:
    """Sort options into the configs that define them. Raise `ConfigError` for an unknown option or a wrong type."""
    config = EngineConfig(
        model=_take(ModelConfig, options),
        cache=_take(CacheConfig, options),
        scheduler=_take_scheduler(options),
        profile=_take(ProfileConfig, options),
        speculation=_take(SpeculationConfig, options),
        adapters=_take(AdapterConfig, options),
        priced=_take(PricedConfig, options),
        kv_events=_take(KvEventsConfig, options),
    )
    if options:
        raise ConfigError(f"unknown option {min(options)!r}")
    return config


def _take(kind: type[Part], options: dict[str, Any]) -> Part:
    """Build a config from the options that are its fields, and remove them. Fields without metadata are not options:
    code that starts several engines sets them.
    """
    names = [f.name for f in fields(kind) if f.metadata]
    given = {name: options.pop(name) for name in names if name in options}
    _check_types(kind, given)
    return kind(**given)


def _take_scheduler(options: dict[str, Any]) -> SchedulerConfig:
    """Build the scheduler's config, including the options of its policy, and remove these options."""
    given = {name: options.pop(name) for name in _scheduler_names() if name in options}
    for kind in (SchedulerConfig, all_options()):
        _check_types(kind, given)
    return scheduler_config(**given)


def _scheduler_names() -> set[str]:
    return {f.name for f in fields(SchedulerConfig)} | option_names()


def _check_types(kind: type, given: dict[str, Any]) -> None:
    """Raise `ConfigError` for a text, a number or a switch in place of another one of these."""
    hints = get_type_hints(kind)
    for name, value in given.items():
        hint = hints.get(name)
        allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        if not set(allowed) <= _WORDS.keys() | {NoneType}:
            continue
        accepted = (*allowed, int) if float in allowed else allowed
        if isinstance(value, accepted) and (bool in allowed or not isinstance(value, bool)):
            continue
        expected = " or ".join(word for one, word in _WORDS.items() if one in allowed)
        raise ConfigError(f"{name} must be {expected}, got {value!r}")


_WORDS = {str: "text", int: "an integer", float: "a number", bool: "True or False"}
