"""Replay of a recorded run without its machine: the scheduler runs on recorded arrivals and step times."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from roseinfer.core.config.engine import SchedulerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.core.outputs import SequenceOutput
from roseinfer.core.plan import HostCopy, Row, RowResult, StepLimits, StepPlan, StepResult, TokenLogprobs, TokenMasks
from roseinfer.core.recorder import read_lines
from roseinfer.core.request import Prompt, RequestMeta, sequence_id
from roseinfer.core.runner import (
    WHOLE_CONTEXT,
    Capabilities,
    ContextReads,
    ExpertChoice,
    KvSizes,
    StatePool,
    WindowPool,
)
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Slo
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add, PriorOutput
from roseinfer.engine.record import NO_TOKEN
from roseinfer.kv.manager import KvManager
from roseinfer.sched.cost.file import reads_of_json
from roseinfer.sched.estimates import Estimates
from roseinfer.sched.offload import OffloadCosts
from roseinfer.sched.registry import make_policy, options_of, scheduler_config
from roseinfer.sched.scheduler import Scheduler

Rows = list[tuple[str, int, int]]  # request, start, count
HostCopies = tuple[list[HostCopy], list[HostCopy]]  # loads and stores of a plan
_NO_LOGPROBS = TokenLogprobs(0, 0.0, 1, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedConfig(KvSizes):
    """Configuration of a recorded scheduler. `depth`: steps in flight. `experts`, `reads`: of its model.

    `load_s`, `store_s`: its initial seconds per block copied from and to host memory.
    """

    scheduler: SchedulerConfig
    depth: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    slot_blocks: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0
    experts: ExpertChoice | None = None
    reads: ContextReads = WHOLE_CONTEXT


@dataclass(frozen=True, slots=True)
class Aborted:
    sequence_ids: list[str]
    at_s: float


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the engine: the times of its plan and of its commit.

    `duration_s`, `copies_s` (seconds of loads and stores, and `copies_first`, as in `StepResult`) and `failed` (request
    -> error) belong to the step that ended in this turn. `rows` and `copies` belong to the planned step.
    """

    plan_s: float
    commit_s: float
    duration_s: float | None
    rows: Rows
    failed: dict[str, str]
    copies: HostCopies = ([], [])
    copies_s: tuple[float, float, bool] = (0.0, 0.0, False)


