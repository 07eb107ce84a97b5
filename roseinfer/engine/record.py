"""A run written down as it happens, so that it can be replayed without its machine. One JSON object a line:

    {"request": id, "step": n, "arrival_s", "prompt_ids", "params": {...}, "n", "slo", "tenant", ...}   before step n
    {"abort": [ids], "step": n}                                                                         before step n
    {"step": n, "begin_s", "duration_s", "rows": [[id, start, count], ...]}            planned, and how long it took
    {"end": id, "tokens": k, "reason": r, "ttft_s", "latency_s"}                                 what came of a request

Steps count the turns of the engine; a turn that planned nothing has no rows. Prompts are in it: it is as private as
they are.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from roseinfer.core.clock import Clock
from roseinfer.core.outputs import RequestOutput, SchedulerStats
from roseinfer.core.plan import Row, StepPlan, StepResult
from roseinfer.engine.core import EngineCore, Runner
from roseinfer.engine.messages import Add


class Recorder:
    """Give `runner(...)` to the core instead of its runner, and use `core(...)` in its place."""

    def __init__(self, path: str | Path) -> None:
        self._file: TextIO = Path(path).open("w", encoding="utf-8")  # noqa: SIM115
        self.planned: StepPlan | None = None
        self.duration_s: float | None = None

    def runner(self, runner: Runner) -> "RecordingRunner":
        return RecordingRunner(runner, self)

    def core(self, core: EngineCore, clock: Clock) -> "RecordingCore":
        return RecordingCore(core, clock, self)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        self._file.close()


class RecordingRunner:
    """Passes everything on; notes plans and durations."""

    def __init__(self, runner: Runner, recorder: Recorder) -> None:
        self._runner = runner
        self._recorder = recorder

    def submit(self, plan: StepPlan) -> Any:
        self._recorder.planned = plan
        return self._runner.submit(plan)

    def sample(self, handle: Any) -> None:
        self._runner.sample(handle)

    def collect(self, handle: Any) -> StepResult:
        result = self._runner.collect(handle)
        self._recorder.duration_s = result.duration_s
        return result

    def close(self) -> None:
        self._runner.close()


class RecordingCore:
    """An engine core for the engine's loop. Requests that are refused are not recorded."""

    def __init__(self, core: EngineCore, clock: Clock, recorder: Recorder) -> None:
        self._core = core
        self._clock = clock
        self._recorder = recorder
        self._step = 0
        self._tokens: dict[str, int] = {}

    def add(self, new: Add) -> None:
        new.arrival_s = new.arrival_s or self._clock.now()
        self._core.add(new)
        line = {field: getattr(new, field) for field in new.__struct_fields__}
        line["request"] = line.pop("request_id")
        line["params"] = asdict(new.params)
        line["slo"] = asdict(new.slo) if new.slo else None
        self._recorder.write({**line, "step": self._step})

    def abort(self, sequence_ids: list[str]) -> None:
        self._recorder.write({"abort": sequence_ids, "step": self._step})
        self._core.abort(sequence_ids)

    @property
    def busy(self) -> bool:
        return self._core.busy

    def step(self) -> list[RequestOutput]:
        recorder = self._recorder
        recorder.planned = recorder.duration_s = None
        begin_s = self._clock.now()
        outputs = self._core.step()
        end_s = self._clock.now()
        planned: list[Row] = recorder.planned.rows if recorder.planned else []
        recorder.write(
            {
                "step": self._step,
                "begin_s": begin_s,
                "end_s": end_s,
                "duration_s": recorder.duration_s,
                "rows": [(row.request_id, row.start, row.count) for row in planned],
            }
        )
        self._step += 1
        for output in outputs:
            self._note(output)
        return outputs

    def _note(self, output: RequestOutput) -> None:
        name = output.request_id
        self._tokens[name] = self._tokens.get(name, 0) + len(output.token_ids)
        if output.end is None:
            return
        times = output.end.times
        self._recorder.write(
            {
                "end": name,
                "tokens": self._tokens.pop(name),
                "reason": output.end.reason,
                "ttft_s": times.first_token_s - times.arrival_s if times.first_token_s else None,
                "latency_s": times.finished_s - times.arrival_s,
            }
        )

    def stats(self) -> SchedulerStats:
        return self._core.stats()

    def close(self) -> None:
        self._core.close()
        self._recorder.close()
