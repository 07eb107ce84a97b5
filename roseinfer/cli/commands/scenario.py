"""Scenario of `simulate`: requests and a machine, from options or a workload file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sim.adapters import ArrivalsWithAdapters, SimulatedAdapterConfig
from roseinfer.sim.arrivals import OptionArrivals
from roseinfer.sim.config import CostConfig, WorkloadConfig
from roseinfer.sim.setups import SETUPS
from roseinfer.sim.sweep import LoadPoint
from roseinfer.sim.workload_file import FileArrivals, read_workload

# Options that a workload file replaces.
WORKLOAD_FILE_OPTIONS = (
    "setup",
    "cv",
    "trace",
    "trace_seconds",
    "trace_speed",
    "trace_lengths",
    "input_len_min",
    "input_len",
    "output_len_min",
    "output_len",
    "slo_classes",
    "class_shares",
    "tenant_shares",
    "predictor_rmse",
    "replay",
    *(f.name for f in fields(CostConfig)),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests and machine on which policies are compared.

    `at_rate(None)` keeps the rate of a trace. `rates` are the default rates of a comparison. `common` holds scheduler
    options of all policies.
    """

    machine: Machine
    classes: Sequence[Slo]
    at_rate: Callable[[float | None], LoadPoint]
    rates: Sequence[float | None] = ()
    common: Mapping[str, Any] = field(default_factory=dict)


def scenario_of(
    workload: WorkloadConfig, cost: CostConfig, lora: SimulatedAdapterConfig, given: Mapping[str, Any]
) -> Scenario:
    """Build the scenario from the given options. Raises `ConfigError`."""
    found = _of_options(workload, cost) if workload.file is None else _of_file(workload.file, workload, given)
    found = replace(found, machine=replace(found.machine, acceptance=workload.acceptance, adapters=lora.machine))
    if not lora.adapters:
        return found

    def at_rate(rate: float | None) -> LoadPoint:
        point = found.at_rate(rate)
        return LoadPoint(rate, ArrivalsWithAdapters(point.arrivals, lora))

    return replace(found, at_rate=at_rate)


def slo_classes(workload: WorkloadConfig) -> tuple[Slo, ...]:
    """Return the classes in the file, if one is given."""
    if workload.slo_classes is None:
        return ()
    from roseinfer.server.request.slo_classes import read_slo_classes

    return tuple(entry.slo for entry in read_slo_classes(workload.slo_classes).classes.values())


def _of_options(workload: WorkloadConfig, cost: CostConfig) -> Scenario:
    setup = SETUPS[workload.setup] if workload.setup else None
    machine = setup.machine if setup else cost.machine
    if cost.cost is not None:
        machine = replace(machine, cost=cost.params)
    classes = slo_classes(workload) or (setup.mix.classes if setup else ())

    def at_rate(rate: float | None) -> LoadPoint:
        return LoadPoint(rate, OptionArrivals(workload, setup, rate, classes))

    traced = workload.workload == "trace"
    rates = [None] if traced else [workload.request_rate] if workload.request_rate else []
    return Scenario(machine, classes, at_rate, rates, setup.scheduler if setup else {})


def _of_file(path: str, workload: WorkloadConfig, given: Mapping[str, Any]) -> Scenario:
    settled = next((name for name in WORKLOAD_FILE_OPTIONS if name in given), None)
    if settled is not None:
        raise ConfigError(f"{settled} cannot be combined with --workload {path}, which sets it")
    found = read_workload(path)
    count = workload.num_requests if "num_requests" in given else found.requests or workload.num_requests

    def at_rate(rate: float | None) -> LoadPoint:
        return LoadPoint(rate, FileArrivals(replace(found.workload, rate=rate or 0.0), count, workload.seed))

    rate = workload.request_rate or found.workload.rate
    return Scenario(found.machine, found.classes, at_rate, [rate] if rate else [], found.scheduler)
