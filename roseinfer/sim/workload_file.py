"""Workload files (TOML): classes of requests, arrival processes, and the machine (docs/how-to/workloads.md)."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine, PeriodicStalls
from roseinfer.sim.arrivals import TraceRequest, read_trace
from roseinfer.sim.config import CONSTANTS, MAX_CV, MAX_SLOWDOWN_RATIO, MIN_CV, MIN_SLOWDOWN_RATIO, CostConfig
from roseinfer.sim.distributions import (
    ArrivalProcess,
    Bimodal,
    Empirical,
    Fixed,
    Gamma,
    LengthDistribution,
    LogNormal,
    OnOff,
    Pareto,
    Replayed,
    Steps,
    Uniform,
)
from roseinfer.sim.length_hints import ExactHints, MisleadingHints, NoHints, NoisyHints, ScaledHints, ShuffledHints
from roseinfer.sim.setups import SETUPS
from roseinfer.sim.toml_table import TomlTable, is_number
from roseinfer.sim.workload import Arrival, LengthHints, SharedPrefixes, TrafficClass, Workload

SEATS = ("max_num_seqs", "max_num_batched_tokens")
# Beyond these, draws overflow; and stalls, of which each is an event, take longer than a run.
MAX_SIGMA, MIN_ALPHA, MAX_ZIPF_EXPONENT, MIN_STALL_PERIOD_S = 50.0, 0.1, 10.0, 1e-3
MIN_LIKELY_SHARE = 0.01  # share of a distribution within its bounds; the rest is drawn again
_MACHINE = tuple(f.name for f in fields(CostConfig) if f.name != "cost")
_COPIES = ("load_us", "store_us")
_OBJECTIVES = {"ttft_ms": "ttft_s", "tpot_ms": "tpot_s", "e2e_ms": "e2e_s"}


@dataclass(frozen=True, slots=True)
class WorkloadFile:
    """Contents of a workload file. `workload.rate`: requests a second, 0 = all at once.

    `requests`: number of requests of a run, if given. `scheduler`: options common to all policies.
    """

    path: str
    workload: Workload
    machine: Machine
    requests: int | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[Slo, ...]:
        """Objectives of the classes."""
        return tuple(of.slo for of in self.workload.classes if of.slo is not None)


@dataclass(frozen=True, slots=True)
class FileArrivals:
    """Function of a seed that returns `count` requests; it can be pickled."""

    workload: Workload
    count: int
    seed: int = 0

    def __call__(self, seed: int) -> list[Arrival]:
        return self.workload.requests(self.count, self.seed + seed)


def read_workload(path: str) -> WorkloadFile:
    """Read a workload file. Raise `ConfigError`, which names the file, the table and the key."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"workload: {path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"workload: {path} is not TOML: {error}") from None
    root = TomlTable(path, "", content)
    machine, scheduler = _machine(root.table("machine", {}))
    of_classes = root.table("classes")
    if not of_classes.names:
        of_classes.fail("", "needs at least one class")
    found = [_class(of_classes.table(name), name) for name in of_classes.names]
    requests = root.count("requests", None)
    workload = Workload(
        found,
        root.number("rate", 0.0, least=0.0),
        root.given("arrivals", _process, Gamma()),
        root.given("hints", _hints, None),
        machine.max_model_len,
        distinct=machine.prefix_caching,
    )
    root.end()
    return WorkloadFile(path, workload, machine, requests, scheduler)


# --- the machine ------------------------------------------------------------------------------------------------
def _machine(table: TomlTable) -> tuple[Machine, dict[str, Any]]:
    """Read the machine and the scheduler options that it sets."""
    setup = SETUPS[table.choice("setup", tuple(SETUPS))] if "setup" in table.names else None
    cost_file = table.file("cost") if "cost" in table.names else None
    stalls = table.given("stalls", _stalls, None)
    slowdown = _slowdown(table)
    scheduler = {name: table.count(name) for name in SEATS if name in table.names}
    given = {name: table.take(name) for name in _MACHINE if name in table.names}
    table.end("setup", "cost", *SEATS, *_MACHINE)
    known = (*CONSTANTS, *_COPIES) if setup else CONSTANTS if cost_file else ()
    clash = next((name for name in given if name in known), None)
    if clash:
        table.fail(clash, f"{'the cost file' if cost_file else 'the setup'} already sets the costs of steps")
    config = _cost_config(table, given, cost_file)
    machine = config.machine if setup is None else _over(setup.machine, config, given, cost_file)
    common = dict(setup.scheduler) if setup else {}
    return replace(machine, stalls=stalls, slowdown=slowdown), {**common, **scheduler}


