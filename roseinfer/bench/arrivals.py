"""Requests of an open-loop load and their arrival times, drawn from its options alone."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from roseinfer.bench.config import OpenLoopConfig, parse_numbers
from roseinfer.bench.schemas import constrained, record_schema
from roseinfer.bench.slo_classes import LoadClass, read_classes
from roseinfer.core.errors import ConfigError

# Lower ids are special tokens in most vocabularies.
MIN_TOKEN_ID = 10


@dataclass(frozen=True, slots=True)
class DatasetSample:
    """A prompt and how many tokens to generate.

    `text`: the prompt as text, None if it is sent as tokens. `at_s`: arrival time, if the dataset gives one.
    """

    prompt_ids: list[int]
    output_len: int
    text: str | None = None
    at_s: float | None = None


@dataclass(frozen=True, slots=True)
class Ramp:
    """Request rate, from `start` for the first request to `end` for the last, in equal steps or by equal factors."""

    strategy: str
    start: float
    end: float

    def rate(self, number: int, count: int) -> float:
        progress = number / max(count - 1, 1)
        if self.strategy == "linear":
            return self.start + (self.end - self.start) * progress
        return self.start * (self.end / self.start) ** progress


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request to send `at_s` seconds after the load begins.

    `text`: sent instead of the token ids. `schema`: JSON schema that its output follows.
    """

    number: int
    at_s: float
    prompt_ids: list[int]
    output_len: int
    slo: LoadClass | None = None
    schema: dict[str, Any] | None = None
    text: str | None = None


def load_classes(config: OpenLoopConfig) -> tuple[LoadClass, ...]:
    """Return the latency classes that the options name, or none. Raise `ConfigError` for a file without classes."""
    return read_classes(config.slo_classes) if config.slo_classes else ()


def draw(config: OpenLoopConfig, classes: Sequence[LoadClass] = ()) -> list[PlannedRequest]:
    """Return the load's requests in order of arrival; the same options draw the same requests.

    `classes` change only objectives, and lengths if they have their own, whether or not objectives are sent. The
    requests that have a schema do not change anything else either.
    """
    rng = random.Random(_key(config, classes))
    classes_rng = random.Random(f"classes {_key(config)}")
    shares = [entry.share for entry in classes]
    cycle = parse_numbers("cycle", config.cycle) if config.cycle else None
    planned: list[PlannedRequest] = []
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
        planned.append(PlannedRequest(number, at_s, prompt_ids, output_len, slo, schema))
    return planned


def plan(
    config: OpenLoopConfig,
    samples: Sequence[DatasetSample],
    classes: Sequence[LoadClass] = (),
    ramp: Ramp | None = None,
) -> list[PlannedRequest]:
    """Return a dataset's samples as requests, due at their own time or at the load's rate. Raise `ConfigError`."""
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
        planned.append(PlannedRequest(number, due_s, sample.prompt_ids, sample.output_len, slo, schema, sample.text))
    return sorted(planned, key=lambda each: each.at_s)


def arrival_times(config: OpenLoopConfig, count: int, ramp: Ramp | None = None) -> list[float]:
    """Return arrival times in seconds after the load begins.

    Without a ramp they are scaled so that the last request is due at count / rate. So rates of runs with other seeds
    can be compared.
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
    """Return the random seed of prompts: options that change the work change the prompts.

    A burst has no rate, so any fixed number will do.
    """
    rate = 10 if config.workload == "burst" else float(config.rate)
    lengths = (config.in_len, config.in_min, config.out_len, config.out_min, config.cycle)
    own = tuple((entry.prompts, entry.outputs) for entry in classes if entry.prompts or entry.outputs)
    return repr((config.seed, config.workload, config.num, rate, *lengths, *own))


def _gap_s(config: OpenLoopConfig, rng: random.Random) -> float:
    """Return the gap before the next arrival; the first request of all but a burst has one too."""
    match config.workload:
        case "poisson":
            return rng.expovariate(config.rate)
        case "gamma":
            return rng.gammavariate(config.burstiness, 1 / (config.rate * config.burstiness))
        case "uniform":
            return 1 / config.rate
    return 0.0


def _prompt(config: OpenLoopConfig, rng: random.Random, length: int) -> list[int]:
    """Return a prompt whose last token id, at least, is its own."""
    shared = [7 + (i * 31) % 999 for i in range(config.shared_prefix)]
    return shared + [rng.randrange(MIN_TOKEN_ID, config.vocab) for _ in range(max(1, length - len(shared)))]
