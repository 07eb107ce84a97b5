"""The arrivals that the options describe."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roseinfer.core.errors import ConfigError
from roseinfer.core.slo import Slo
from roseinfer.sim.config import WorkloadConfig
from roseinfer.sim.setups import Setup
from roseinfer.sim.traces import TraceRequest, read_trace
from roseinfer.sim.workload import VOCAB, Arrival, RequestMix, UniformLengths, bursts, gamma, poisson


def make_arrivals(workload: WorkloadConfig, setup: Setup | None = None, classes: Sequence[Slo] = ()) -> list[Arrival]:
    """Sorted by time. `classes`: instead of the setup's. Raises `ConfigError` for a trace that cannot be read."""
    traced = _trace(workload)
    mix = _mix(workload, setup, tuple(classes))
    if workload.trace_lengths and traced:
        return _with_trace_lengths(traced, workload.seed, mix, setup.machine.max_model_len if setup else None)
    return mix.requests([line.at_s for line in traced] if traced else _times(workload), workload.seed)


@dataclass(frozen=True, slots=True)
class OptionArrivals:
    """`make_arrivals` by seed, at a rate; travels to other processes."""

    workload: WorkloadConfig
    setup: Setup | None
    rate: float | None
    classes: tuple[Slo, ...] = ()

    def __call__(self, seed: int) -> Sequence[Arrival]:
        changed = replace(self.workload, seed=self.workload.seed + seed)
        if self.rate is not None:
            changed = replace(changed, request_rate=self.rate)
        return make_arrivals(changed, self.setup, self.classes)


def _mix(workload: WorkloadConfig, setup: Setup | None, classes: tuple[Slo, ...]) -> RequestMix:
    """The setup's, or uniform lengths, with what the options ask for. Tenants are named 1, 2, ..."""
    w = workload
    if setup is not None:
        mix = setup.mix
    else:
        law = UniformLengths(w.input_len_min, w.input_len, w.output_len_min, w.output_len)
        mix = RequestMix(law, predictor_rmse=None, distinct=True)
    mix = replace(mix, classes=classes or mix.classes, predictor_rmse=w.predictor_rmse or mix.predictor_rmse)
    shares = w.class_share_list
    if shares and len(shares) != len(mix.classes):
        raise ConfigError(f"class_shares: {len(shares)} shares for {len(mix.classes)} classes")
    if shares:
        mix = replace(mix, weights=shares)
    shares = w.tenant_share_list
    if shares:
        mix = replace(mix, tenants=tuple(str(i + 1) for i in range(len(shares))), tenant_weights=shares)
    return mix


def _trace(workload: WorkloadConfig) -> list[TraceRequest]:
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


def _with_trace_lengths(
    traced: Sequence[TraceRequest], seed: int, mix: RequestMix, context: int | None
) -> list[Arrival]:
    """Requests longer than the machine's context are left out."""
    rng = random.Random(f"trace {seed}")
    arrivals = []
    for line in traced:
        if context is not None and line.prompt_len + line.output_len > context:
            continue
        arrivals.append(mix.promised(Arrival(line.at_s, line.prompt_ids(VOCAB), line.output_len), rng))
    if not arrivals:
        raise ConfigError("trace: every request exceeds the context")
    return arrivals