def _cost_config(table: TomlTable, given: Mapping[str, Any], cost_file: str | None) -> CostConfig:
    defaults = CostConfig()
    for name, value in given.items():
        kind = type(getattr(defaults, name))
        if kind is bool or type(value) is bool:
            fits = type(value) is kind
        else:
            fits = type(value) is int if kind is int else is_number(value)
        if not fits:
            table.fail(name, f"must be {'true or false' if kind is bool else 'a number'}, got {value!r}")
    try:
        return CostConfig(**{**given, "cost": cost_file})
    except ConfigError as error:
        name, _, why = str(error).partition(" ")
        if name in given and why.startswith("must"):
            table.fail(name, why)
        table.fail("", str(error))


def _over(machine: Machine, config: CostConfig, given: Mapping[str, Any], cost_file: str | None) -> Machine:
    """Return a setup's machine with the file's changes."""
    other = config.machine
    names = {"enable_prefix_caching": "prefix_caching", "num_kv_blocks": "num_blocks"}
    changed: dict[str, Any] = {names.get(name, name): getattr(other, names.get(name, name)) for name in given}
    if cost_file:
        changed["cost"] = other.cost
    return replace(machine, **changed)


def _stalls(table: TomlTable) -> PeriodicStalls:
    every_s, lasts_s = table.number("every_s", least=MIN_STALL_PERIOD_S), table.positive("lasts_s")
    if lasts_s >= every_s:
        table.fail("lasts_s", f"must be below every_s, {every_s:g}, got {lasts_s:g}")
    table.end()
    return PeriodicStalls(every_s, lasts_s)


def _slowdown(table: TomlTable) -> tuple[tuple[float, float], ...]:
    """Read pairs (at_s, factor), in order."""
    content = table.take("slowdown", [])
    if not isinstance(content, list):
        table.fail("slowdown", f"must be a list of tables, got {content!r}")
    found = []
    for number, entry in enumerate(content):
        part = table.within(f"slowdown[{number}]", entry)
        factor = part.number("factor", least=MIN_SLOWDOWN_RATIO, most=MAX_SLOWDOWN_RATIO)
        found.append((float(part.number("at_s")), float(factor)))
        part.end()
    if found != sorted(found, key=lambda entry: entry[0]):
        table.fail("slowdown", "must be in order of at_s")
    return tuple(found)


# --- classes ----------------------------------------------------------------------------------------------------
def _class(table: TomlTable, name: str) -> TrafficClass:
    found = TrafficClass(
        name,
        _law(table.table("prompts")),
        _law(table.table("outputs")),
        _slo(table, name),
        table.positive("share", 1.0),
        table.given("arrivals", _process, None),
        table.text("tenant", ""),
        _priority(table),
        table.given("hints", _hints, None),
        table.given("prefix", _prefixes, None),
    )
    table.end()
    return found


def _slo(table: TomlTable, name: str) -> Slo:
    """Read the objectives of a class; without any, the result still has the class's name."""
    limits = {key: table.positive(key, None) for key in _OBJECTIVES}
    return Slo(
        **{_OBJECTIVES[key]: ms / 1e3 for key, ms in limits.items() if ms is not None},
        class_name=name,
    )


def _priority(table: TomlTable) -> int:
    value = table.take("priority", 0)
    if type(value) is not int:
        table.fail("priority", f"must be an integer, got {value!r}")
    return value


def _prefixes(table: TomlTable) -> SharedPrefixes:
    found = SharedPrefixes(
        table.count("tokens"),
        table.positive("share", 1.0, most=1.0),
        table.count("number", 1),
        float(table.number("zipf", 0.0, most=MAX_ZIPF_EXPONENT)),
        table.flag("in_front", False),
        table.text("pool", ""),
    )
    if found.in_front and found.share < 1:
        table.fail("in_front", "cannot be combined with share: a request's length would be random")
    table.end()
    return found


