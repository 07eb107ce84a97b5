"""Loads drawn at random from the lists of `random_loads.toml`, which says what they are and how they are drawn."""

import random
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sched.cost import CostParams
from roseinfer.sim.bound import capacity
from roseinfer.sim.hints import Exact, Liars, Noisy, Scaled, Shuffled
from roseinfer.sim.laws import Bimodal, Empirical, Fixed, Law, LogNormal, Pareto, Uniform
from roseinfer.sim.machine import Machine, Stalls
from roseinfer.sim.processes import Gamma, OnOff, Process, Replayed, Steps
from roseinfer.sim.traces import Traced, read_trace
from roseinfer.sim.workload import Arrival, Hints, TrafficClass, Workload

SAMPLE = 2000  # requests that capacity is taken from, and lengths of a class whose 99th percentile sets its floors
CAPACITY_TARGET = 0.99
SLIGHT_NOISE = 0.03  # what a load may have and be stationary all the same
LIARS = "liars"  # the tenant of those who lie, where they have one of their own
OBJECTIVES = {"both": ("ttft_s", "tpot_ms"), "ttft": ("ttft_s",), "tpot": ("tpot_ms",), "e2e": ("e2e_s",), "none": ()}
COMMON = ("max_num_seqs", "max_num_batched_tokens")  # scheduler options of a machine
Choice = Mapping[str, Any]


class TraceNeededError(ConfigError):
    """A load takes times or lengths from a trace that is not there."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What was drawn: an entry of each list (`of_load`, and for each class), and the load over capacity."""

    load: float
    of_load: Choice
    of_classes: Sequence[Choice]

    @property
    def trace_files(self) -> set[str]:
        """Names of the traces that it needs."""
        entries = [self.of_load["arrivals"]]
        for chosen in self.of_classes:
            entries += [chosen["prompts"], chosen["outputs"]]
        return {entry["file"] for entry in entries if "file" in entry}


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """Load `number` of those of `seed`: the same requests on the same machine for every policy.

    `scheduler`: options common to all policies. `kinds`: "stationary", or what makes it not so. `rate`: requests a
    second offered, `capacity` times `choices.load`.
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
        """Of a load in the space it was drawn from."""
        return f"v{space()['version']} seed {self.seed} load {self.number}"

    @property
    def kinds(self) -> tuple[str, ...]:
        return kinds_of(self.choices)

    @property
    def description(self) -> str:
        return describe(self.choices)


@cache
def space() -> Mapping[str, Any]:
    """The lists, as the file has them."""
    return tomllib.loads(files("roseinfer.sim").joinpath("random_loads.toml").read_text(encoding="utf-8"))


# --- drawing ----------------------------------------------------------------------------------------------------
def capacity_of(sample: Sequence[Arrival], machine: Machine) -> float:
    """Requests a second at which a clairvoyant scheduler could just serve them."""
    return capacity(sample, machine, CAPACITY_TARGET)


def draw_load(
    seed: int,
    number: int,
    *,
    traces: str | Path | None = None,
    measure: Callable[[Sequence[Arrival], Machine], float] = capacity_of,
) -> RandomLoad:
    """Raises `TraceNeededError` if it needs a trace and `traces`, the directory, is None or lacks it.

    `measure` gives the capacity, for who knows it from before.
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


def draw_choices(seed: int, number: int) -> Choices:
    """Every list by itself, and all again while nobody is promised anything."""
    rng = random.Random(f"random load {space()['version']} {seed} {number}")
    while True:
        low, high = space()["load"]
        load = exp(rng.uniform(log(low), log(high)))
        of_load = {name: rng.choice(entries) for name, entries in space()["load_choices"].items()}
        machine = space()["machines"][of_load["machine"]]
        lists = {**space()["class_choices"], **{name: machine[name] for name in ("ttft_s", "tpot_ms", "e2e_s")}}
        of_classes = [{name: rng.choice(entries) for name, entries in lists.items()} for _ in range(of_load["classes"])]
        if of_load["lengths"] == "shared":
            shared = {name: of_classes[0][name] for name in ("prompts", "outputs")}
            of_classes = [{**chosen, **shared} for chosen in of_classes]
        if any(chosen["objectives"] != "none" for chosen in of_classes):
            return Choices(load, of_load, of_classes)


