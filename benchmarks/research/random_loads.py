"""Random loads: requests and a machine, made from what `benchmarks.research.choices` draws."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.research.bound import capacity
from benchmarks.research.choices import OBJECTIVES, Choice, Choices, describe, draw_choices, kinds_of, space
from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine, PeriodicStalls
from roseinfer.sched.cost.params import CostParams
from roseinfer.sim.arrivals import TraceRequest, read_trace
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
from roseinfer.sim.length_hints import ExactHints, MisleadingHints, NoisyHints, ScaledHints, ShuffledHints
from roseinfer.sim.workload import Arrival, LengthHints, TrafficClass, Workload

SAMPLE = 2000  # requests for estimating capacity, and lengths of a class whose 99th percentile sets its floors
CAPACITY_TARGET = 0.99
LIARS = "liars"  # tenant of requests with false hints, if they have their own
COMMON = ("max_num_seqs", "max_num_batched_tokens")  # scheduler options of a machine


class TraceNeededError(ConfigError):
    """A load needs times or lengths of a missing trace."""


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Load `number` of a seed: the same requests on the same machine for every policy.

    `scheduler`: options common to all policies. `kinds`: "stationary", or what makes it not so. `rate`: offered
    requests per second, `capacity` times `choices.load`.
    """

    seed: int
    number: int
    choices: Choices
    classes: Sequence[TrafficClass]
    arrivals: list[Arrival]
    machine: Machine
    rate: float
    capacity: float
    scheduler: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of the load within the space it was drawn from."""
        return f"v{space()['version']} seed {self.seed} load {self.number}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return kinds_of(self.choices)

    @property
    def description(self) -> str:
        return describe(self.choices)


def capacity_of(sample: Sequence[Arrival], machine: Machine) -> float:
    """Return requests per second that a clairvoyant scheduler could just serve."""
    return capacity(sample, machine, CAPACITY_TARGET)


def draw_load(
    seed: int,
    number: int,
    *,
    traces: str | Path | None = None,
    measure: Callable[[Sequence[Arrival], Machine], float] = capacity_of,
) -> RandomLoad:
    """Draw a load. Raises `TraceNeededError` if it needs a trace that `traces`, a directory, does not contain.

    `measure` returns the capacity, for callers that have it cached.
    """
    choices = draw_choices(seed, number)
    records = _records(choices, traces)
    rng = random.Random(f"random load {seed} {number} lengths")
    machine = _machine(choices)
    classes = _classes(choices, machine, records, rng)
    workload = Workload(
        classes,
        rate=0.0,
        process=_process(choices.of_load["arrivals"], records),
        hints=_hints(choices.of_load["hints"]),
        context=machine.max_model_len,
    )
    name = f"random load {seed} {number}"
    sample = workload.requests(SAMPLE, f"{name} sample")
    most = measure(sample, machine)
    rate = choices.load * most
    arrivals = replace(workload, rate=rate).requests(_count(sample), name)
    return RandomLoad(
        seed,
        number,
        choices,
        classes,
        arrivals,
        _fitted(machine, choices, arrivals),
        rate,
        most,
        {name: _machine_entry(choices)[name] for name in COMMON},
    )


def _records(choices: Choices, traces: str | Path | None) -> dict[str, list[TraceRequest]]:
    found = {}
    for name in sorted(choices.trace_files):
        if traces is None or not (Path(traces) / name).is_file():
            where = "no directory of traces is given" if traces is None else f"{traces} does not hold it"
            raise TraceNeededError(f"traces: this load needs {name}, and {where}")
        found[name] = _read(str(Path(traces) / name))
    return found


_read = cache(read_trace)


def _count(sample: Sequence[Arrival]) -> int:
    """Return the number of requests of a run: fewer with long prompts."""
    long = fmean(len(arrival.prompt_ids) for arrival in sample) > space()["long_prompt"]
    return space()["long_requests"] if long else space()["requests"]


def _machine_entry(choices: Choices) -> Mapping[str, Any]:
    return space()["machines"][choices.of_load["machine"]]


def _machine(choices: Choices) -> Machine:
    """Return the machine at the first arrival, with all of its KV blocks."""
    entry, of_load = _machine_entry(choices), choices.of_load
    stalls, slowdown = of_load["stalls"], of_load["slowdown"]
    return Machine(
        cost=CostParams(**entry["cost"]),
        noise=of_load["noise"],
        max_model_len=entry["max_model_len"],
        num_blocks=entry["num_kv_blocks"],
        block_size=entry["block_size"],
        prefix_caching=False,
        stalls=PeriodicStalls(stalls["every_s"], stalls["lasts_s"]) if stalls["lasts_s"] else None,
        slowdown=((0.0, slowdown["factor"]),) if slowdown["factor"] != 1.0 and slowdown["at"] == 0.0 else (),
    )


def _fitted(machine: Machine, choices: Choices, arrivals: Sequence[Arrival]) -> Machine:
    """Return the machine with its remaining KV blocks, enough for the longest request, and with its slow period."""
    size = machine.block_size
    longest = max(len(arrival.prompt_ids) + arrival.output_len for arrival in arrivals)
    needed = ceil(1.02 * longest / size) + 2  # the scheduler keeps a hundredth free
    blocks = max(round(choices.of_load["kv"] * machine.num_blocks), needed)
    slowdown = choices.of_load["slowdown"]
    if slowdown["factor"] != 1.0 and slowdown["at"]:
        at_s = slowdown["at"] * arrivals[-1].at_s
        machine = replace(machine, slowdown=((at_s, slowdown["factor"]),))
    return replace(machine, num_blocks=blocks, max_model_len=min(machine.max_model_len, (blocks - 1) * size))


def _classes(
    choices: Choices, machine: Machine, records: Mapping[str, list[TraceRequest]], rng: random.Random
) -> list[TrafficClass]:
    found = []
    for number, chosen in enumerate(choices.of_classes, start=1):
        bare = TrafficClass(
            str(number), _law(chosen["prompts"], records), _law(chosen["outputs"], records), share=chosen["share"]
        )
        found.append(replace(bare, slo=_slo(bare, choices, chosen, machine, rng)))
    return found


def _slo(of: TrafficClass, choices: Choices, chosen: Choice, machine: Machine, rng: random.Random) -> Slo | None:
    """Return the objectives of the class, raised to the floors."""
    lengths = [of.draw(rng, machine.max_model_len) for _ in range(SAMPLE)]
    prompt, output = (_percentile(values) for values in zip(*lengths, strict=True))
    least = floors(prompt, output, machine, _machine_entry(choices)["max_num_batched_tokens"])
    wanted = {
        name: max(chosen[name] / (1e3 if name == "tpot_ms" else 1.0), least[name])
        for name in OBJECTIVES[chosen["objectives"]]
    }
    if not wanted:
        return None
    return Slo(wanted.get("ttft_s"), wanted.get("tpot_ms"), wanted.get("e2e_s"), class_name=of.name)


def floors(prompt: int, output: int, machine: Machine, chunk: int) -> dict[str, float]:
    """Return minimum objectives in seconds for requests of this size: multiples of their time alone.

    `chunk`: prompt tokens per step. The machine has its initial speed.
    """
    entry = space()["floors"]
    cost = machine.cost.slower(machine.slowness(0.0))
    chunk_s = cost.step_s + cost.experts_s(min(chunk, prompt))
    prefill_s = ceil(prompt / chunk) * chunk_s + cost.prefill_s(0, prompt, inf)
    first_s = cost.rows_s(1, prompt)
    whole_s = prefill_s + (output - 1) * cost.rows_s(1, prompt + output / 2)
    return {
        "ttft_s": entry["ttft"] * prefill_s,
        "tpot_ms": entry["tpot"] * first_s,
        "e2e_s": entry["e2e"] * whole_s,
    }


def _percentile(values: Sequence[int]) -> int:
    """Return the 99th percentile."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]