# --- laws, processes, hints -------------------------------------------------------------------------------------
def _law(table: TomlTable) -> LengthDistribution:
    found = _LAWS[table.choice("law", tuple(_LAWS))](table)
    table.end()
    return found


def _uniform(table: TomlTable) -> Uniform:
    low, high = table.count("low"), table.count("high")
    if high < low:
        table.fail("high", f"must not be below low, {low}, got {high}")
    return Uniform(low, high)


def _log_normal(table: TomlTable) -> LogNormal:
    found = LogNormal(
        table.positive("median"),
        table.number("sigma", most=MAX_SIGMA),
        table.count("low", 1),
        table.positive("high", inf),
    )
    _check_likely(table, found, f"low and high, {found.low:g} and {found.high:g}")
    return found


def _pareto(table: TomlTable) -> Pareto:
    found = Pareto(
        table.number("least", least=1.0), table.number("alpha", least=MIN_ALPHA), table.positive("high", inf)
    )
    _check_likely(table, found, f"high, {found.high:g}")
    return found


def _check_likely(table: TomlTable, law: LogNormal | Pareto, bounds: str) -> None:
    if law.likely() < MIN_LIKELY_SHARE:
        table.fail("", f"fewer than {MIN_LIKELY_SHARE:.0%} of the lengths would be within {bounds}")


def _bimodal(table: TomlTable) -> Bimodal:
    return Bimodal(table.span("low"), table.span("high"), table.number("share_high", most=1.0))


def _empirical(table: TomlTable) -> Empirical:
    column, lines = table.choice("column", ("prompt", "output")), _traced(table)
    return Empirical([line.prompt_len if column == "prompt" else line.output_len for line in lines])


_LAWS: Mapping[str, Callable[[TomlTable], LengthDistribution]] = {
    "fixed": lambda table: Fixed(table.count("value")),
    "uniform": _uniform,
    "lognormal": _log_normal,
    "pareto": _pareto,
    "bimodal": _bimodal,
    "trace": _empirical,
}


def _process(table: TomlTable) -> ArrivalProcess:
    found = _PROCESSES[table.choice("process", tuple(_PROCESSES))](table)
    table.end()
    return found


def _steps(table: TomlTable) -> Steps:
    factors = table.take("factors")
    if not isinstance(factors, list) or not factors or not all(map(_is_factor, factors)):
        limits = f"within [{MIN_SLOWDOWN_RATIO:g}, {MAX_SLOWDOWN_RATIO:g}]"
        table.fail("factors", f"must be a list of numbers {limits}, got {factors!r}")
    return Steps(tuple(map(float, factors)))


def _is_factor(value: Any) -> bool:
    return is_number(value) and MIN_SLOWDOWN_RATIO <= value <= MAX_SLOWDOWN_RATIO


_PROCESSES: Mapping[str, Callable[[TomlTable], ArrivalProcess]] = {
    "poisson": lambda table: Gamma(),
    "gamma": lambda table: Gamma(table.number("cv", least=MIN_CV, most=MAX_CV)),
    "onoff": lambda table: OnOff(table.positive("on_s"), table.number("off_s")),
    "steps": _steps,
    "trace": lambda table: Replayed([line.at_s for line in _traced(table)]),
}


def _hints(table: TomlTable) -> LengthHints:
    found = _HINTS[table.choice("kind", tuple(_HINTS))](table)
    table.end()
    return found


def _liars(table: TomlTable) -> MisleadingHints:
    share, factor = table.number("share", most=1.0), table.positive("factor")
    return MisleadingHints(share, factor, table.positive("rmse"), table.text("tenant", None))


_HINTS: Mapping[str, Callable[[TomlTable], LengthHints]] = {
    "absent": lambda table: NoHints(),
    "exact": lambda table: ExactHints(),
    "noisy": lambda table: NoisyHints(table.positive("rmse")),
    "factor": lambda table: ScaledHints(table.positive("factor")),
    "shuffled": lambda table: ShuffledHints(),
    "liars": _liars,
}


def _traced(table: TomlTable) -> list[TraceRequest]:
    path = table.file("file")
    try:
        return _read(path)
    except ConfigError as error:
        table.fail("file", str(error).removeprefix("trace: "))


_read = cache(read_trace)