def _records(choices: Choices, traces: str | Path | None) -> dict[str, list[Traced]]:
    found = {}
    for name in sorted(choices.trace_files):
        if traces is None or not (Path(traces) / name).is_file():
            where = "no directory of traces is given" if traces is None else f"{traces} does not hold it"
            raise TraceNeededError(f"traces: this load needs {name}, and {where}")
        found[name] = _read(str(Path(traces) / name))
    return found


_read = cache(read_trace)


def _count(sample: Sequence[Arrival]) -> int:
    """Requests of a run: fewer where prompts are long."""
    long = fmean(len(arrival.prompt_ids) for arrival in sample) > space()["long_prompt"]
    return space()["long_requests"] if long else space()["requests"]


# --- machines ---------------------------------------------------------------------------------------------------
def _machine_entry(choices: Choices) -> Mapping[str, Any]:
    return space()["machines"][choices.of_load["machine"]]


def _machine(choices: Choices) -> Machine:
    """As it is at the first arrival, with all of its KV blocks."""
    entry, of_load = _machine_entry(choices), choices.of_load
    stalls, slowdown = of_load["stalls"], of_load["slowdown"]
    return Machine(
        cost=CostParams(**entry["cost"]),
        noise=of_load["noise"],
        max_model_len=entry["max_model_len"],
        num_kv_blocks=entry["num_kv_blocks"],
        block_size=entry["block_size"],
        prefix_caching=False,
        stalls=Stalls(stalls["every_s"], stalls["lasts_s"]) if stalls["lasts_s"] else None,
        slowdown=((0.0, slowdown["factor"]),) if slowdown["factor"] != 1.0 and slowdown["at"] == 0.0 else (),
    )


def _fitted(machine: Machine, choices: Choices, arrivals: Sequence[Arrival]) -> Machine:
    """With the KV blocks that it has left, but room for the longest request, and slower at a time of the run."""
    size = machine.block_size
    longest = max(len(arrival.prompt_ids) + arrival.output_len for arrival in arrivals)
    needed = ceil(1.02 * longest / size) + 2  # the scheduler keeps a hundredth free
    blocks = max(round(choices.of_load["kv"] * machine.num_kv_blocks), needed)
    slowdown = choices.of_load["slowdown"]
    if slowdown["factor"] != 1.0 and slowdown["at"]:
        at_s = slowdown["at"] * arrivals[-1].at_s
        machine = replace(machine, slowdown=((at_s, slowdown["factor"]),))
    return replace(machine, num_kv_blocks=blocks, max_model_len=min(machine.max_model_len, (blocks - 1) * size))


# --- classes ----------------------------------------------------------------------------------------------------
def _classes(
    choices: Choices, machine: Machine, records: Mapping[str, list[Traced]], rng: random.Random
) -> list[TrafficClass]:
    found = []
    for number, chosen in enumerate(choices.of_classes, start=1):
        bare = TrafficClass(
            str(number), _law(chosen["prompts"], records), _law(chosen["outputs"], records), share=chosen["share"]
        )
        found.append(replace(bare, slo=_slo(bare, choices, chosen, machine, rng)))
    return found


def _slo(of: TrafficClass, choices: Choices, chosen: Choice, machine: Machine, rng: random.Random) -> Slo | None:
    """What the class is promised, and no less than the floors."""
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
    """The least objectives, in seconds, for requests of so many tokens: multiples of what they take alone.

    `chunk`: prompt tokens of a step. The machine is as slow as it is at the start.
    """
    entry = space()["floors"]
    cost = machine.cost.slower(machine.slowness(0.0))
    prefill_s = ceil(prompt / chunk) * cost.step_s + cost.prefill_s(0, prompt)
    first_s = cost.step_s + cost.row_s + cost.context_s * prompt
    whole_s = prefill_s + (output - 1) * (cost.step_s + cost.row_s + cost.context_s * (prompt + output / 2))
    return {
        "ttft_s": entry["ttft"] * prefill_s,
        "tpot_ms": entry["tpot"] * first_s,
        "e2e_s": entry["e2e"] * whole_s,
    }


def _percentile(values: Sequence[int]) -> int:
    """The 99th."""
    return sorted(values)[ceil(0.99 * len(values)) - 1]


def _law(entry: Choice, records: Mapping[str, list[Traced]]) -> Law:
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
    law: Law = kinds[entry["law"]](**{n: tuple(v) if isinstance(v, list) else v for n, v in rest.items()})
    return law


