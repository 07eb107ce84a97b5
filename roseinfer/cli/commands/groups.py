"""Option groups that several commands share."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from roseinfer.config.options import Group, OptionSet
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
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.config.speculation import SpeculationConfig
from roseinfer.sched.registry import all_options, option_names, policies, scheduler_config

NESTED_OPTIONS = frozenset({"policy_options"})  # each of these is an option of its own
# A policy of another package may have options of these names. They get no flag, since the name would be ambiguous.
TAKEN = frozenset(
    f.name
    for kind in (
        ModelConfig,
        CacheConfig,
        SchedulerConfig,
        SpeculationConfig,
        AdapterConfig,
        ProfileConfig,
        PricedConfig,
        KvEventsConfig,
        ReplicasConfig,
        ServerConfig,
    )
    for f in fields(kind)
)

MODEL = Group(ModelConfig, "model", positional="model")
CACHE = Group(CacheConfig, "KV cache")
SCHEDULER = Group(SchedulerConfig, "scheduler", skip=NESTED_OPTIONS, choices={"scheduling_policy": tuple(policies())})
POLICY = Group(
    all_options(), "scheduling policies (an option that the chosen one does not have is an error)", skip=TAKEN
)
SPECULATION = Group(SpeculationConfig, "speculation")
ADAPTERS = Group(AdapterConfig, "LoRA adapters")
PROFILE = Group(ProfileConfig, "profiling")
PRICED = Group(PricedConfig, "an engine without a model")
KV_EVENTS = Group(KvEventsConfig, "KV events (need the extra kv-events)", skip=frozenset({"rank", "served_name"}))
# The shared secret of `engine` and `serve --engines`, until they used TLS.
REMOVED_SECRET = {"secret_file": "hosts use TLS now: make certificates with `roseinfer certificates`, give --tls-dir"}
ENGINE = (MODEL, CACHE, SCHEDULER, POLICY, SPECULATION, ADAPTERS, PROFILE, PRICED, KV_EVENTS)


def engine_config(options: OptionSet, given: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's config from the given options. `options` holds ENGINE's groups, but perhaps not those of
    speculation and KV events.
    """
    kinds = {group.kind for group in options.groups}
    name = next(iter(given.get("served_model_name", ())), None)
    return EngineConfig(
        model=options.build(ModelConfig, given),
        cache=options.build(CacheConfig, given),
        scheduler=scheduler_config(**scheduler_options(given)),
        speculation=options.build(SpeculationConfig, given) if SpeculationConfig in kinds else SpeculationConfig(),
        adapters=options.build(AdapterConfig, given) if AdapterConfig in kinds else AdapterConfig(),
        profile=options.build(ProfileConfig, given),
        priced=options.build(PricedConfig, given),
        kv_events=replace(options.build(KvEventsConfig, given), served_name=name)
        if KvEventsConfig in kinds
        else KvEventsConfig(),
    )


def scheduler_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that belong to the scheduler or a policy."""
    names = {f.name for f in fields(SchedulerConfig)} | (option_names() - TAKEN)
    return {name: value for name, value in given.items() if name in names}
