"""Requests arrive, the engine core steps, the clock jumps: what each request would have seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter

from roseinfer.core.clock import ManualClock
from roseinfer.core.config import SchedulerConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.core.events import Event
from roseinfer.core.outputs import COMPLETE, FinishReason, RequestOutput
from roseinfer.core.plan import StepLimits
from roseinfer.core.request import RequestMeta, sequence_id
from roseinfer.core.sampling import SamplingParams
from roseinfer.core.slo import Rejection, Slo
from roseinfer.engine.core import HELD_BACK_S, EngineCore
from roseinfer.engine.messages import Add
from roseinfer.kv.manager import KvManager
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost import CostModel
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.policy import Decision, Policy, View
from roseinfer.sched.registry import make_policy
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.machine import END, ExpectedRunner
from roseinfer.sim.workload import VOCAB, Arrival

# Turns in a row in which nothing is planned, nor in flight, though requests are there. The scheduler goes on without a
# policy that holds all of them back long before (`sched/liveness.py`); whoever gets here would never end.
STUCK_TURNS = 1000


class StuckError(RoseinferError):
    """The simulated scheduler plans nothing any more, although requests wait or run."""


@dataclass(slots=True)
class Lifetime:
    """When a request arrived and when each of its tokens was there, in simulated seconds; how it ended, and why it was
    turned away if it was.
    """

    arrival_s: float
    slo: Slo | None = None
    output_len: int = 0
    tenant: str = ""
    token_s: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    rejection: Rejection | None = None

    @property
    def served(self) -> bool:
        return self.reason in COMPLETE

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

    @property
    def missed(self) -> list[str]:
        """The objectives that it did not keep, if it finished."""
        if self.slo is None or not self.served:
            return []
        return self.slo.missed(self.ttft_s, self.tpot_s or 0.0, self.latency_s)

    @property
    def promised(self) -> bool:
        """Whether it has objectives; without it is best effort, which is neither good nor bad."""
        return self.slo is not None and not self.slo.empty

    @property
    def good(self) -> bool:
        """It was promised something, finished, and within all of it."""
        return self.promised and self.served and not self.missed


@dataclass(frozen=True, slots=True)
class Simulation:
    """`elapsed_s` simulated seconds, in `busy_s` of which a step ran. `policy_s`: real seconds of the policy's own.

    `kv_peak`: the largest share of the KV blocks held behind a step. `cost_errors`: for each step that a policy's cost
    model learnt from, |measured / predicted - 1| and rho after it; empty for policies that have none.
    """

    lifetimes: list[Lifetime]
    elapsed_s: float
    busy_s: float
    steps: int
    preemptions: int
    kv_peak: float = 0.0
    cost_errors: list[tuple[float, float]] = field(default_factory=list)
    policy_s: float = field(default=0.0, compare=False)


class TimedPolicy:
    """A policy, and how long it thinks: `begin` and `observe`, where all of the work of those with objectives is."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seconds = 0.0

    def begin(self, view: View) -> Decision:
        start = perf_counter()
        decision = self._policy.begin(view)
        self.seconds += perf_counter() - start
        return decision

    def observe(self, event: Event) -> None:
        start = perf_counter()
        self._policy.observe(event)
        self.seconds += perf_counter() - start


class Watch:
    """What is looked at after each step, apart from the requests."""

    def __init__(self, kv: KvManager, cost: CostModel) -> None:
        self.blocks = 0
        self.cost_errors: list[tuple[float, float]] = []
        self._kv = kv
        self._cost = cost
        self._learnt = cost.steps

    def look(self) -> None:
        self.blocks = max(self.blocks, self._kv.num_blocks - self._kv.num_free)
        if self._cost.steps > self._learnt:
            self._learnt = self._cost.steps
            self.cost_errors.append((abs(self._cost.errors[-1]), self._cost.rho))


