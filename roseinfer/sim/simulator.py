"""Requests arrive, the engine core steps, the clock jumps: what each request would have seen."""

import random
from collections import deque
from dataclasses import dataclass, field

from roseinfer.core.clock import ManualClock
from roseinfer.core.config import SchedulerConfig
from roseinfer.core.outputs import RequestOutput
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.kv.manager import KvManager
from roseinfer.sched.policies import make_policy
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.config import CostConfig, WorkloadConfig
from roseinfer.sim.runner import PricedRunner

VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    prompt_ids: list[int]
    output_len: int


@dataclass(slots=True)
class Lifetime:
    """When a request arrived and when each of its tokens was there, in simulated seconds."""

    arrival_s: float
    token_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token behind the first; None for outputs of one token."""
        behind = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / behind if behind else None

    @property
    def latency_s(self) -> float:
        return self.token_s[-1] - self.arrival_s


@dataclass(frozen=True, slots=True)
class Simulation:
    """`elapsed_s` simulated seconds, in `busy_s` of which a step ran."""

    lifetimes: list[Lifetime]
    elapsed_s: float
    busy_s: float
    steps: int
    preemptions: int


def make_arrivals(workload: WorkloadConfig) -> list[Arrival]:
    """Sorted by time."""
    rng = random.Random(workload.seed)
    at_s, arrivals = 0.0, []
    for _ in range(workload.num_requests):
        if workload.request_rate:
            at_s += rng.expovariate(workload.request_rate)
        length = rng.randint(workload.input_len_min, workload.input_len)
        prompt = [rng.randrange(2, VOCAB) for _ in range(length)]
        arrivals.append(Arrival(at_s, prompt, rng.randint(workload.output_len_min, workload.output_len)))
    return arrivals


def simulate(arrivals: list[Arrival], scheduler: SchedulerConfig, cost: CostConfig) -> Simulation:
    """Raises `RequestTooLongError` if a request could never run."""
    clock = ManualClock()
    runner = PricedRunner(cost, clock)
    kv = KvManager(cost.num_kv_blocks, cost.block_size, prefix_caching=cost.enable_prefix_caching)
    core = EngineCore(
        Scheduler(scheduler, kv, make_policy(scheduler), cost.max_model_len),
        runner,
        clock,
        depth=2 if scheduler.overlap else 1,
        vocab_size=VOCAB,
    )
    pending = deque(enumerate(arrivals))
    lifetimes = [Lifetime(arrival.at_s) for arrival in arrivals]
    while pending or core.busy:
        if not core.busy and pending[0][1].at_s > clock.now():
            clock.advance(pending[0][1].at_s - clock.now())
        while pending and pending[0][1].at_s <= clock.now():
            number, arrival = pending.popleft()
            params = SamplingParams(max_tokens=arrival.output_len, ignore_eos=True)
            core.add(Add(str(number), arrival.prompt_ids, params, arrival_s=arrival.at_s))
        _note(core.step(), lifetimes, clock.now())
    stats = core.stats()
    return Simulation(lifetimes, clock.now(), runner.busy_s, stats.step, stats.preemptions)


def _note(outputs: list[RequestOutput], lifetimes: list[Lifetime], now_s: float) -> None:
    for output in outputs:
        number = int(output.request_id.partition(":")[0])
        lifetimes[number].token_s += [now_s] * len(output.token_ids)
