"""Engine on simulated time: the real core, with a runner whose clock jumps to the end of each step."""

from collections.abc import Sequence
from math import inf
from time import perf_counter

from roseinfer.core.clock import ManualClock
from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.core.outputs import SequenceOutput
from roseinfer.core.plan import StepLimits, StepPlan, StepResult, TokenMasks, new_row_result
from roseinfer.core.request import sequence_id
from roseinfer.core.runner import Capabilities
from roseinfer.engine.core import IDLE_TURN_WAIT_S, EngineCore
from roseinfer.engine.messages import Add
from roseinfer.kv.manager import KvManager
from roseinfer.priced.adapters import PricedAdapterFiles
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.adapters import AdapterSlots
from roseinfer.sched.cost.online_fit import CostModel
from roseinfer.sched.drafting.drafting import Drafting
from roseinfer.sched.drafting.marginal import MarginalPricing
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.policy import Decision, Event, Policy, Promising, View
from roseinfer.sched.registry import make_policy, options_of
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.drafts import SimulatedGuesses, right_guesses
from roseinfer.sim.workload import VOCAB_COUNT

TOKEN, END, OTHER = 1, 2, 3
# Consecutive turns without a plan, although requests are there and no step is in flight. The scheduler overrules an
# idle policy long before (`sched/liveness.py`), so such a run would never end.
MAX_STUCK_TURNS = 1000


class StuckError(RoseinferError):
    """The simulated scheduler stopped planning, although requests wait or run."""


class FixedLengthRunner:
    """Runner that computes nothing. A request ends when its output has the length that `expect` set.

    `acceptance`: shares of right drafts, by position.
    """

    def __init__(self, acceptance: Sequence[float] = ()) -> None:
        self.capabilities = Capabilities(drafts=bool(acceptance))
        self._acceptance = acceptance
        self._last: dict[str, int] = {}

    def expect(self, sequence_id: str, prompt_len: int, output_len: int) -> None:
        """Set a request's output length: position `prompt_len + output_len - 2` samples its last token."""
        self._last[sequence_id] = prompt_len + output_len - 2

    def submit(self, plan: StepPlan) -> StepPlan:
        return plan

    def mask_space(self, lines: int) -> memoryview:
        raise NotImplementedError("there are no masks")

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> None:
        """Do nothing: there is nothing to draw."""

    def collect(self, handle: StepPlan) -> StepResult:
        last, going, ending = self._last, (TOKEN,), (END,)
        rows = []
        for name, _, start, count, _, sample, _, _, _, drafts in handle.rows:
            if not sample:
                tokens: tuple[int, ...] = ()
            elif drafts:
                tokens = self._verified(name, start, len(drafts))
            else:
                tokens = ending if start + count > last[name] else going
            rows.append(new_row_result((name, tokens, None, None, None, None)))
        return StepResult(handle.step, rows)

    def _verified(self, name: str, start: int, drafts: int) -> tuple[int, ...]:
        """Return the tokens of a row with drafts: right ones, then another one in place of the first wrong draft."""
        right = right_guesses(name, start, drafts, self._acceptance)
        left = self._last[name] - start
        if left <= right:
            return (*(TOKEN,) * left, END)
        return (*(TOKEN,) * right, OTHER if right < drafts else TOKEN)

    def close(self) -> None:
        """Do nothing: no resources are held."""


class TimedPolicy:
    """Wrapper of a policy that measures the time of `begin` and `observe`."""

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
    """Figures that are taken after each step."""

    def __init__(self, kv: KvManager, cost: CostModel) -> None:
        self.blocks = 0
        self.cost_errors: list[tuple[float, float]] = []
        self._kv = kv
        self._cost = cost
        self._learnt = cost.steps

    def look(self) -> None:
        self.blocks = max(self.blocks, self._kv.num_used)
        if self._cost.steps > self._learnt:
            self._learnt = self._cost.steps
            self.cost_errors.append((abs(self._cost.errors[-1]), self._cost.rho))

    @property
    def kv_peak(self) -> float:
        """Largest share of the KV blocks held after a step."""
        return self.blocks / self._kv.num_blocks