def _process(entry: Choice, records: Mapping[str, list[Traced]]) -> Process:
    if entry["process"] == "gamma":
        return Gamma(entry["cv"])
    if entry["process"] == "onoff":
        return OnOff(entry["on_s"], entry["off_s"])
    if entry["process"] == "steps":
        return Steps(tuple(entry["factors"]))
    if entry["process"] == "trace":
        return Replayed([line.at_s for line in records[entry["file"]]])
    return Gamma()


def _hints(entry: Choice) -> Hints | None:
    if entry["kind"] == "exact":
        return Exact()
    if entry["kind"] == "noisy":
        return Noisy(entry["rmse"])
    if entry["kind"] == "factor":
        return Scaled(entry["factor"])
    if entry["kind"] == "shuffled":
        return Shuffled()
    if entry["kind"] == "liars":
        return Liars(entry["share"], entry["factor"], entry["rmse"], LIARS if entry["tenant"] == "own" else None)
    return None


# --- what is said of a load -------------------------------------------------------------------------------------
def kinds_of(choices: Choices) -> tuple[str, ...]:
    """`stationary`: Poisson or gamma arrivals, hints that do not lie, and a machine that stays as it is, with a noise
    of at most 3% and all of its KV blocks. Else all that makes it not so.
    """
    of_load = choices.of_load
    process = of_load["arrivals"]["process"]
    tags = {
        "noise": of_load["noise"] > SLIGHT_NOISE,
        "stalls": of_load["stalls"]["lasts_s"] > 0,
        "slowdown": of_load["slowdown"]["factor"] != 1.0,
        "bursts": process in ("onoff", "steps"),
        "trace": process == "trace",
        "kv": of_load["kv"] < 1.0,
        "lying": of_load["hints"]["kind"] == "liars",
    }
    return tuple(name for name, is_so in tags.items() if is_so) or ("stationary",)


def describe(choices: Choices) -> str:
    """In a line."""
    of_load = choices.of_load
    parts = [
        f"{of_load['machine']} x{choices.load:.2f}",
        _words(of_load["arrivals"], "process"),
        f"hints {_words(of_load['hints'], 'kind')}",
    ]
    if of_load["kv"] < 1.0:
        parts.append(f"kv {of_load['kv']:g}")
    if of_load["noise"]:
        parts.append(f"noise {of_load['noise']:g}")
    if of_load["stalls"]["lasts_s"]:
        parts.append(f"stalls {of_load['stalls']['lasts_s']:g}s/{of_load['stalls']['every_s']:g}s")
    if of_load["slowdown"]["factor"] != 1.0:
        parts.append(f"slower {of_load['slowdown']['factor']:g} from {of_load['slowdown']['at']:g}")
    return ", ".join(parts) + " | " + "; ".join(_class_words(choices))


def _class_words(choices: Choices) -> list[str]:
    total = sum(chosen["share"] for chosen in choices.of_classes)
    found = []
    for chosen in choices.of_classes:
        units = {"ttft_s": "s", "tpot_ms": "ms", "e2e_s": "s e2e"}
        promised = "/".join(f"{chosen[name]:g}{units[name]}" for name in OBJECTIVES[chosen["objectives"]])
        found.append(f"{chosen['share'] / total:.0%} {promised or 'best effort'}")
    if choices.of_load["lengths"] == "shared":
        return [*found, _lengths(choices.of_classes[0])]
    return [f"{words} {_lengths(chosen)}" for words, chosen in zip(found, choices.of_classes, strict=True)]


def _lengths(chosen: Choice) -> str:
    return f"{_words(chosen['prompts'], 'law')}>{_words(chosen['outputs'], 'law')}"


def _words(entry: Choice, kind: str) -> str:
    """`gamma 4`, `trace conv`."""
    if "file" in entry:
        return f"trace {Path(entry['file']).stem.rpartition('_')[2]}"
    rest = [f"{value:g}" for value in entry.values() if isinstance(value, int | float)]
    rest += [value for name, value in entry.items() if name == "tenant"]
    rest += ["-".join(f"{part:g}" for part in value) for value in entry.values() if isinstance(value, list)]
    return "-".join([entry[kind], *rest]) if kind == "law" else " ".join([entry[kind], *rest])
