"""Machine described by a cost model, and a runner whose steps take the machine's time."""

import random
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from roseinfer.core.clock import AdvancingClock
from roseinfer.core.plan import StepLimits, StepPlan, StepResult, TokenMasks
from roseinfer.core.runner import KvSizes, PassThrough, Runner
from roseinfer.priced.adapters import AdapterMachine
from roseinfer.sched.cost.params import CostParams


@dataclass(frozen=True, slots=True)
class PeriodicStalls:
    """Stalls of `lasts_s` seconds, once in every `every_s`; the first is at a random time in the first period.

    A step that runs meanwhile takes that much longer, and one that would begin waits.
    """

    every_s: float
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Machine(KvSizes):
    """Costs of steps, and capacity. `noise`: a step takes 1 + |N(0, noise)| times its cost.

    `slowdown`: pairs (at_s, factor) in order; steps that begin from that time on take `factor` times as long.
    `believed`: costs that policies start from, without noise, stalls and slowdowns. `acceptance`: shares of right
    drafts, by position; empty = no step verifies drafts. Copies of states to and from host memory cost nothing.
    `adapters`: slots and sizes of LoRA adapters; None = there are none. `exposed_s`, `exposed_row_s`: work of the host
    for a step and for each of its rows, which takes time unless another step runs meanwhile.
    """

    cost: CostParams = field(default_factory=CostParams)
    noise: float = 0.0
    max_model_len: int = 4096
    num_blocks: int = field(default=8192, kw_only=True)
    block_size: int = field(default=16, kw_only=True)
    believed: CostParams | None = None
    stalls: PeriodicStalls | None = None
    slowdown: tuple[tuple[float, float], ...] = ()
    acceptance: tuple[float, ...] = ()
    adapters: AdapterMachine | None = None
    exposed_s: float = 0.0
    exposed_row_s: float = 0.0

    def misjudged(self, factor: float) -> "Machine":
        """Return this machine with policies that believe it to be `factor` times faster."""
        return replace(self, believed=self.cost.slower(1 / factor))

    @property
    def belief(self) -> CostParams:
        return self.believed or self.cost

    def slowness(self, at_s: float) -> float:
        """Return the slowdown factor of a step that begins at `at_s`."""
        factor = 1.0
        for from_s, slower in self.slowdown:
            if at_s >= from_s:
                factor = slower
        return factor


class PricedHandle(NamedTuple):
    """Step on the machine: its duration, its end, and the times of its loads and stores."""

    inner: Any
    duration_s: float
    done_s: float
    loads_s: float
    stores_s: float


class PricedRunner(PassThrough):
    """Wrapper of a runner whose steps take the machine's time.

    Steps run one after the other, and the machine is busy until `_free_s`. `collect` advances the clock to the step's
    end: a simulated clock jumps, a real one sleeps. The price of a step includes sampling.
    """

    def __init__(
        self, inner: Runner, machine: Machine, clock: AdvancingClock, seed: int = 0, *, limits: StepLimits | None = None
    ) -> None:
        super().__init__(inner)
        self._machine = machine
        self._limits = limits
        self._clock = clock
        self._rng = random.Random(seed)
        self._free_s = 0.0
        self._stall_s = inf  # when the next one begins
        if machine.stalls is not None:
            self._stall_s = random.Random(f"stalls {seed}").uniform(0.0, machine.stalls.every_s)
        self.busy_s = 0.0

    def submit(self, plan: StepPlan) -> PricedHandle:
        if self._limits is not None:
            self._limits.check(plan)
        cost = self._machine.cost
        duration_s = cost.seconds(cost.work(plan.rows, plan.ahead, plan.states))
        if plan.loads or plan.stores:
            copies_s = cost.copies_s(len(plan.loads), len(plan.stores))
            duration_s = max(duration_s, copies_s) if plan.rows else copies_s
        if plan.adapter_loads and self._machine.adapters is not None:  # beside the rows
            duration_s = max(duration_s if plan.rows else 0.0, len(plan.adapter_loads) * self._machine.adapters.load_s)
        if self._machine.noise:
            duration_s *= 1 + abs(self._rng.gauss(0.0, self._machine.noise))
        start_s = self._start_s(plan)
        if self._machine.slowdown:
            slowness = self._machine.slowness(start_s)
            cost, duration_s = cost.slower(slowness), slowness * duration_s
        if self._machine.stalls is not None:
            duration_s += self._stalled_s(self._machine.stalls, start_s, duration_s)
        self._free_s = start_s + duration_s
        self.busy_s += duration_s
        loads_s, stores_s = cost.load_s * len(plan.loads), cost.store_s * len(plan.stores)
        return PricedHandle(self.inner.submit(plan), duration_s, self._free_s, loads_s, stores_s)

    def _start_s(self, plan: StepPlan) -> float:
        """Return when the machine begins a step: after the one that runs, or after the host's work."""
        now_s = self._clock.now()
        if self._free_s > now_s or not plan.rows:
            return max(self._free_s, now_s)
        return now_s + self._machine.exposed_s + self._machine.exposed_row_s * len(plan.rows)

    def _stalled_s(self, stalls: PeriodicStalls, start_s: float, duration_s: float) -> float:
        """Return how much longer a step takes for the stalls that it meets, including one already in progress."""
        lost_s = 0.0
        while self._stall_s < start_s + duration_s + lost_s:
            lost_s += max(0.0, self._stall_s + stalls.lasts_s - max(start_s, self._stall_s))
            self._stall_s += stalls.every_s
        return lost_s

    def sample(self, handle: PricedHandle, masks: TokenMasks | None = None) -> None:
        self.inner.sample(handle.inner, masks)

    def collect(self, handle: PricedHandle) -> StepResult:
        self._clock.advance(max(0.0, handle.done_s - self._clock.now()))
        result = self.inner.collect(handle.inner)
        result.duration_s, result.loads_s, result.stores_s = handle.duration_s, handle.loads_s, handle.stores_s
        return result