class SimulatedEngine:
    """Engine core with its own clock, which `step` moves to the end of the step.

    Between steps the clock stands still until `wake`. To drive several engines, always step the one with the least
    `next_s`. `estimates`: the policy's; by default those of the machine's belief. `seed`: seed of the machine's noise.
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
        drafts = scheduler.largest_step if machine.acceptance else 0
        limits = StepLimits.of(scheduler, machine.max_model_len, drafts)
        self._expected = FixedLengthRunner(machine.acceptance)
        self.runner = PricedRunner(self._expected, machine, self.clock, seed, limits=limits)
        kv = KvManager(machine, limits.max_tokens)
        belief, options = machine.belief, options_of(scheduler)
        drafting = None
        if machine.acceptance:
            overlap, offloads = bool(scheduler.overlap), machine.num_host_blocks > 0
            pricing = MarginalPricing.for_policy(options, self.estimates, offloads=offloads, overlap=overlap)
            drafting = Drafting([SimulatedGuesses(TOKEN, machine.acceptance)], pricing)
        copies = OffloadCosts.for_policy(options, self.estimates, belief.load_s, belief.store_s)
        lora, adapters = machine.adapters, None
        if lora is not None:
            files = PricedAdapterFiles(lora, self.clock)
            adapters = AdapterSlots(lora.pool, files, lora.host_bytes, lengths=self.estimates.lengths)
        self.core = EngineCore(
            Scheduler(scheduler, kv, self.policy, machine.max_model_len, limits, drafting, copies, adapters),
            self.runner,
            self.clock,
            depth=2 if scheduler.overlap else 1,
            eos_ids=(END,),
            vocab_size=VOCAB_COUNT,
        )
        self.watch = StepMonitor(kv, self.estimates.cost)
        self._idle_turns = 0
        self._has_new_requests = False

    @property
    def busy(self) -> bool:
        return self.core.busy

    @property
    def next_s(self) -> float:
        """Time of its next action without a new request; inf if it has none."""
        if not self.core.busy:
            return inf
        # The real engine loop waits this long before an idle turn, or until the next request.
        return self.clock.now() + (IDLE_TURN_WAIT_S if self.core.idle_turn and not self._has_new_requests else 0.0)

    def wake(self, at_s: float) -> None:
        """Move the clock forward to `at_s`, never back."""
        if at_s > self.clock.now():
            self.clock.advance(at_s - self.clock.now())

    def add(self, new: Add, output_len: int) -> None:
        """Add a request with an output of `output_len` tokens. Raise the errors of `EngineCore.add`."""
        self.core.add(new)
        self._has_new_requests = True
        self._expected.expect(sequence_id(new.request_id, 0), len(new.prompt.ids), output_len)

    def step(self) -> list[SequenceOutput]:
        """Run one turn of the core: `launch` and `settle`."""
        return self.launch() + self.settle()

    def launch(self) -> list[SequenceOutput]:
        """Plan a turn, which takes no simulated time, and return the outputs that the plan decided."""
        self._has_new_requests = False
        return self.core.launch()

    def settle(self) -> list[SequenceOutput]:
        """Complete the turn's step, move the clock to its end, and return its outputs.

        Raise `StuckError` if the policy stops the engine forever.
        """
        outputs, adapters = self.core.settle(), self.core.scheduler.adapters
        reading = adapters is not None and adapters.host.reading
        self._idle_turns = self._idle_turns + 1 if self.core.idle_turn and not reading else 0
        if self._idle_turns > MAX_STUCK_TURNS:
            raise StuckError(self._stuck())
        self.watch.look()
        return outputs

    def _stuck(self) -> str:
        running, waiting = len(self.core.scheduler.running), len(self.core.scheduler.waiting)
        return (
            f"scheduling_policy {self._config.policy_name} stopped the engine at {self.clock.now():.3f} s: nothing was "
            f"planned {MAX_STUCK_TURNS} times in a row, with {running} requests running and {waiting} waiting"
        )
