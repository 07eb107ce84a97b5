"""Measurement of a step: host by phase, device by kind of kernel, and its share of the device's limits.

A batch of equal requests decodes in an engine of this process, perhaps with new prompts in every step. Some steps
without a profiler give host phases and the step's duration. Then torch's profiler watches some more for the kernels: it
hardly changes their durations, but slows the host down.
"""

import gc
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.breakdown.kernel_kinds import by_kind
from benchmarks.breakdown.limits import Limits
from benchmarks.breakdown.loads import Load, UnsteadyError, is_decoding, steps_of
from benchmarks.model_cost import Chunk, ModelCost, Work
from roseinfer.core.plan import StepPlan
from roseinfer.engine.local import LocalEngine

_OVER = object()
# A trace's categories of GPU work.
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True)
class Kernel:
    """Seconds and calls of a kernel in one step. On a CPU: of an operator without the operators that it calls.

    See `device_events` for kernels that overlap.
    """

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds per step.

    context: mean of the decoding requests. host: by phase. device: by kind. kernels: the longest first. work: of one
    step.
    """

    load: Load
    context: float
    step_s: float
    host: dict[str, float]
    device: dict[str, float]
    kernels: list[Kernel]
    work: Work
    limits: Limits

    @property
    def device_s(self) -> float:
        return sum(self.device.values())

    @property
    def bandwidth_share(self) -> float:
        """Share of the device's bandwidth that weights and K/V use over the whole step."""
        return self.work.bytes / self.step_s / self.limits.bytes_s

    @property
    def matrix_share(self) -> float:
        return self.work.flops / self.step_s / self.limits.flops_s


class HostClock:
    """`StepObserver` that sums the host's seconds by phase, without those of nested phases."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the sums; call it between steps only."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.plans: list[StepPlan] = []
        self._inner = [0.0]

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        self._inner.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - began
            self.seconds[phase] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def step_begins(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def step_ends(self, plan: StepPlan) -> None:
        """Do nothing: a step counts when it begins."""

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def measure(engine: LocalEngine, clock: HostClock, load: Load, cost: ModelCost, limits: Limits) -> Breakdown:
    """Measure a load. `clock`: the engine's observer. Raise `UnsteadyError` if the batch does not fit in a step."""
    steps = steps_of(engine, load)
    try:
        _advance(steps, load.warm_up)
        gc.collect()
        gc.freeze()
        clock.reset()
        began = time.perf_counter()
        _advance(steps, load.steps)
        step_s = (time.perf_counter() - began) / load.steps
        host = _host_phases(clock, step_s, load.steps)
        plans = clock.plans[-load.steps :]
        chunks = [_chunks(plan, load) for plan in plans]
        kernels = _profiled(steps, load.steps, on_cuda=engine.info.facts.device.startswith("cuda"))
    finally:
        gc.unfreeze()
        steps.close()
    work = _mean([cost.work(step) for step in chunks])
    contexts = [row.start + 1 for plan in plans for row in plan.rows if is_decoding(row.request_id)]
    context = sum(contexts) / max(1, len(contexts))
    device = by_kind((kernel.name, kernel.seconds) for kernel in kernels)
    return Breakdown(load, context, step_s, host, device, kernels, work, limits)


def _advance(steps: Any, count: int) -> None:
    for _ in range(count):
        if next(steps, _OVER) is _OVER:
            raise UnsteadyError("the requests ended before enough steps were measured")


def _chunks(plan: StepPlan, load: Load) -> list[Chunk]:
    if not load.is_met(plan):
        raise UnsteadyError(
            f"{load.name}: not computed in one step, but {len(plan.rows)} rows of {plan.num_tokens} tokens; raise "
            "max_num_seqs, max_num_batched_tokens, max_batch_size or the KV cache, or measure less"
        )
    return [Chunk(row.start, row.count, row.logits) for row in plan.rows]


def _host_phases(clock: HostClock, step_s: float, steps: int) -> dict[str, float]:
    """Return seconds per step; `rest` is the remainder of the step, the loop itself."""
    spent = {phase: seconds / steps for phase, seconds in clock.seconds.items()}
    named = {
        "plan": spent.get("plan", 0.0),
        "prepare inputs": spent.get("prepare", 0.0),
        "forward": spent.get("forward", 0.0) + spent.get("submit", 0.0),
        "sample": spent.get("sample", 0.0),
        "wait for the device": spent.get("collect", 0.0),
        "commit": spent.get("commit", 0.0),
    }
    return {**named, "rest": step_s - sum(named.values())}


def _profiled(steps: Any, count: int, *, on_cuda: bool) -> list[Kernel]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        torch.cuda.synchronize()  # a step in flight would be measured in part
    with profile(activities=activities) as profiler:
        _advance(steps, count)
        if on_cuda:
            torch.cuda.synchronize()
    found = _trace_kernels(profiler) if on_cuda else _operators(profiler)
    kernels = [Kernel(name, seconds / count, calls / count) for name, (seconds, calls) in found.items()]
    return sorted(kernels, key=lambda kernel: -kernel.seconds)


def _trace_kernels(profiler: profile) -> dict[str, tuple[float, int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return device_events(json.loads(path.read_text())["traceEvents"])


def device_events(events: Sequence[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Return seconds and calls of a GPU's work by name, from a trace's events in microseconds.

    Of overlapping kernels only the first to begin gets the time. A kernel that starts early and waits for its input
    would count it twice. So the seconds add up to the time in which the GPU works.
    """
    found: defaultdict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    over = 0.0
    works = [event for event in events if event.get("cat") in DEVICE_EVENTS]
    for event in sorted(works, key=lambda event: float(event["ts"])):
        began = max(float(event["ts"]), over)
        ended = max(float(event["ts"]) + float(event["dur"]), over)
        seconds, calls = found[event["name"]]
        found[event["name"]] = (seconds + (ended - began) * 1e-6, calls + 1)
        over = ended
    return dict(found)


def _operators(profiler: profile) -> dict[str, tuple[float, int]]:
    """Return the same for a CPU's operators, each without the operators that it calls."""
    return {
        average.key: (average.self_cpu_time_total * 1e-6, average.count)
        for average in profiler.key_averages()
        if average.self_cpu_time_total > 0
    }


def _mean(works: Sequence[Work]) -> Work:
    total, count = sum(works, Work()), len(works)
    sums = {name: value / count for name, value in asdict(total).items()}
    return Work(**sums | {"tokens": total.tokens // count})