def simulate(
    arrivals: Sequence[Arrival],
    scheduler: SchedulerConfig,
    machine: Machine,
    *,
    estimates: Estimates | None = None,
    seed: int = 0,
) -> Simulation:
    """`arrivals` are sorted by time. Raises `RequestTooLongError` if a request could never run, and `StuckError` if
    the policy stops the engine for good.
    """
    clock = ManualClock()
    limits = StepLimits.of(scheduler, machine.max_model_len)
    outputs = ExpectedRunner()
    runner = PricedRunner(outputs, machine, clock, seed, limits=limits)
    kv = KvManager(machine.num_kv_blocks, machine.block_size, prefix_caching=machine.prefix_caching)
    estimates = estimates or Estimates(cost=CostModel(machine.belief))
    policy = TimedPolicy(make_policy(scheduler, estimates))
    core = EngineCore(
        Scheduler(scheduler, kv, policy, machine.max_model_len, limits),
        runner,
        clock,
        depth=2 if scheduler.overlap else 1,
        eos_ids=(END,),
        vocab_size=VOCAB,
    )
    lives = {
        sequence_id(str(number), 0): Lifetime(arrival.at_s, arrival.slo, arrival.output_len, arrival.tenant)
        for number, arrival in enumerate(arrivals)
    }
    watch = Watch(kv, estimates.cost)
    number, count, idle_turns = 0, len(arrivals), 0
    while number < count or core.busy:
        if not core.busy and arrivals[number].at_s > clock.now():
            clock.advance(arrivals[number].at_s - clock.now())
        while number < count and arrivals[number].at_s <= clock.now():
            _add(core, outputs, arrivals[number], str(number), machine.max_model_len)
            number += 1
        _note(core.step(), lives, clock.now())
        idle_turns = idle_turns + 1 if core.held_back else 0
        if idle_turns > STUCK_TURNS:
            raise StuckError(_stuck(scheduler, core, clock.now()))
        if core.held_back:  # the engine's loop waits so long, or for the next request
            next_s = arrivals[number].at_s if number < count else inf
            clock.advance(min(HELD_BACK_S, next_s - clock.now()))
        watch.look()
    stats = core.stats()
    return Simulation(
        list(lives.values()),
        clock.now(),
        runner.busy_s,
        stats.step,
        stats.preemptions,
        kv_peak=watch.blocks / kv.num_blocks,
        cost_errors=watch.cost_errors,
        policy_s=policy.seconds,
    )


def _stuck(scheduler: SchedulerConfig, core: EngineCore, now_s: float) -> str:
    running, waiting = len(core.scheduler.running), len(core.scheduler.waiting)
    return (
        f"scheduling_policy {scheduler.policy_name} stopped the engine at {now_s:.3f} s: nothing was planned "
        f"{STUCK_TURNS} times in a row, with {running} requests running and {waiting} waiting"
    )


def _add(core: EngineCore, outputs: ExpectedRunner, arrival: Arrival, name: str, context: int) -> None:
    """`max_tokens` must not give away how long the output will be."""
    prompt_len = len(arrival.prompt_ids)
    params = SamplingParams(max_tokens=max(context - prompt_len, arrival.output_len))
    meta = RequestMeta(
        arrival_s=arrival.at_s,
        slo=arrival.slo,
        tenant=arrival.tenant,
        predicted_len=arrival.predicted_len,
        hinted=arrival.hinted,
        priority=arrival.priority,
    )
    core.add(Add(name, list(arrival.prompt_ids), params, meta=meta))
    outputs.expect(sequence_id(name, 0), prompt_len, arrival.output_len)


def _note(outputs: list[RequestOutput], lives: dict[str, Lifetime], now_s: float) -> None:
    for name, token_ids, _, _, _, end in outputs:
        if token_ids:
            lives[name].token_s.append(now_s)
        if end is not None:
            lives[name].reason, lives[name].rejection = end.reason, end.rejection