def _law(entry: Choice, records: Mapping[str, list[TraceRequest]]) -> LengthDistribution:
    if entry["law"] == "trace":
        lines = records[entry["file"]]
        return Empirical([line.prompt_len if entry["column"] == "prompt" else line.output_len for line in lines])
    kinds: dict[str, type[Any]] = {
        "fixed": Fixed,
        "uniform": Uniform,
        "lognormal": LogNormal,
        "pareto": Pareto,
        "bimodal": Bimodal,
    }
    rest = {name: value for name, value in entry.items() if name != "law"}
    law: LengthDistribution = kinds[entry["law"]](
        **{n: tuple(v) if isinstance(v, list) else v for n, v in rest.items()}
    )
    return law


def _process(entry: Choice, records: Mapping[str, list[TraceRequest]]) -> ArrivalProcess:
    if entry["process"] == "gamma":
        return Gamma(entry["cv"])
    if entry["process"] == "onoff":
        return OnOff(entry["on_s"], entry["off_s"])
    if entry["process"] == "steps":
        return Steps(tuple(entry["factors"]))
    if entry["process"] == "trace":
        return Replayed([line.at_s for line in records[entry["file"]]])
    return Gamma()


def _hints(entry: Choice) -> LengthHints | None:
    if entry["kind"] == "exact":
        return ExactHints()
    if entry["kind"] == "noisy":
        return NoisyHints(entry["rmse"])
    if entry["kind"] == "factor":
        return ScaledHints(entry["factor"])
    if entry["kind"] == "shuffled":
        return ShuffledHints()
    if entry["kind"] == "liars":
        return MisleadingHints(
            entry["share"], entry["factor"], entry["rmse"], LIARS if entry["tenant"] == "own" else None
        )
    return None
