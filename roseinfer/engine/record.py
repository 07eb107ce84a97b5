"""Recording of a run, from which it can be replayed without its machine. One JSON object per line:

    {"setup": {...}}                                                  first: the scheduler's options, cache and context
    {"request": id, "step": n, "arrival_s", "prompt_ids", "params": {...}, "n", "slo", "tenant", ...}     before turn n
        with "outputs": [[[token ids], ttft_s], null, ...] for a request that continues from another engine
    {"abort": [ids], "step": n, "at_s"}                                                                   before turn n
    {"step": n, "plan_s", "commit_s", "duration_s", "rows": [[id, start, count], ...], "sampled": [...]}        a turn
    {"end": id, "tokens": k, "reason": r, "ttft_s", "latency_s"}                                   the end of a sequence

Steps are numbered by the turns of the engine.

- `plan_s`, `commit_s`: times that the scheduler read from its clock (monotonic seconds).
- `rows`: rows planned in this turn.
- `duration_s`, `sampled`: of the step that ended in this turn, with one token per row; NO_TOKEN if none was sampled.
- `failed`: errors of the failed rows of that step.
- `loads`, `stores`: copies of the plan as [KV block, host block]. `loads_s`, `stores_s`: their durations in the step
  that ended; `copies_first`: its rows ran after the copies. These fields are left out if there are no copies.

The file contains prompts and outputs, so it is as private as they are.
"""

from dataclasses import fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from roseinfer.core.clock import Clock
from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import End, SequenceOutput
from roseinfer.core.plan import StepPlan, StepResult
from roseinfer.core.recorder import Recorder
from roseinfer.core.request import RequestMeta
from roseinfer.core.runner import WHOLE_CONTEXT, ContextReads, ExpertChoice, PassThrough, Runner, StatePool, WindowPool
from roseinfer.engine.core import EngineCore, arrival_and_deadline
from roseinfer.engine.messages import Add
from roseinfer.sched.scheduler import Scheduler

NO_TOKEN = -1
# Request, start and count of a row. Called once per row and step.
_ROW_FIELDS = itemgetter(0, 2, 3)
_META = tuple(field.name for field in fields(RequestMeta))


def engine_recorder(path: str | Path) -> Recorder:
    """Return the file of an engine's recording. Raises `ConfigError` as `Recorder` does."""
    # The router's recorder has `json`, since it needs no packages and writes infinite times. For a step of 256 rows,
    # that takes 12 times as long (109 us compared with 9 us), and it cannot encode dataclasses.
    return Recorder(path, msgspec.json.Encoder().encode)


class RecordingRunner(PassThrough):
    """Runner that remembers the last plan and the last result until `take`."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(inner)
        self._planned: StepPlan | None = None
        self._result: StepResult | None = None

    def submit(self, plan: StepPlan) -> Any:
        self._planned = plan
        return self.inner.submit(plan)

    def collect(self, handle: Any) -> StepResult:
        self._result = self.inner.collect(handle)
        return self._result

    def take(self) -> tuple[StepPlan | None, StepResult | None]:
        """Return the last plan and the last result, and forget them."""
        taken = self._planned, self._result
        self._planned = self._result = None
        return taken


class RecordingClock:
    """Clock that remembers the times it returned."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.times_s: list[float] = []

    def now(self) -> float:
        self.times_s.append(self._clock.now())
        return self.times_s[-1]


