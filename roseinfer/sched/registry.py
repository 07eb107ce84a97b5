"""Registry of scheduling policies. Each policy registers itself, and no other module names one.

A policy is a class in a file (or package) of `sched/policies/`, or an entry point of the group `roseinfer.policies` in
another installed package:

    @register("random", options=RandomOptions)
    class RandomPolicy:
        def __init__(self, config: SchedulerConfig, options: RandomOptions, known: Estimates) -> None: ...

Its options are a frozen dataclass of fields made with `core.option.option`; `PrefillOptions`, `CostOptions` and
`LengthOptions` are base classes for them. Options become flags, keys of config files and arguments of `LLM`. An option
that the chosen policy does not have is an error.
"""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.traits import PolicyTraits
from roseinfer.sched import policies as own_policies
from roseinfer.sched.estimates import CostOptions, Estimates, LengthOptions
from roseinfer.sched.policy import Policy
from roseinfer.sched.prefill import PrefillOptions

GROUP = "roseinfer.policies"
SHARED = (PrefillOptions, CostOptions, LengthOptions)

_ENTRY = "__roseinfer_policy__"

Kind = TypeVar("Kind", bound=type)
Setting = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Options of a policy that has none."""


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy. `make(config, options, known)` builds it; `options` is its dataclass of options.

    `contenders`: names under which simulations compare it, each with settings of which the best one counts. `problem`:
    reason why it cannot be used, None if it can.
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
    """Register a class as the policy `name`. `PolicyTraits` and `PolicyEntry` describe the arguments.

    The settings of `contenders` are scheduler options without the policy's name. By default the policy is compared
    under its own name with its default options.
    """

    def mark(kind: Kind) -> Kind:
        entry = PolicyEntry(PolicyTraits(name, sheds, priorities), kind, options, contenders or {name: ({},)})
        setattr(kind, _ENTRY, entry)
        return kind

    return mark


# --- discovery --------------------------------------------------------------------------------------------------
@cache
def policies() -> Mapping[str, PolicyEntry]:
    """Return every policy by name: those of this package, then those of others."""
    return MappingProxyType(find_policies(entry_points(group=GROUP)))


def find_policies(points: Iterable[EntryPoint]) -> dict[str, PolicyEntry]:
    """Return the policies of this package and of `points`. One that cannot be used is included with its problem."""
    found = {entry.name: entry for module in _own_modules() for entry in _entries_of(vars(module).values())}
    for point in points:
        entry = _load(point)
        problem = entry.problem or _problem_of(entry, found)
        if problem is not None:
            where = f"offered by {point.dist.name if point.dist else point.value}"
            entry = _unusable(entry.name, f"scheduling_policy {entry.name} ({where}): {problem}")
        found[entry.name] = entry
    return found


def _own_modules() -> Iterator[Any]:
    for module in pkgutil.iter_modules(own_policies.__path__):
        yield import_module(f"{own_policies.__name__}.{module.name}")


def _entries_of(values: Iterable[Any]) -> Iterator[PolicyEntry]:
    """Yield the entries of the classes that were registered themselves, not through a base class."""
    for value in values:
        if isinstance(value, type) and _ENTRY in vars(value):
            yield vars(value)[_ENTRY]


def _load(point: EntryPoint) -> PolicyEntry:
    try:
        value = point.load()
    except Exception as error:  # importing a package can raise anything
        return _unusable(point.name, f"cannot be loaded: {error!r}")
    entry = next(_entries_of([value]), None)
    if entry is None:
        return _unusable(point.name, f"{point.value} is not a class with @register")
    if entry.name != point.name:
        return _unusable(point.name, f"registers itself as {entry.name}")
    return entry


def _problem_of(entry: PolicyEntry, found: Mapping[str, PolicyEntry]) -> str | None:
    """Return why a policy of another package cannot be used together with those found, None if it can."""
    if entry.name in found:
        return "another policy has that name"
    if not is_dataclass(entry.options):
        return "its options are not a dataclass"
    prefix = entry.name.replace("-", "_") + "_"
    shared = {f.name for kind in SHARED if issubclass(entry.options, kind) for f in fields(kind)}
    for f in fields(entry.options):
        if f.default is MISSING and f.default_factory is MISSING:
            return f"its option {f.name} has no default"
    for name in sorted(entry.option_names - shared):
        if not name.startswith(prefix):
            return f"its option {name} must begin with {prefix}"
    return _flag_problem(entry.options)


def _flag_problem(options: type[Any]) -> str | None:
    """Return why these options cannot become flags, None if they can: every command has the flags of all policies."""
    try:
        hints = get_type_hints(options)
    except Exception as error:  # annotations may be any text
        return f"the types of its options cannot be read: {error!r}"
    for f in fields(options):
        if not _is_a_flag_type(hints[f.name]):
            return f"its option {f.name} has a type that a flag cannot have"
        if _default(f).__class__.__hash__ is None:
            return f"its option {f.name} has a mutable default"
    return None


def _is_a_flag_type(hint: Any) -> bool:
    """True if `config.options.Option` can parse the type.

    These are bool, int, float and str, optional ones, and tuples of any length of numbers, strings or tuples of these.
    """
    if get_origin(hint) in (UnionType, Union):
        rest = [part for part in get_args(hint) if part is not NoneType]
        return len(rest) == 1 and _is_a_flag_type(rest[0])
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
    """Return a policy by name. Raise `ConfigError` if it does not exist or cannot be used."""
    known = policies()
    if name not in known:
        raise ConfigError(f"scheduling_policy must be one of {', '.join(known)}, got {name!r}")
    entry = known[name]
    if entry.problem is not None:
        raise ConfigError(entry.problem)
    return entry


def options_of(config: SchedulerConfig) -> Any:
    """Return the options of the policy that `config` names, as the policy's dataclass.

    Raise `ConfigError` for an unknown policy, an option that it does not have, or an invalid value.
    """
    entry = entry_of(config.policy_name)
    for name in config.policy_options:
        if name not in entry.option_names:
            users = " or ".join(users_of(name))
            known = f"needs scheduling_policy {users}, not {entry.name}" if users else "is not a scheduler option"
            raise ConfigError(f"{name} {known}")
    return entry.options(**{name: _frozen(value) for name, value in config.policy_options.items()})


def users_of(option: str) -> list[str]:
    """Return the names of the policies that have this option."""
    return [entry.name for entry in policies().values() if option in entry.option_names]


def option_names() -> frozenset[str]:
    """Return the names of the options of all policies."""
    return frozenset[str]().union(*(entry.option_names for entry in policies().values()))


def scheduler_config(**options: Any) -> SchedulerConfig:
    """Build the scheduler's config from its own options and those of its policy. None means "not given".

    Raise `ConfigError`, also for an option that the policy does not have.
    """
    own = {f.name for f in fields(SchedulerConfig)}
    rest = {name: value for name, value in options.items() if name not in own and value is not None}
    given = {name: value for name, value in options.items() if name in own}
    config = SchedulerConfig(**{**given, "policy_options": {**given.get("policy_options", {}), **rest}})
    options_of(config)
    return config


def make_policy(config: SchedulerConfig, estimates: Estimates | None = None) -> Policy:
    """Build the policy that the config names. Raise `ConfigError`. `estimates`: by default as the options ask for."""
    options = options_of(config)
    return entry_of(config.policy_name).make(config, options, estimates or Estimates.of(options))


def all_options() -> type[Any]:
    """Return a dataclass of the options of all policies for the command line; each help text names the policies."""
    merged: dict[str, tuple[str, Any, Any]] = {}
    for entry in policies().values():
        hints = get_type_hints(entry.options)
        for f in fields(entry.options):
            if f.name not in merged:
                merged[f.name] = (f.name, hints[f.name], _with_users(f))
    return make_dataclass("PolicyOptions", merged.values(), frozen=True, kw_only=True)


def contenders() -> dict[str, tuple[Setting, ...]]:
    """Return the options of each setting that simulations compare, by contender. The best setting counts."""
    found: dict[str, tuple[Setting, ...]] = {}
    for entry in policies().values():
        for name, settings in entry.contenders.items():
            found[name] = tuple({"scheduling_policy": entry.name, **setting} for setting in settings)
    return found


def _with_users(f: "Field[Any]") -> Any:
    help = f"{', '.join(users_of(f.name))}: {f.metadata.get('help', '')}"
    return field(default=_default(f), metadata={**f.metadata, "help": help})


def _default(f: "Field[Any]") -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _frozen(value: Any) -> Any:
    """Turn lists back into tuples: a config that was sent as JSON has lists."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
