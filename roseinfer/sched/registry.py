"""The scheduling policies there are: each registers itself where it is defined, and all that names policies asks here.

A policy is a class in a file (or package) of `sched/policies/`, or one that another installed package offers as an
entry point of the group `roseinfer.policies`:

    @register("random", options=RandomOptions)
    class RandomPolicy:
        def __init__(self, config: SchedulerConfig, options: RandomOptions, known: Estimates) -> None: ...

Its options are a frozen dataclass of fields made with `core.option.option`; `PrefillOptions`, `CostOptions` and
`LengthOptions` are there to inherit from. They become flags, keys of config files and arguments of `LLM`. An option
that the chosen policy does not have is refused.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from roseinfer.core.config.engine import CacheConfig, ModelConfig, PricedConfig, ProfileConfig, SchedulerConfig
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.traits import PolicyTraits
from roseinfer.sched import policies as own_policies
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.estimates import CostOptions, Estimates, LengthOptions
from roseinfer.sched.policy import Policy
from roseinfer.sched.prefill import PrefillOptions

GROUP = "roseinfer.policies"
SHARED = (PrefillOptions, CostOptions, LengthOptions)
# An option has one home: these have theirs elsewhere.
TAKEN = frozenset(
    f.name
    for kind in (
        ModelConfig,
        CacheConfig,
        SchedulerConfig,
        ProfileConfig,
        PricedConfig,
        KvEventsConfig,
        ReplicasConfig,
        ServerConfig,
    )
    for f in fields(kind)
)
_ENTRY = "__roseinfer_policy__"

Kind = TypeVar("Kind", bound=type)
Setting = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of a policy that has none."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy. `make(config, options, known)` builds it, `options` is its dataclass of options.

    `contenders`: the names that it is compared under in simulations, each with the settings of which the best counts.
    `problem`: why it cannot be used, if its package offers it in a way that does not work.
    """

    traits: PolicyTraits
    make: Callable[[SchedulerConfig, Any, Estimates], Policy]
    options: type[Any] = NoOptions
    contenders: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    problem: str | None = None

    @property
    def name(self) -> str:
        return self.traits.name

    @property
    def option_names(self) -> frozenset[str]:
        return frozenset(f.name for f in fields(self.options))


def register(
    name: str,
    *,
    options: type[Any] = NoOptions,
    sheds: bool = False,
    priorities: bool = False,
    contenders: Mapping[str, Sequence[Setting]] | None = None,
) -> Callable[[Kind], Kind]:
    """Make a class the policy `name`. For `sheds` and `priorities` see `PolicyTraits`, for the others `PolicyEntry`.

    The settings of `contenders` are scheduler options without the policy's name; by default the policy is compared
    under its own name, with its defaults.
    """

    def mark(kind: Kind) -> Kind:
        entry = PolicyEntry(PolicyTraits(name, sheds, priorities), kind, options, contenders or {name: ({},)})
        setattr(kind, _ENTRY, entry)
        return kind

    return mark


# --- finding them -----------------------------------------------------------------------------------------------
@cache
def policies() -> Mapping[str, PolicyEntry]:
    """Every policy by name: those of this package, then those of others."""
    return MappingProxyType(find_policies(entry_points(group=GROUP)))


def find_policies(points: Iterable[EntryPoint]) -> dict[str, PolicyEntry]:
    """Those of this package and those behind `points`; one that cannot be used is there with its problem."""
    found = {entry.name: entry for module in _own_modules() for entry in _entries_of(vars(module).values())}
    for point in points:
        entry = _load(point)
        problem = entry.problem or _objection(entry, found)
        if problem is not None:
            where = f"offered by {point.dist.name if point.dist else point.value}"
            entry = _unusable(entry.name, f"scheduling_policy {entry.name} ({where}): {problem}")
        found[entry.name] = entry
    return found


def _own_modules() -> Iterator[Any]:
    for module in pkgutil.iter_modules(own_policies.__path__):
        yield import_module(f"{own_policies.__name__}.{module.name}")


def _entries_of(values: Iterable[Any]) -> Iterator[PolicyEntry]:
    """Those of the classes that were registered themselves, not by way of what they derive from."""
    for value in values:
        if isinstance(value, type) and _ENTRY in vars(value):
            yield vars(value)[_ENTRY]


def _load(point: EntryPoint) -> PolicyEntry:
    try:
        value = point.load()
    except Exception as error:  # whatever its package does when it is imported
        return _unusable(point.name, f"cannot be loaded: {error!r}")
    entry = next(_entries_of([value]), None)
    if entry is None:
        return _unusable(point.name, f"{point.value} is no class with @register")
    if entry.name != point.name:
        return _unusable(point.name, f"registers itself as {entry.name}")
    return entry


def _objection(entry: PolicyEntry, found: Mapping[str, PolicyEntry]) -> str | None:
    """Why a policy from outside cannot stand beside those found, if so."""
    if entry.name in found:
        return "another policy has that name"
    if not is_dataclass(entry.options):
        return "its options are no dataclass"
    prefix = entry.name.replace("-", "_") + "_"
    shared = {f.name for kind in SHARED if issubclass(entry.options, kind) for f in fields(kind)}
    for f in fields(entry.options):
        if f.default is MISSING and f.default_factory is MISSING:
            return f"its option {f.name} has no default"
    for name in sorted(entry.option_names - shared):
        if not name.startswith(prefix) or name in TAKEN:
            return f"its option {name} must begin with {prefix}"
    return _no_flags(entry.options)