class RecordingCore(EngineCore):
    """Engine core whose run is recorded. Other arguments are those of `EngineCore`.

    `experts`, `reads`: facts of the model, which its policy knows from the start.

    Rejected requests are not recorded. Raise `ConfigError` for an engine with drafts, guides or adapters: the file has
    one token per row, no drafts or masks, and no loads of adapters.
    """

    def __init__(
        self,
        recorder: Recorder,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        *,
        experts: ExpertChoice | None = None,
        reads: ContextReads = WHOLE_CONTEXT,
        **options: Any,
    ) -> None:
        if scheduler.drafting is not None or options.get("guides") is not None:
            raise ConfigError("record: cannot record a run with drafts or guides")
        if options.get("pooling") is not None:
            raise ConfigError("record: cannot record an engine without generated tokens")
        if options.get("adapters") is not None:
            raise ConfigError("record: cannot record an engine with LoRA adapters")
        self._recorder = recorder
        self._runner = RecordingRunner(runner)
        self._clock = RecordingClock(clock)
        super().__init__(scheduler, self._runner, self._clock, **options)
        self._turn = 0
        self._tokens: dict[str, int] = {}
        setup = {
            "scheduler": scheduler.config,
            "depth": self.depth,
            "eos_token_ids": sorted(self.eos_ids),
            "vocab_size": self.vocab_size,
            "max_model_len": scheduler.max_model_len,
            "num_blocks": scheduler.kv.num_blocks,
            "block_size": scheduler.kv.block_size,
            "prefix_caching": scheduler.kv.prefix_caching,
        }
        if scheduler.offload is not None:
            setup["num_host_blocks"] = scheduler.offload.num_blocks
            setup["load_s"], setup["store_s"] = scheduler.offload.load_s, scheduler.offload.store_s
            if (host := scheduler.kv.host_states) is not None:
                setup["num_host_slots"], setup["slot_blocks"] = host.num_blocks, scheduler.offload.slot_blocks
        if scheduler.kv.windows:
            setup["windows"] = [WindowPool(group.window, group.num_blocks) for group in scheduler.kv.windows]
        if (states := scheduler.kv.states) is not None:
            setup["states"] = StatePool(states.num_slots, states.slot_bytes)
        if experts is not None:
            setup["experts"] = experts
        if reads != WHOLE_CONTEXT:
            setup["reads"] = reads
        recorder.begin({"setup": setup})

    def add(self, new: Add) -> None:
        arrival_s, deadline_s = arrival_and_deadline(new, self._clock.now())
        prompt = new.prompt
        meta = replace(prompt.meta, arrival_s=arrival_s, deadline_s=deadline_s)
        new.prompt, new.age_s, new.left_s = replace(prompt, meta=meta), None, None
        super().add(new)
        line = {"request": new.request_id, "step": self._turn, "prompt_ids": prompt.ids, "params": prompt.params}
        if new.outputs is not None:
            line["outputs"] = new.outputs
        if prompt.generation_prompt_len:
            line["generation_prompt_len"] = prompt.generation_prompt_len
        self._recorder.write(line | {"n": new.n} | {name: getattr(meta, name) for name in _META})

    def abort(self, sequence_ids: list[str]) -> None:
        super().abort(sequence_ids)
        self._recorder.write({"abort": sequence_ids, "step": self._turn, "at_s": self._clock.times_s[-1]})

    def launch(self) -> list[SequenceOutput]:
        self._clock.times_s.clear()
        outputs = super().launch()
        self._count_tokens(outputs)
        return outputs

    def settle(self) -> list[SequenceOutput]:
        outputs = super().settle()
        times_s = self._clock.times_s
        self._recorder.write(self._line(*self._runner.take()))
        self._turn += 1
        self._count_tokens(outputs)
        if self.busy:
            self._recorder.flush_if_due(times_s[-1])
        else:
            self._recorder.flush(times_s[-1])
        return outputs

    def _count_tokens(self, outputs: list[SequenceOutput]) -> None:
        tokens = self._tokens
        for name, token_ids, _, _, _, end, _ in outputs:
            tokens[name] = tokens.get(name, 0) + len(token_ids)
            if end is not None:
                self._write_end(name, end)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._recorder.close()

    def _line(self, planned: StepPlan | None, result: StepResult | None) -> dict[str, Any]:
        times_s = self._clock.times_s
        line: dict[str, Any] = {
            "step": self._turn,
            "plan_s": times_s[0],
            "commit_s": times_s[-1],
            "duration_s": result.duration_s if result else None,
            "rows": list(map(_ROW_FIELDS, planned.rows)) if planned else [],
        }
        if planned and planned.loads:
            line["loads"] = planned.loads
        if planned and planned.stores:
            line["stores"] = planned.stores
        if result and (result.loads_s or result.stores_s):
            line["loads_s"], line["stores_s"] = result.loads_s, result.stores_s
            line["copies_first"] = result.copies_first
        if result:
            line["sampled"] = [row.token_ids[0] if row.token_ids else NO_TOKEN for row in result.rows]
            if any(row.error is not None for row in result.rows):
                line["failed"] = {row.request_id: row.error for row in result.rows if row.error is not None}
        return line

    def _write_end(self, name: str, end: End) -> None:
        times = end.times
        self._recorder.write(
            {
                "end": name,
                "tokens": self._tokens.pop(name),
                "reason": end.reason,
                "ttft_s": times.first_token_s - times.arrival_s if times.first_token_s else None,
                "latency_s": times.finished_s - times.arrival_s,
            }
        )
