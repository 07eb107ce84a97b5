"""Space of random loads (`random_loads.toml`), draws from it, and their descriptions."""

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import exp, log
from pathlib import Path
from typing import Any

SLIGHT_NOISE = 0.03  # properties that a stationary load may have
OBJECTIVES = {"both": ("ttft_s", "tpot_ms"), "ttft": ("ttft_s",), "tpot": ("tpot_ms",), "e2e": ("e2e_s",), "none": ()}
Choice = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Choices:
    """One draw: an entry of each list (`of_load`, and for each class), and the load over capacity."""

    load: float
    of_load: Choice
    of_classes: Sequence[Choice]

    @property
    def trace_files(self) -> set[str]:
        """Return the names of the traces that the load needs."""
        entries = [self.of_load["arrivals"]]
        for chosen in self.of_classes:
            entries += [chosen["prompts"], chosen["outputs"]]
        return {entry["file"] for entry in entries if "file" in entry}


@cache
def space() -> Mapping[str, Any]:
    """Return the lists of the file."""
    return tomllib.loads(files("benchmarks.research").joinpath("random_loads.toml").read_text(encoding="utf-8"))


def draw_choices(seed: int, number: int) -> Choices:
    """Draw from every list; draw again while no class has objectives."""
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


def kinds_of(choices: Choices) -> tuple[str, ...]:
    """Return `stationary`, or everything that makes the load not stationary.

    Stationary: Poisson or gamma arrivals, truthful hints, and a constant machine with noise of at most 3% and all of
    its KV blocks.
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
    """Describe the draw in one line."""
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
    """Format an entry: `gamma 4`, `trace conv`."""
    if "file" in entry:
        return f"trace {Path(entry['file']).stem.rpartition('_')[2]}"
    rest = [f"{value:g}" for value in entry.values() if isinstance(value, int | float)]
    rest += [value for name, value in entry.items() if name == "tenant"]
    rest += ["-".join(f"{part:g}" for part in value) for value in entry.values() if isinstance(value, list)]
    return "-".join([entry[kind], *rest]) if kind == "law" else " ".join([entry[kind], *rest])