def _no_flags(options: type[Any]) -> str | None:
    """Why no flags can be made of these options, if so: every command has the flags of all policies."""
    try:
        hints = get_type_hints(options)
    except Exception as error:  # they may be any text
        return f"the types of its options cannot be read: {error!r}"
    for f in fields(options):
        if not _fits_a_flag(hints[f.name]):
            return f"its option {f.name} is of a type that no flag can give"
        if _default(f).__class__.__hash__ is None:
            return f"its option {f.name} has a default that can change"
    return None


def _fits_a_flag(hint: Any) -> bool:
    """Whether `options.Option` reads it: a truth value, a number or a text, also None, or any number of numbers, of
    texts or of tuples of these.
    """
    if get_origin(hint) in (UnionType, Union):
        rest = [part for part in get_args(hint) if part is not NoneType]
        return len(rest) == 1 and _fits_a_flag(rest[0])
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        one = get_args(hint)[0]
        parts = get_args(one) if get_origin(one) is tuple else (one,)
        return all(part in (int, float, str) for part in parts)
    return hint in (bool, int, float, str)


def _unusable(name: str, problem: str) -> PolicyEntry:
    def refuse(config: SchedulerConfig, options: Any, known: Estimates) -> Policy:
        raise ConfigError(problem)

    return PolicyEntry(PolicyTraits(name), refuse, problem=problem)


# --- options ----------------------------------------------------------------------------------------------------
def entry_of(name: str) -> PolicyEntry:
    """Raises `ConfigError` if there is no such policy, or it cannot be used."""
    known = policies()
    if name not in known:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(known)}, got {name!r}")
    entry = known[name]
    if entry.problem is not None:
        raise ConfigError(entry.problem)
    return entry


def options_of(config: SchedulerConfig) -> Any:
    """The options of the policy that `config` names, as its dataclass.

    Raises `ConfigError` for a policy that is none, an option that it does not have, and a value that is wrong.
    """
    entry = entry_of(config.policy_name)
    for name in config.policy_options:
        if name not in entry.option_names:
            users = " or ".join(users_of(name))
            known = f"needs scheduling_policy {users}, not {entry.name}" if users else "is no option of the scheduler"
            raise ConfigError(f"{name} {known}")
    return entry.options(**{name: _frozen(value) for name, value in config.policy_options.items()})


def users_of(option: str) -> list[str]:
    """The policies that have this option."""
    return [entry.name for entry in policies().values() if option in entry.option_names]


def option_names() -> frozenset[str]:
    """The options of all policies."""
    return frozenset[str]().union(*(entry.option_names for entry in policies().values()))


def scheduler_config(**options: Any) -> SchedulerConfig:
    """The scheduler's config from its options and those of its policy alike; None is what was not given.

    Raises `ConfigError`, also for an option that the policy does not have.
    """
    own = {f.name for f in fields(SchedulerConfig)}
    rest = {name: value for name, value in options.items() if name not in own and value is not None}
    given = {name: value for name, value in options.items() if name in own}
    config = SchedulerConfig(**{**given, "policy_options": {**given.get("policy_options", {}), **rest}})
    options_of(config)
    return config


def make_policy(
    config: SchedulerConfig, estimates: Estimates | None = None, *, learnt: CostParams | None = None
) -> Policy:
    """The policy that the options name. `estimates` instead of those that they ask for; `learnt`: what steps cost, as
    an engine like this one has learnt. Raises `ConfigError`.
    """
    options = options_of(config)
    return entry_of(config.policy_name).make(config, options, estimates or Estimates.of(options, learnt))


def all_options() -> type[Any]:
    """A dataclass of every policy's options, the help of each saying whose it is: what a command line is made from."""
    merged: dict[str, tuple[str, Any, Any]] = {}
    for entry in policies().values():
        hints = get_type_hints(entry.options)
        for f in fields(entry.options):
            if f.name not in merged:
                merged[f.name] = (f.name, hints[f.name], _described(f))
    return make_dataclass("PolicyOptions", merged.values(), frozen=True, kw_only=True)


def contenders() -> dict[str, tuple[Setting, ...]]:
    """What simulations compare: a name -> the options of each setting tried, of which the best counts."""
    found: dict[str, tuple[Setting, ...]] = {}
    for entry in policies().values():
        for name, settings in entry.contenders.items():
            found[name] = tuple({"scheduling_policy": entry.name, **setting} for setting in settings)
    return found


def _described(f: "Field[Any]") -> Any:
    help = f"{', '.join(users_of(f.name))}: {f.metadata.get('help', '')}"
    return field(default=_default(f), metadata={**f.metadata, "help": help})


def _default(f: "Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _frozen(value: Any) -> Any:
    """Lists, as a config comes back from JSON, as the tuples that they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