@dataclass(frozen=True, slots=True)
class RecordedEnd:
    """End of a recorded request. `ttft_s` is None if it ended before its first token."""

    tokens: int
    reason: str
    ttft_s: float | None
    latency_s: float

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first; None without any."""
        return tpot(self.ttft_s, self.latency_s, self.tokens)


@dataclass(slots=True)
class EngineRecording:
    """Recorded run of one engine. `before[n]`: messages before turn n. `outputs[sequence][i]`: i-th output token."""

    setup: RecordedConfig
    before: dict[int, list[Add | Aborted]] = field(default_factory=dict)
    turns: list[Turn] = field(default_factory=list)
    outputs: dict[str, dict[int, int]] = field(default_factory=dict)
    ends: dict[str, RecordedEnd] = field(default_factory=dict)

    @property
    def requests(self) -> list[Add]:
        return [entry for entries in self.before.values() for entry in entries if isinstance(entry, Add)]

    @property
    def plans(self) -> list[Rows]:
        return [turn.rows for turn in self.turns]

    @property
    def copies(self) -> list[HostCopies]:
        return [turn.copies for turn in self.turns]


def tpot(ttft_s: float | None, latency_s: float, tokens: int) -> float | None:
    return None if ttft_s is None or tokens < 2 else (latency_s - ttft_s) / (tokens - 1)


# --- the file ---------------------------------------------------------------------------------------------------
def read_recording(path: str) -> EngineRecording:
    """Read a file of `Recorder`. Raise `ConfigError` for any other file."""
    try:
        lines = read_lines(path)
        reader = _Reader(_setup(next(lines, {})["setup"]))
        for line in lines:
            reader.take(line)
    except OSError as error:
        raise ConfigError(f"cannot read {path!r}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"{path!r} is not a recorded run: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path!r} is not a recorded run: {error}") from error
    return reader.found


def _setup(given: dict[str, Any]) -> RecordedConfig:
    scheduler = scheduler_config(**given.pop("scheduler"))
    if "experts" in given:
        given["experts"] = ExpertChoice(**given["experts"])
    if "states" in given:
        given["states"] = StatePool(**given["states"])
    if "reads" in given:
        given["reads"] = reads_of_json(given["reads"])
    given["windows"] = tuple(WindowPool(**pool) for pool in given.get("windows", ()))
    return RecordedConfig(scheduler=scheduler, eos_token_ids=tuple(given.pop("eos_token_ids")), **given)


class _Reader:
    def __init__(self, setup: RecordedConfig) -> None:
        self.found = EngineRecording(setup)
        self._open: list[Rows] = []  # planned steps that have not ended yet
        self._prompts: dict[str, int] = {}

    def take(self, line: dict[str, Any]) -> None:
        if "request" in line:
            self._request(line)
        elif "abort" in line:
            entry = Aborted(line["abort"], line["at_s"])
            self.found.before.setdefault(line["step"], []).append(entry)
        elif "end" in line:
            end = RecordedEnd(line["tokens"], line["reason"], line["ttft_s"], line["latency_s"])
            self.found.ends[line["end"]] = end
        else:
            self._turn(line)

    def _request(self, line: dict[str, Any]) -> None:
        turn, add = line.pop("step"), _add(line)
        self.found.before.setdefault(turn, []).append(add)
        self._prompts |= _prompts(add)

    def _turn(self, line: dict[str, Any]) -> None:
        rows = [(name, start, count) for name, start, count in line["rows"]]
        copies = _copies(line.get("loads", ())), _copies(line.get("stores", ()))
        times = line["plan_s"], line["commit_s"], line["duration_s"]
        took = line.get("loads_s", 0.0), line.get("stores_s", 0.0), line.get("copies_first", False)
        self.found.turns.append(Turn(*times, rows, line.get("failed", {}), copies, took))
        if rows or any(copies):
            self._open.append(rows)
        if "sampled" in line:
            self._sampled(self._open.pop(0), line["sampled"])

    def _sampled(self, rows: Rows, tokens: list[int]) -> None:
        for (name, start, size), token in zip(rows, tokens, strict=True):
            if token != NO_TOKEN:
                self.found.outputs.setdefault(name, {})[start + size - self._prompts[name]] = token


def _copies(pairs: Iterable[tuple[int, int]]) -> list[HostCopy]:
    return [HostCopy(block, host) for block, host in pairs]


def _add(line: dict[str, Any]) -> Add:
    given = line.pop("params").items()
    params: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given}
    for pairs in ("logit_bias", "bad_token_ids"):
        params[pairs] = tuple(tuple(entry) for entry in params.get(pairs, ()))
    name, prompt_ids, n, slo = (line.pop(key) for key in ("request", "prompt_ids", "n", "slo"))
    outputs = line.pop("outputs", None)
    prior_outputs = None if outputs is None else [PriorOutput(*sample) if sample else None for sample in outputs]
    generation_prompt_len = line.pop("generation_prompt_len", 0)
    if line.pop("adapter", None) is not None:
        raise ConfigError("replay: the recorded requests name LoRA adapters, which a replay does not support")
    meta = RequestMeta(slo=Slo(**slo) if slo else None, **line)
    prompt = Prompt(prompt_ids, SequenceParams(**params), meta, generation_prompt_len=generation_prompt_len)
    return Add(name, prompt, n, outputs=prior_outputs)


def _prompts(add: Add) -> dict[str, int]:
    """Return the number of prompt tokens by sequence."""
    return {sequence_id(add.request_id, i): len(add.prompt.ids) for i in range(add.n)}


# --- the run ----------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Replay:
    """Result of a replay. `plans` and `copies` by turn, as recorded; times of the sequences that ended with output."""

    plans: list[Rows] = field(default_factory=list)
    copies: list[HostCopies] = field(default_factory=list)
    ttft_s: dict[str, float] = field(default_factory=dict)
    tpot_s: dict[str, float | None] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)


class ReplayClock:
    """Clock whose time is set from the recording."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now(self) -> float:
        return self.at_s


