"""One engine on simulated time: the real core, and a runner that lets its clock jump to the end of each step."""

from math import inf
from time import perf_counter

from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import RequestOutput
from roseinfer.core.plan import StepLimits, StepPlan, StepResult, TokenMasks, new_row_result
from roseinfer.core.request import sequence_id
from roseinfer.core.runner import Capabilities
from roseinfer.engine.core import IDLE_TURN_WAIT_S, EngineCore
from roseinfer.engine.messages import Add
from roseinfer.kv.manager import KvManager
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.policy import Decision, Event, Policy, Promising, View
from roseinfer.sched.registry import make_policy, options_of
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.workload import VOCAB

TOKEN, END = 1, 2
# Turns in a row in which nothing is planned, nor in flight, though requests are there. The scheduler goes on without a
# policy that holds all of them back long before (`sched/liveness.py`); whoever gets here would never end.
STUCK_TURNS = 1000


class StuckError(RoseinferError):
    """The simulated scheduler plans nothing any more, although requests wait or run."""


class FixedLengthRunner:
    """Computes nothing, at once: a request ends when its output has the length that `expect` announced."""

    capabilities = Capabilities()

    def __init__(self) -> None:
        self._last: dict[str, int] = {}

    def expect(self, sequence_id: str, prompt_len: int, output_len: int) -> None:
        """Position `prompt_len + output_len - 2` samples the request's last token."""
        self._last[sequence_id] = prompt_len + output_len - 2

    def submit(self, plan: StepPlan) -> StepPlan:
        return plan

    def mask_space(self, lines: int) -> memoryview:
        raise NotImplementedError("there are no masks")

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> None:
        """Nothing to draw."""

    def collect(self, handle: StepPlan) -> StepResult:
        last, going, ending = self._last, (TOKEN,), (END,)
        rows = []
        for name, _, start, count, _, sample, _, _, _, _ in handle.rows:
            if not sample:
                tokens: tuple[int, ...] = ()
            else:
                tokens = ending if start + count > last[name] else going
            rows.append(new_row_result((name, tokens, None, None, None)))
        return StepResult(handle.step, rows)

    def close(self) -> None:
        """Holds nothing."""


class TimedPolicy:
    """A policy, and how long it thinks: `begin` and `observe`, where all of the work of those with objectives is."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.seconds = 0.0
        if isinstance(policy, Promising):
            self.promise = policy.promise

    def begin(self, view: View) -> Decision:
        start = perf_counter()
        decision = self._policy.begin(view)
        self.seconds += perf_counter() - start
        return decision

    def observe(self, event: Event) -> None:
        start = perf_counter()
        self._policy.observe(event)
        self.seconds += perf_counter() - start


class StepMonitor:
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

    @property
    def kv_peak(self) -> float:
        """The largest share of the KV blocks held behind a step."""
        return self.blocks / self._kv.num_blocks


class SimulatedEngine:
    """An engine core with a clock of its own, which `step` moves to the end of the step.

    Between steps it stands still until `wake`: whoever drives several of them always steps the one with the least
    `next_s`. `estimates`: what its policy knows, that of the machine's belief if None. `seed`: of the machine's noise.
    """

    def __init__(
        self,
        scheduler: SchedulerConfig,
        machine: Machine,
        *,
        estimates: Estimates | None = None,
        seed: int = 0,
        start_s: float = 0.0,
    ) -> None:
        self.machine = machine
        self.clock = ManualClock(start_s)
        self.estimates = estimates or Estimates(cost=CostModel(machine.belief))
        self.policy = TimedPolicy(make_policy(scheduler, self.estimates))
        self._config = scheduler
        limits = StepLimits.of(scheduler, machine.max_model_len)
        self._expected = FixedLengthRunner()
        self.runner = PricedRunner(self._expected, machine, self.clock, seed, limits=limits)
        kv = KvManager(
            machine.num_kv_blocks,
            machine.block_size,
            prefix_caching=machine.prefix_caching,
            num_host_blocks=machine.num_host_blocks,
        )
        belief = machine.belief
        copies = OffloadCosts.for_policy(options_of(scheduler), self.estimates, belief.load_s, belief.store_s)
        self.core = EngineCore(
            Scheduler(scheduler, kv, self.policy, machine.max_model_len, limits, offloading=copies),
            self.runner,
            self.clock,
            depth=2 if scheduler.overlap else 1,
            eos_ids=(END,),
            vocab_size=VOCAB,
        )
        self.watch = StepMonitor(kv, self.estimates.cost)
        self._idle_turns = 0
        self._news = False

    @property
    def busy(self) -> bool:
        return self.core.busy

    @property
    def next_s(self) -> float:
        """When it does something next by itself; inf = when it gets a request."""
        if not self.core.busy:
            return inf
        # The engine's loop waits so long, or for the next request.
        return self.clock.now() + (IDLE_TURN_WAIT_S if self.core.idle_turn and not self._news else 0.0)

    def wake(self, at_s: float) -> None:
        """Let time pass until then, if it is not there yet."""
        if at_s > self.clock.now():
            self.clock.advance(at_s - self.clock.now())

    def add(self, new: Add, output_len: int) -> None:
        """A request whose output will have so many tokens. Raises as `EngineCore.add`."""
        self.core.add(new)
        self._news = True
        self._expected.expect(sequence_id(new.request_id, 0), len(new.prompt.ids), output_len)

    def step(self) -> list[RequestOutput]:
        """One turn of the core: `launch` and `settle`."""
        return self.launch() + self.settle()

    def launch(self) -> list[RequestOutput]:
        """What the plan of a turn decides, which takes no time."""
        self._news = False
        return self.core.launch()

    def settle(self) -> list[RequestOutput]:
        """What the turn's step brings; the clock is then at its end. Raises `StuckError` if the policy stops the engine
        for good.
        """
        outputs = self.core.settle()
        self._idle_turns = self._idle_turns + 1 if self.core.idle_turn else 0
        if self._idle_turns > STUCK_TURNS:
            raise StuckError(self._stuck())
        self.watch.look()
        return outputs

    def _stuck(self) -> str:
        running, waiting = len(self.core.scheduler.running), len(self.core.scheduler.waiting)
        return (
            f"scheduling_policy {self._config.policy_name} stopped the engine at {self.clock.now():.3f} s: nothing was "
            f"planned {STUCK_TURNS} times in a row, with {running} requests running and {waiting} waiting"
        )
