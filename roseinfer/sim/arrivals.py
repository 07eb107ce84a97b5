"""The arrivals that the options describe."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roseinfer.core.errors import ConfigError
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import Setup
from roseinfer.sim.traces import Traced, read_trace
from roseinfer.sim.workload import VOCAB, Arrival, bursts, gamma, poisson


def make_arrivals(workload: WorkloadConfig, setup: Setup | None = None) -> list[Arrival]:
    """Sorted by time. Raises `ConfigError` for a trace that cannot be read."""
    traced = _trace(workload)
    times = [line.at_s for line in traced] if traced else _times(workload)
    if workload.trace_lengths and traced:
        return _with_trace_lengths(traced, workload, setup)
    if setup is not None:
        return setup.mix.requests(times, workload.seed)
    return _uniform(times, workload)


@dataclass(frozen=True, slots=True)
class AtRate:
    """`make_arrivals` by seed, at a rate; travels to other processes."""

    workload: WorkloadConfig
    setup: Setup | None
    rate: float | None

    def __call__(self, seed: int) -> Sequence[Arrival]:
        changed = replace(self.workload, seed=self.workload.seed + seed)
        if self.rate is not None:
            changed = replace(changed, request_rate=self.rate)
        return make_arrivals(changed, self.setup)


def _trace(workload: WorkloadConfig) -> list[Traced]:
    if workload.trace is None:
        return []
    lines = read_trace(workload.trace, seconds=workload.trace_seconds, speed=workload.trace_speed)
    return lines[: workload.num_requests]


def _times(workload: WorkloadConfig) -> list[float]:
    rate, count, seed = workload.request_rate, workload.num_requests, workload.seed
    if not rate:
        return [0.0] * count
    if workload.workload == "gamma":
        return gamma(rate, count, seed, workload.cv)
    if workload.workload == "bursts":
        return bursts(rate, count, seed)
    return poisson(rate, count, seed)


def _uniform(times: Sequence[float], workload: WorkloadConfig) -> list[Arrival]:
    rng = random.Random(f"uniform {workload.seed}")
    arrivals = []
    for at_s in times:
        length = rng.randint(workload.input_len_min, workload.input_len)
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        arrivals.append(Arrival(at_s, prompt, rng.randint(workload.output_len_min, workload.output_len)))
    return arrivals


def _with_trace_lengths(traced: Sequence[Traced], workload: WorkloadConfig, setup: Setup | None) -> list[Arrival]:
    """Requests longer than the machine's context are left out."""
    context = setup.machine.max_model_len if setup else None
    rng = random.Random(f"trace {workload.seed}")
    arrivals = []
    for line in traced:
        if context is not None and line.prompt_len + line.output_len > context:
            continue
        slo = predicted = None
        if setup is not None:
            slo = rng.choices(setup.mix.classes, setup.mix.weights or None)[0]
            predicted = setup.mix.predict(line.output_len, rng)
        arrivals.append(Arrival(line.at_s, line.prompt_ids(VOCAB), line.output_len, slo, predicted))
    if not arrivals:
        raise ConfigError("trace: every request exceeds the context")
    return arrivals