class RecordedRunner:
    """Runner that ends a step when one ended in this turn of the recording, with the recorded tokens."""

    # Requests may have asked for log probabilities, though the recording has none.
    capabilities = Capabilities(logprobs=True)

    def __init__(self, recording: EngineRecording, clock: ReplayClock) -> None:
        self.submitted: StepPlan | None = None
        self.turn = recording.turns[0] if recording.turns else None
        self._clock = clock
        self._outputs = recording.outputs
        self._prompts = {name: size for add in recording.requests for name, size in _prompts(add).items()}
        self._other = next(token for token in count() if token not in recording.setup.eos_token_ids)

    def submit(self, plan: StepPlan) -> StepPlan:
        self.submitted = plan
        return plan

    def mask_space(self, lines: int) -> memoryview:
        raise NotImplementedError("there are no masks")

    def sample(self, handle: StepPlan, masks: TokenMasks | None = None) -> None:
        """Do nothing: there is nothing to draw."""

    def collect(self, handle: StepPlan) -> StepResult:
        """Return the recorded result. If no step ended in this turn, the plans differ, and the step takes no time."""
        assert self.turn is not None, "there are turns only if some were recorded"
        self._clock.at_s = max(self._clock.at_s, self.turn.commit_s)
        rows, turn = [self._result(row) for row in handle.rows], self.turn
        return StepResult(handle.step, rows, turn.duration_s or 0.0, *turn.copies_s)

    def _result(self, row: Row) -> RowResult:
        assert self.turn is not None
        error, scores = self.turn.failed.get(row.request_id), self._prompt_logprobs(row)
        if error is not None or not row.sample:
            return RowResult(row.request_id, prompt_logprobs=scores, error=error)
        index = row.start + row.count - self._prompts[row.request_id]
        # A token that the recording lacks, because the request was cut off, may be any that does not end the output.
        token = self._outputs.get(row.request_id, {}).get(index, self._other)
        return RowResult(row.request_id, (token,), prompt_logprobs=scores)

    def _prompt_logprobs(self, row: Row) -> tuple[TokenLogprobs, ...] | None:
        """Return as many as the row had, of any values: a request that was preempted needs no prompt position again."""
        last = self._prompts[row.request_id] - 1
        if row.logits < row.count or row.start >= last:
            return None
        return (_NO_LOGPROBS,) * (min(row.start + row.count, last) - row.start)

    def close(self) -> None:
        """Do nothing: no resources are held."""


def replay(
    recording: EngineRecording,
    scheduler: SchedulerConfig | None = None,
    *,
    estimates: Estimates | None = None,
    launched: Callable[[int, EngineCore], None] | None = None,
) -> Replay:
    """Run the recorded scheduler again, with other options if they are given.

    `estimates` replace the initial estimates of the options. `launched(turn, core)` is called while the step of a turn
    runs.
    """
    setup, clock, found = recording.setup, ReplayClock(), Replay()
    scheduler = scheduler or setup.scheduler
    runner = RecordedRunner(recording, clock)
    limits = StepLimits.of(scheduler, setup.max_model_len)
    kv = KvManager(setup, limits.max_tokens)
    options = options_of(scheduler)
    estimates = estimates or Estimates.of(options, experts=setup.experts, reads=setup.reads)
    policy = make_policy(scheduler, estimates)
    copies = OffloadCosts.for_policy(options, estimates, setup.load_s, setup.store_s, setup.slot_blocks)
    core = EngineCore(
        Scheduler(scheduler, kv, policy, setup.max_model_len, limits, offloading=copies),
        runner,
        clock,
        depth=setup.depth,
        eos_ids=setup.eos_token_ids,
        vocab_size=setup.vocab_size,
    )
    tokens: dict[str, int] = {}
    for number, turn in enumerate(recording.turns):
        for entry in recording.before.get(number, []):
            _apply(core, clock, entry)
        clock.at_s = max(clock.at_s, turn.plan_s)
        runner.turn, runner.submitted = turn, None
        outputs = core.launch()
        if launched is not None:
            launched(number, core)
        for output in outputs + core.settle():
            _note(found, tokens, output)
        plan = runner.submitted or StepPlan(-1, [])
        found.plans.append([(row.request_id, row.start, row.count) for row in plan.rows])
        found.copies.append((plan.loads, plan.stores))
    return found


def _apply(core: EngineCore, clock: ReplayClock, entry: Add | Aborted) -> None:
    if isinstance(entry, Add):
        core.add(entry)
    else:
        clock.at_s = max(clock.at_s, entry.at_s)
        core.abort(entry.sequence_ids)


def _note(found: Replay, tokens: dict[str, int], output: SequenceOutput) -> None:
    name, end = output.request_id, output.end
    tokens[name] = tokens.get(name, 0) + len(output.token_ids)
    if end is None or not end.times.first_token_s:
        return
    found.ttft_s[name] = end.times.first_token_s - end.times.arrival_s
    found.latency_s[name] = end.times.finished_s - end.times.arrival_s
    found.tpot_s[name] = tpot(found.ttft_s[name], found.latency_s[name], tokens[name])
