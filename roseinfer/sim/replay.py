"""A recorded run again, without its machine: the scheduler runs on the recorded arrivals and step times."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roseinfer.core.clock import ManualClock
from roseinfer.core.config import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import RequestOutput
from roseinfer.core.plan import RowResult, StepPlan, StepResult
from roseinfer.core.sampling import SamplingParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add, sequence_id
from roseinfer.kv.manager import KvManager
from roseinfer.sched.policies import Estimates, make_policy
from roseinfer.sched.scheduler import Scheduler
from roseinfer.sim.machine import END, TOKEN, Machine

Rows = list[tuple[str, int, int]]  # request, start, count


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """`ttft_s` is None for a request that ended before its first token."""

    tokens: int
    reason: str
    ttft_s: float | None
    latency_s: float


@dataclass(slots=True)
class Recording:
    """By turn of the engine: what came before it, when it began and ended, what it planned, what its step took."""

    adds: dict[int, list[Add]] = field(default_factory=dict)
    aborts: dict[int, list[str]] = field(default_factory=dict)
    begins_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)
    durations_s: list[float | None] = field(default_factory=list)
    plans: list[Rows] = field(default_factory=list)
    ends: dict[str, RecordedEnd] = field(default_factory=dict)

    @property
    def requests(self) -> list[Add]:
        return [add for adds in self.adds.values() for add in adds]


def read_recording(path: str) -> Recording:
    """Raises `ConfigError` if the file is none that `Recorder` wrote."""
    found = Recording()
    try:
        for line in _lines(path):
            _take(found, line)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no recorded run: {error!r}") from error
    return found


def _lines(path: str) -> Iterator[dict[str, Any]]:
    with Path(path).open(encoding="utf-8") as lines:
        for text in lines:
            yield json.loads(text)


def _take(found: Recording, line: dict[str, Any]) -> None:
    if "request" in line:
        found.adds.setdefault(line.pop("step"), []).append(_add(line))
    elif "abort" in line:
        found.aborts.setdefault(line["step"], []).extend(line["abort"])
    elif "end" in line:
        end = RecordedEnd(line["tokens"], line["reason"], line["ttft_s"], line["latency_s"])
        found.ends[line["end"]] = end
    else:
        found.begins_s.append(line["begin_s"])
        found.ends_s.append(line["end_s"])
        found.durations_s.append(line["duration_s"])
        found.plans.append([(name, start, count) for name, start, count in line["rows"]])


def _add(line: dict[str, Any]) -> Add:
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in line.pop("params").items()}
    params["logit_bias"] = tuple(tuple(pair) for pair in params.get("logit_bias", ()))
    slo = line.pop("slo")
    return Add(
        request_id=line.pop("request"),
        params=SamplingParams(**params),
        slo=Slo(**slo) if slo else None,
        **line,
    )


@dataclass(slots=True)
class Replay:
    """`plans` by turn, as in the recording; `ttft_s`, `latency_s` of the requests that ended with output."""

    plans: list[Rows] = field(default_factory=list)
    ttft_s: dict[str, float] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)


class RecordedRunner:
    """Gives each step the recorded duration, and each request the recorded number of tokens."""

    def __init__(self, recording: Recording, clock: ManualClock) -> None:
        self.submitted: StepPlan | None = None
        self.turn = 0
        self._recording = recording
        self._clock = clock
        self._ends = recording.ends
        self._prompts = {
            sequence_id(add.request_id, i): len(add.prompt_ids) for add in recording.requests for i in range(add.n)
        }

    def submit(self, plan: StepPlan) -> StepPlan:
        self.submitted = plan
        return plan

    def sample(self, handle: StepPlan) -> None:
        """Nothing to draw."""

    def collect(self, handle: StepPlan) -> StepResult:
        """A turn that did not collect in the recording takes no time: the plans have parted by then."""
        self._clock.advance(max(0.0, self._recording.ends_s[self.turn] - self._clock.now()))
        rows = [RowResult(row.request_id, (self._token(row),) if row.sample else ()) for row in handle.rows]
        return StepResult(handle.step, rows, self._recording.durations_s[self.turn] or 0.0)

    def _token(self, row: Any) -> int:
        end = self._ends.get(row.request_id)
        outputs = row.start + row.count - self._prompts[row.request_id] + 1
        return END if end is not None and end.reason == "stop" and outputs >= end.tokens else TOKEN

    def close(self) -> None:
        """Holds nothing."""


def replay(
    recording: Recording,
    scheduler: SchedulerConfig,
    machine: Machine,
    *,
    estimates: Estimates | None = None,
    vocab_size: int = 1 << 20,
) -> Replay:
    """Run the scheduler again. `scheduler` and the cache of `machine` must be those of the run for equal plans."""
    clock, found = ManualClock(), Replay()
    runner = RecordedRunner(recording, clock)
    kv = KvManager(machine.num_kv_blocks, machine.block_size, prefix_caching=machine.prefix_caching)
    core = EngineCore(
        Scheduler(scheduler, kv, make_policy(scheduler, estimates), machine.max_model_len),
        runner,
        clock,
        depth=2 if scheduler.overlap else 1,
        eos_ids=(END,),
        vocab_size=vocab_size,
    )
    for turn, begin_s in enumerate(recording.begins_s):
        clock.advance(max(0.0, begin_s - clock.now()))
        runner.turn, runner.submitted = turn, None
        for add in recording.adds.get(turn, []):
            core.add(add)
        if turn in recording.aborts:
            core.abort(recording.aborts[turn])
        for output in core.step():
            _note(found, output)
        rows = runner.submitted.rows if runner.submitted else []
        found.plans.append([(row.request_id, row.start, row.count) for row in rows])
    return found


def _note(found: Replay, output: RequestOutput) -> None:
    if output.end is None or not output.end.times.first_token_s:
        return
    times = output.end.times
    found.ttft_s[output.request_id] = times.first_token_s - times.arrival_s
    found.latency_s[output.request_id] = times.finished_s - times.arrival_s
