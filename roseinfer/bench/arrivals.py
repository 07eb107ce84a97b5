"""What an open-loop load sends, and when: drawn from its options alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from roseinfer.bench.config import OpenLoopConfig, parse_numbers
from roseinfer.bench.schemas import constrained, record_schema
from roseinfer.bench.slo_classes import LoadClass, read_classes
from roseinfer.core.errors import ConfigError

# Ids below are special tokens of most vocabularies.
FIRST_ID = 10


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt: its tokens, its text unless it is sent as tokens, and how many to generate. `at_s`: when it is due, if
    the dataset says so."""

    prompt_ids: list[int]
    output_len: int
    text: str | None = None
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ramp:
    """Requests a second from `start` for the first request to `end` for the last, in a line or by equal factors."""

    strategy: str
    start: float
    end: float

    def rate(self, number: int, count: int) -> float:
        progress = number / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


@dataclass(frozen=True, slots=True)
class Planned:
    """A request to come: `at_s` seconds after the load begins. `schema`: what its output follows. `text`: sent instead
    of its tokens.
    """

    number: int
    at_s: float
    prompt_ids: list[int]
    output_len: int
    slo: LoadClass | None = None
    schema: dict[str, Any] | None = None
    text: str | None = None


def classes_of(config: OpenLoopConfig) -> tuple[LoadClass, ...]:
    """Those that the options name, none without. Raises `ConfigError` for a file that holds none."""
    return read_classes(config.slo_classes) if config.slo_classes else ()


def draw(config: OpenLoopConfig, classes: Sequence[LoadClass] = ()) -> list[Planned]:
    """The load's requests in order of arrival; the same options draw the same requests.

    `classes` change nothing but the objectives, and the lengths if they have their own. They do not depend on whether
    the server is told. Which requests have a schema changes nothing else either.
    """
    rng = random.Random(_key(config, classes))
    classes_rng = random.Random(f"classes {_key(config)}")
    shares = [entry.share for entry in classes]
    cycle = parse_numbers("cycle", config.cycle) if config.cycle else None
    planned: list[Planned] = []
    at_s = 0.0
    for number in range(config.num):
        slo = classes_rng.choices(classes, shares)[0] if classes else None
        if slo is not None and slo.prompts:
            input_len = rng.randint(*slo.prompts)
        elif cycle:
            input_len = cycle[number % len(cycle)]
        else:
            input_len = rng.randint(config.in_min, config.in_len) if config.in_min else config.in_len
        if slo is not None and slo.outputs:
            output_len = rng.randint(*slo.outputs)
        else:
            output_len = rng.randint(config.out_min, config.out_len) if config.out_min else config.out_len
        at_s += _gap_s(config, rng)
        prompt_ids = _prompt(config, rng, input_len)
        if config.same_prompt and planned:
            prompt_ids = planned[0].prompt_ids
        schema = record_schema(output_len) if constrained(number, config.schema_share) else None
        planned.append(Planned(number, at_s, prompt_ids, output_len, slo, schema))
    return planned


def plan(
    config: OpenLoopConfig, samples: Sequence[Sample], classes: Sequence[LoadClass] = (), ramp: Ramp | None = None
) -> list[Planned]:
    """A dataset's samples, due when they say so, else at the load's rate. Raises `ConfigError`."""
    if any(entry.prompts or entry.outputs for entry in classes):
        raise ConfigError("slo_classes with lengths of their own need dataset_name ids")
    rng = random.Random(f"classes {config.seed} {len(samples)}")
    shares = [entry.share for entry in classes]
    times = arrival_times(config, len(samples), ramp)
    planned = []
    for number, (sample, at_s) in enumerate(zip(samples, times, strict=True)):
        slo = rng.choices(classes, shares)[0] if classes else None
        schema = record_schema(sample.output_len) if constrained(number, config.schema_share) else None
        due_s = at_s if sample.at_s is None else sample.at_s
        planned.append(Planned(number, due_s, sample.prompt_ids, sample.output_len, slo, schema, sample.text))
    return sorted(planned, key=lambda each: each.at_s)


def arrival_times(config: OpenLoopConfig, count: int, ramp: Ramp | None = None) -> list[float]:
    """Seconds after the load begins. Without a ramp they are stretched so that the last is due at count / rate,
    whatever was drawn: rates of runs with other seeds can be compared.
    """
    rng = random.Random(f"arrivals {config.seed} {count}")
    rates = [ramp.rate(number, count) for number in range(count)] if ramp else [config.rate] * count
    gaps = [_gap_s(replace(config, rate=rate), rng) if rate > 0 else 0.0 for rate in rates]
    times = list(accumulate(gaps))
    if ramp is None and times and times[-1] > 0:
        stretch = count / config.rate / times[-1]
        times = [at_s * stretch for at_s in times]
    return times


def _key(config: OpenLoopConfig, classes: Sequence[LoadClass] = ()) -> str:
    """Whatever changes the work changes its prompts too. A burst has no rate: any fixed number stands for it."""
    rate = 10 if config.workload == "burst" else float(config.rate)
    lengths = (config.in_len, config.in_min, config.out_len, config.out_min, config.cycle)
    own = tuple((entry.prompts, entry.outputs) for entry in classes if entry.prompts or entry.outputs)
    return repr((config.seed, config.workload, config.num, rate, *lengths, *own))


def _gap_s(config: OpenLoopConfig, rng: random.Random) -> float:
    """From one arrival to the next; the first request of all but a burst comes after a gap too."""
    match config.workload:
        case "poisson":
            return rng.expovariate(config.rate)
        case "gamma":
            return rng.gammavariate(config.burstiness, 1 / (config.rate * config.burstiness))
        case "uniform":
            return 1 / config.rate
    return 0.0


def _prompt(config: OpenLoopConfig, rng: random.Random, length: int) -> list[int]:
    """At least one id is the request's own."""
    shared = [7 + (i * 31) % 999 for i in range(config.shared_prefix)]
    return shared + [rng.randrange(FIRST_ID, config.vocab) for _ in range(max(1, length - len(shared)))]
