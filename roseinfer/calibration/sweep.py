"""Steps of every kind through an engine core, and how long each took.

A cell of the grid is a number of decoding requests with a context length. While they decode, prompts pass by: new
ones, and ones whose beginning is in the prefix cache, so that few tokens attend to many; in the cells of the shortest
contexts also ones behind far longer beginnings. What a step computed is read
off its plan, so a step that turns out otherwise than intended (a prompt cut in two) is as good a sample as any.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from roseinfer.calibration.config import CalibrationGrid
from roseinfer.core.errors import RoseinferError
from roseinfer.core.progress import stage
from roseinfer.core.request import Prompt, sequence_id
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.sched.cost.offline_fit import CostSample
from roseinfer.sched.cost.params import CostParams
from roseinfer.sched.policy import Decision, Event, Policy, StepDone, View

MIN_PROMPT_ID = 10  # special tokens tend to have lower ids
KV_SHARE = 0.9  # of the cache that a cell may fill, so that no request is preempted


class CalibrationError(RoseinferError):
    """The engine could not run the steps."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine: context and cache in tokens, seats, vocabulary."""

    max_model_len: int
    kv_tokens: int
    max_num_seqs: int
    vocab_size: int


class SampleRecorder:
    """Wrapper of a policy that records the costs of steps while `on`. `reads`: of the model."""

    def __init__(self, policy: Policy, reads: ContextReads) -> None:
        self._policy = policy
        self._shape = CostParams(reads=reads)
        self.on = False
        self.samples: list[CostSample] = []

    def begin(self, view: View) -> Decision:
        return self._policy.begin(view)

    def observe(self, event: Event) -> None:
        if self.on and isinstance(event, StepDone):
            self.samples.append(
                CostSample(self._shape.work(event.plan.rows, event.plan.ahead, event.plan.states), event.duration_s)
            )
        self._policy.observe(event)


@dataclass(slots=True)
class CalibrationSweep:
    """Sweep over the steps of an idle `core`, whose policy should start every request that fits, as `fifo` does.

    `reads`: of the model.
    """

    core: EngineCore
    bounds: EngineLimits
    grid: CalibrationGrid
    seed: int = 0
    reads: ContextReads = WHOLE_CONTEXT
    _names: "itertools.count[int]" = field(default_factory=itertools.count)
    _rng: random.Random = field(init=False)
    _prefixes: list[list[int]] = field(init=False)

    def run(self) -> list[CostSample]:
        """Measure all cells that fit, after one that only warms up. Raise `CalibrationError` if none fits."""
        self._rng = random.Random(self.seed)
        longest = self._prompt(max(self.grid.prefixes, default=0))
        self._prefixes = [longest[:length] for length in self.grid.prefixes]
        cells = [(rows, context) for context in self.grid.contexts for rows in (0, *self.grid.rows)]
        fitting = [cell for cell in cells if self._fits(*cell)]
        self._rng.shuffle(fitting)  # a while in which the machine is slow hits cells of all kinds
        if not fitting:
            raise CalibrationError("no step of the grid fits the engine's seats, context and KV cache")
        scheduler = self.core.scheduler
        policy = scheduler.policy
        scheduler.policy = watch = SampleRecorder(policy, self.reads)
        try:
            self._cell(watch, *sorted(fitting)[len(fitting) // 2])
            watch.samples.clear()
            with stage("calibrating") as step:
                for number, (rows, context) in enumerate(fitting, 1):
                    self._cell(watch, rows, context)
                    step(number, len(fitting))
        finally:
            scheduler.policy = policy
        return watch.samples

    @property
    def _growth(self) -> int:
        """Estimate the tokens that a request gets while a cell lasts; a prompt takes a step or two of it."""
        beginnings = 2 + len(self.grid.prefixes)
        return (self.grid.repeats + 1) * (1 + 2 * beginnings * len(self.grid.prompts))

    def _fits(self, rows: int, context: int) -> bool:
        grid = self.grid
        grown = context + self._growth
        wanted = rows * grown + context + min(grid.prompts)
        return (
            rows < self.bounds.max_num_seqs
            and max(grown, context + min(grid.prompts)) <= self.bounds.max_model_len
            and wanted <= KV_SHARE * self.bounds.kv_tokens
        )

    def _cell(self, watch: SampleRecorder, rows: int, context: int) -> None:
        prompts = [self._prompt(context) for _ in range(max(1, rows))]
        decoding = [self._add(ids, self._most(context)) for ids in prompts[:rows]]
        self._await_first_tokens(set(decoding))
        if rows:
            self._repeat(watch, self.core.step)
        else:
            self._pass_by(prompts[0], 0)  # into the prefix cache
        beginnings = [[], prompts[0], *(self._prefixes if context == min(self.grid.contexts) else [])]
        for length in self.grid.prompts:
            for beginning in beginnings:
                if self._has_room(rows, context, len(beginning) + length):
                    self._repeat(watch, partial(self._pass_by, beginning, length))
        self.core.abort(decoding)
        while self.core.busy:
            self.core.step()

    def _repeat(self, watch: SampleRecorder, act: Callable[[], object]) -> None:
        """Run a step once without measuring it, because the first step of a kind also fills caches."""
        act()
        watch.on = True
        for _ in range(self.grid.repeats):
            act()
        watch.on = False

    def _has_room(self, rows: int, context: int, length: int) -> bool:
        held = rows * (context + self._growth)
        return length < self.bounds.max_model_len and held + length <= KV_SHARE * self.bounds.kv_tokens

    def _most(self, context: int) -> int:
        """Return the output limit of requests: all of the context, since they are aborted."""
        return min(self.bounds.max_model_len, self.bounds.kv_tokens) - context

    def _pass_by(self, beginning: list[int], length: int) -> None:
        """One prompt, `beginning` and `length` tokens of its own, until its first and only token is there."""
        self._await_first_tokens({self._add(beginning + self._prompt(length), 1)})

    def _prompt(self, length: int) -> list[int]:
        vocab_size = self.bounds.vocab_size
        first = MIN_PROMPT_ID if vocab_size > MIN_PROMPT_ID else 0
        return [self._rng.randrange(first, vocab_size) for _ in range(length)]

    def _add(self, prompt_ids: list[int], max_tokens: int) -> str:
        name = f"calibrate-{next(self._names)}"
        self.core.add(
            Add(name, Prompt(prompt_ids, SequenceParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)))
        )
        return sequence_id(name, 0)

    def _await_first_tokens(self, names: set[str]) -> None:
        while names:
            if not self.core.busy:
                raise CalibrationError("requests of the sweep ended without a token")
            for output in self.core.step():
                if output.end is not None and output.end.error:
                    raise CalibrationError(f"a step of the sweep failed: {output.end.error}")
                if output.token_ids:
                    names.discard(output.request_id)
