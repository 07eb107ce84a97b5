"""Loads in which requests wait or are rejected for different causes, for `benchmarks.why_truth`.

All use the machine of the setup scorpio-8b, which serves at most 7.3 requests per second, or one that lacks a resource.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roseinfer.core.slo import Slo
from roseinfer.priced.machine import Machine
from roseinfer.sim.distributions import Fixed, Gamma, LogNormal, OnOff
from roseinfer.sim.length_hints import NoisyHints
from roseinfer.sim.setups import SCORPIO_8B
from roseinfer.sim.workload import Arrival, TrafficClass, Workload

PROMPTS, OUTPUTS = LogNormal(70, 1.35, 4, 1024), LogNormal(260, 0.85, 1, 1000)
PUBLISHED = tuple(
    TrafficClass(str(number), PROMPTS, OUTPUTS, Slo(ttft_s, tpot_s))
    for number, (ttft_s, tpot_s) in enumerate([(0.5, 0.03), (2, 0.03), (3, 0.03), (0.5, 0.05), (1, 0.05), (7.5, 0.05)])
)
READING = TrafficClass("reading", PROMPTS, OUTPUTS, Slo(3.0, 0.05))
PATIENT = TrafficClass("patient", PROMPTS, OUTPUTS, Slo(tpot_s=0.05))
BEST_EFFORT = TrafficClass("best effort", PROMPTS, OUTPUTS)
WHOLE = TrafficClass("whole", PROMPTS, OUTPUTS, Slo(e2e_s=20.0))
DOCUMENTS = TrafficClass("documents", LogNormal(6000, 0.4, 2000, 12_000), LogNormal(60, 0.5, 4, 300), Slo(12.0, 0.05))
HASTY = TrafficClass("hasty", PROMPTS, Fixed(200), Slo(0.060, 0.03))


@dataclass(frozen=True, slots=True)
class Load:
    """One load. `scheduler`: options common to all policies."""

    name: str
    workload: Workload
    machine: Machine = SCORPIO_8B.machine
    scheduler: Mapping[str, Any] = field(default_factory=lambda: SCORPIO_8B.scheduler)

    def requests(self, count: int, seed: int) -> list[Arrival]:
        return self.workload.requests(count, f"why {seed}")


def _load(name: str, rate: float, *classes: TrafficClass, process: Any = None, **changes: Any) -> Load:
    """Build a load. `changes` apply to the machine where it has such a field, else to the scheduler."""
    machine, scheduler = SCORPIO_8B.machine, dict(SCORPIO_8B.scheduler)
    for key, value in changes.items():
        if hasattr(machine, key):
            machine = replace(machine, **{key: value})
        else:
            scheduler[key] = value
    context = machine.max_model_len
    workload = Workload(classes, rate, process or Gamma(), NoisyHints(195.0), context)
    return Load(name, workload, machine, scheduler)


def _shared(of: TrafficClass, **tenants: float) -> list[TrafficClass]:
    return [replace(of, name=f"{of.name} of {name}", tenant=name, share=share) for name, share in tenants.items()]


LOADS = (
    _load("busy", 9.0, *PUBLISHED),
    _load("overload", 18.0, *PUBLISHED),
    _load("bursts", 9.0, *PUBLISHED, process=OnOff(6.0, 12.0)),
    _load("few seats", 6.0, READING, replace(READING, name="long", slo=Slo(8.0, 0.05)), max_num_seqs=24),
    _load("few blocks", 7.0, READING, replace(READING, name="long", slo=Slo(8.0, 0.05)), num_blocks=700),
    _load("small budget", 9.0, READING, replace(PATIENT, share=0.3), max_num_batched_tokens=128, max_num_seqs=100),
    _load("tenants", 18.0, *_shared(READING, large=8.0, small=1.0, other=1.0)),
    _load("tight paces", 9.0, replace(PUBLISHED[1], slo=Slo(3.0, 0.021), share=0.2), READING),
    _load("documents", 5.0, READING, replace(DOCUMENTS, share=0.15), max_model_len=16_384),
    _load("best effort beside", 14.0, READING, replace(BEST_EFFORT, share=1.0)),
    _load("best effort alone", 9.0, BEST_EFFORT, max_num_seqs=48),
    _load("patient beside", 18.0, READING, PATIENT),
    _load("whole requests", 14.0, WHOLE, READING),
    _load("hasty", 7.0, READING, replace(HASTY, share=0.3)),
)
