"""Simulation of one engine: requests arrive, the core steps, and the clock jumps to the end of each step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.outputs import COMPLETE, FinishReason, SchedulerStats, SequenceOutput
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Rejection, Slo
from roseinfer.engine.messages import Add
from roseinfer.priced.machine import Machine
from roseinfer.sched.estimates import Estimates
from roseinfer.sim.engine import SimulatedEngine
from roseinfer.sim.workload import Arrival


@dataclass(slots=True)
class Lifetime:
    """Simulated times of a request's arrival and of each token, how it ended, and why if it was rejected.

    `waited`: seconds without a seat, by cause.
    """

    arrival_s: float
    slo: Slo | None = None
    output_len: int = 0
    tenant: str = ""
    token_s: list[float] = field(default_factory=list)
    reason: FinishReason | None = None
    rejection: Rejection | None = None
    waited: Sequence[tuple[Cause, float]] = ()

    @property
    def served(self) -> bool:
        return self.reason in COMPLETE

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for outputs of one token."""
        behind = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / behind if behind else None

    @property
    def latency_s(self) -> float:
        return self.token_s[-1] - self.arrival_s

    @property
    def missed(self) -> list[str]:
        """Objectives that it missed, if it finished."""
        if self.slo is None or not self.served:
            return []
        return self.slo.missed(self.ttft_s, self.tpot_s or 0.0, self.latency_s)

    @property
    def promised(self) -> bool:
        """True if it has objectives; without any it is best effort, which is neither good nor bad."""
        return self.slo is not None and not self.slo.empty

    @property
    def good(self) -> bool:
        """True if it has objectives, finished, and met all of them."""
        return self.promised and self.served and not self.missed


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a run of `elapsed_s` simulated seconds, in `busy_s` of which a step ran.

    `policy_s`: real seconds spent in the policy. `kv_peak`: largest share of KV blocks held after a step.
    `cost_errors`: |measured / predicted - 1| and rho, for each step that the policy's cost model learnt from. `stats`:
    the scheduler's at the end; empty for several engines.
    """

    lifetimes: list[Lifetime]
    elapsed_s: float
    busy_s: float
    steps: int
    preemptions: int
    kv_peak: float = 0.0
    cost_errors: list[tuple[float, float]] = field(default_factory=list)
    policy_s: float = field(default=0.0, compare=False)
    stats: SchedulerStats = field(default=SchedulerStats(), compare=False)

    def per_s(self, amount: float) -> float:
        """Return an amount per simulated second; 0 if no time passed, because no request was served."""
        return amount / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def reused(self) -> tuple[float, float]:
        """Shares of the tokens of starting requests (also after a preemption) that were not computed.

        The first share was in the KV cache, the second was loaded from host memory.
        """
        known, offload = max(1, self.stats.prefix_queries), self.stats.offload
        return self.stats.prefix_hits / known, (0 if offload is None else offload.hits) / known


def simulate(
    arrivals: Sequence[Arrival],
    scheduler: SchedulerConfig,
    machine: Machine,
    *,
    estimates: Estimates | None = None,
    seed: int = 0,
) -> SimulationResult:
    """Simulate one engine; `arrivals` are sorted by time.

    Raise `RequestTooLongError` if a request could never run, and `StuckError` if the policy stops the engine forever.
    """
    engine = SimulatedEngine(scheduler, machine, estimates=estimates, seed=seed)
    lives = lifetimes(arrivals)
    number, count = 0, len(arrivals)
    while number < count or engine.busy:
        next_s = arrivals[number].at_s if number < count else inf
        engine.wake(min(engine.next_s, next_s))
        while number < count and arrivals[number].at_s <= engine.clock.now():
            engine.add(add_of(arrivals[number], str(number), machine.max_model_len), arrivals[number].output_len)
            number += 1
        _note(engine.step(), lives, engine.clock.now())
    stats = engine.core.stats()
    return SimulationResult(
        lives,
        engine.clock.now(),
        engine.runner.busy_s,
        stats.step,
        stats.preemptions,
        kv_peak=engine.watch.kv_peak,
        cost_errors=engine.watch.cost_errors,
        policy_s=engine.policy.seconds,
        stats=stats,
    )


def lifetimes(arrivals: Sequence[Arrival]) -> list[Lifetime]:
    """Return the lifetimes of requests that have not started."""
    return [Lifetime(arrival.at_s, arrival.slo, arrival.output_len, arrival.tenant) for arrival in arrivals]


def add_of(arrival: Arrival, name: str, context: int) -> Add:
    """Return the message that adds a request; its `max_tokens` must not reveal the length of the output."""
    prompt_len = len(arrival.prompt_ids)
    params = SequenceParams(max_tokens=max(context - prompt_len, arrival.output_len))
    meta = RequestMeta(
        arrival_s=arrival.at_s,
        slo=arrival.slo,
        tenant=arrival.tenant,
        predicted_len=arrival.predicted_len,
        hinted=arrival.hinted,
        priority=arrival.priority,
        adapter=arrival.adapter,
    )
    return Add(name, Prompt(list(arrival.prompt_ids), params, meta))


def _note(outputs: list[SequenceOutput], lives: list[Lifetime], now_s: float) -> None:
    for name, token_ids, _, _, _, end, _ in outputs:
        life = lives[int(name.partition(":")[0])]
        life.token_s += [now_s] * len(token_ids)
        if end is not None:
            life.reason, life.rejection = end.reason, end.rejection
            life.waited = end.why.waited if end.why is not None else ()
