"""Text generation in this process, without a server: `LLM("tiny").generate("def fibonacci(")`."""

import itertools
import operator
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Self, TypeVar

from roseinfer.config.hub import load_tokenizer, model_folder
from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    PricedConfig,
    ProfileConfig,
    SchedulerConfig,
)
from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    InvalidRequestError,
    RequestFailedError,
    TooManyInflightError,
)
from roseinfer.core.guide import GuideSpec
from roseinfer.core.observer import StepObserver
from roseinfer.core.outputs import FinishReason, SequenceOutput
from roseinfer.core.plan import TokenLogprobs
from roseinfer.core.request import Prompt, RequestMeta, kept_prompt_tokens, sequence_id
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Rejection, Slo, Why
from roseinfer.engine.api import SequenceChunk
from roseinfer.engine.core import IDLE_TURN_WAIT_S, Core
from roseinfer.engine.live import prepare
from roseinfer.engine.messages import Add
from roseinfer.engine.output import OutputDelivery, SequenceText
from roseinfer.sched.registry import option_names, scheduler_config
from roseinfer.text.template_check import trusted_template
from roseinfer.text.tokenizer import Tokenizer

PromptInput = str | list[int]
Part = TypeVar("Part", ModelConfig, CacheConfig, ProfileConfig, PricedConfig, KvEventsConfig)


@dataclass(slots=True)
class Sample:
    """One generated sequence. `error` is set if `finish_reason` is "error", `rejection` if it is "rejected". `why`:
    what it waited for and how it ran.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    rejection: Rejection | None = None
    why: Why | None = None


@dataclass(slots=True)
class Completion:
    """Result for one prompt, with n `samples`. `cached_tokens`: tokens of the prompt that were found in the cache."""

    prompt_ids: list[int]
    samples: list[Sample]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return self.samples[0].text


class LLM:
    """Engine in this process. Not usable in a fork of it. Not thread safe; one call at a time.

    Options are the fields of `ModelConfig`, `CacheConfig`, `SchedulerConfig`, `ProfileConfig`, `PricedConfig` and
    `KvEventsConfig`, and the options of the scheduling policy. `observer` is called for every step.

    Raise `ConfigError` for an unknown or contradictory option, and `ModelNotFoundError` or `UnsupportedModelError` for
    a model that cannot be loaded.
    """

    def __init__(self, model: str = "tiny", *, observer: StepObserver | None = None, **options: Any) -> None:
        from roseinfer.engine.process import build_engine

        self._owner = os.getpid()
        config = make_engine_config(model=model, **options)
        self.tokenizer = load_tokenizer(config.model)
        self.core, self.info = build_engine(config, model_folder(config.model), observer)
        self._max_inflight = config.scheduler.max_inflight_requests
        self._numbers = itertools.count()
        self._clock: Clock = MonotonicClock()  # same time scale as the engine's clock
        self._closed = False
        self._broken = False  # a step was interrupted: its resources are never released

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SequenceParams | Sequence[SequenceParams] | None = None,
        *,
        n: int = 1,
        slo: Slo | None = None,
        guide: GuideSpec | Sequence[GuideSpec | None] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or many in a batch. Return results in the order of the prompts.

        A prompt is text or token ids. `params` and `guide` (constraint of the output) are one for all prompts, or one
        for each. `slo`: objectives of each request, counted from now; the scheduling policy may reject a request that
        cannot meet them. Raise `InvalidRequestError` for an invalid request, before any of them runs; a grammar that
        does not compile raises it later.
        """
        inputs = _as_batch(prompts)
        all_params = self._params_of_each(params, len(inputs))
        guides = _guide_of_each(guide, len(inputs))
        asked = zip(inputs, all_params, guides, strict=True)
        jobs = [self._job(prompt, sampling, n, slo, spec) for prompt, sampling, spec in asked]
        batch = self._add(jobs)
        try:
            for job, chunk in self._run(batch):
                job.take(chunk)
        finally:
            self._abort(batch)
        return [job.completion for job in jobs]

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SequenceParams | None = None, *, n: int = 1
    ) -> Completion:
        """Answer a conversation through the model's chat template."""
        template = trusted_template(self.tokenizer)
        if template is None:
            raise InvalidRequestError("the model has no chat template", "messages")
        params = params or SequenceParams()
        return self.generate([template.encode(messages, keep_last=self._kept(params))], params, n=n)[0]

    def stream(self, prompt: PromptInput, params: SequenceParams | None = None) -> Iterator[SequenceChunk]:
        """Yield the chunks of one completion. Leaving the loop early aborts the request."""
        job = self._job(prompt, params or SequenceParams())
        batch = self._add([job])
        try:
            for _, chunk in self._run(batch):
                yield chunk
        finally:
            self._abort(batch)

    def stream_steps(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SequenceParams | Sequence[SequenceParams] | None = None,
    ) -> Iterator[list[tuple[int, SequenceChunk]]]:
        """Yield after every step of the engine a list of (number of the prompt, its chunk).

        Arguments are those of `generate`. Leaving the loop early aborts the requests.
        """
        inputs = _as_batch(prompts)
        all_params = self._params_of_each(params, len(inputs))
        jobs = [self._job(prompt, own) for prompt, own in zip(inputs, all_params, strict=True)]
        numbers = {id(job): number for number, job in enumerate(jobs)}
        batch = self._add(jobs)
        try:
            for chunks in self._steps(batch):
                yield [(numbers[id(job)], chunk) for job, chunk in chunks]
        finally:
            self._abort(batch)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._ours:
                self.core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- internals ------------------------------------------------------------------------------------------------
    @property
    def _ours(self) -> bool:
        """False in a fork of the creating process, which lacks the engine's threads, devices and child processes."""
        return os.getpid() == self._owner

    def _check_owner(self) -> None:
        if not self._ours:
            raise EngineDeadError("this LLM belongs to the parent process; create one after the fork")

    def _job(
        self,
        prompt: PromptInput,
        params: SequenceParams,
        n: int = 1,
        slo: Slo | None = None,
        guide: GuideSpec | None = None,
    ) -> "_Job":
        """Tokenize the prompt. Raise `InvalidRequestError` for an invalid prompt, or for parameters that need the
        tokenizer.
        """
        if isinstance(prompt, str):
            prompt_ids = self.tokenizer.encode(prompt, keep_last=self._kept(params))
        else:
            prompt_ids = _as_ids(prompt)
        ready = Prompt(prompt_ids, params, RequestMeta(slo=slo), guide)
        return _Job(prepare(ready, self.tokenizer, self.info.facts.max_model_len), n, self.tokenizer)

    def _kept(self, params: SequenceParams) -> int | None:
        return kept_prompt_tokens(params.truncate_prompt_tokens, params.max_tokens, self.info.facts.max_model_len)

    def _params_of_each(
        self, params: SequenceParams | Sequence[SequenceParams] | None, count: int
    ) -> list[SequenceParams]:
        if params is None or isinstance(params, SequenceParams):
            return [params or SequenceParams()] * count
        if len(params) != count:
            raise InvalidRequestError(f"{len(params)} sampling parameters for {count} prompts", "params")
        return list(params)

    def _add(self, jobs: list["_Job"]) -> "_Batch":
        """Queue all jobs, or none if one is invalid."""
        self._check_owner()
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if self._broken:
            raise EngineDeadError(
                "an earlier call was interrupted during a step, so this LLM is unusable; create a new one"
            )
        if self.core.busy:
            raise InvalidRequestError("another call of this LLM is not finished; exhaust or close its stream first")
        if self._max_inflight is not None and len(jobs) > self._max_inflight:
            raise TooManyInflightError(f"{len(jobs)} prompts at once exceed max_inflight_requests {self._max_inflight}")
        batch = _Batch(self.core)
        try:
            for job in jobs:
                request_id = f"llm-{next(self._numbers)}"
                self.core.add(Add(request_id, job.prompt, job.n))
                batch.add(request_id, job)
        except BaseException:  # also an interrupt: requests left in the engine would block every later call
            self._abort(batch)
            raise
        return batch

    def _run(self, batch: "_Batch") -> Iterator[tuple["_Job", SequenceChunk]]:
        """Yield the chunks of all steps, one by one."""
        for chunks in self._steps(batch):
            yield from chunks

    def _steps(self, batch: "_Batch") -> Iterator[list[tuple["_Job", SequenceChunk]]]:
        """Step the engine until every sequence of `batch` has ended."""
        while batch.sequences:
            outputs = self._turn()
            for _, error in self.core.take_invalid():
                raise error
            yield batch.deliver(outputs, self._clock.now())
        self._drain()

    def _turn(self) -> list[SequenceOutput]:
        """Run one step of the engine. Wait a little after an idle turn, to avoid a busy loop."""
        self._check_owner()
        if self._closed:
            raise EngineClosedError("the engine is closed")
        try:
            outputs = self.core.step()
        except BaseException:
            self._broken = True
            raise
        if self.core.idle_turn:
            time.sleep(IDLE_TURN_WAIT_S)
        return outputs

    def _abort(self, batch: "_Batch") -> None:
        if not self._ours:
            return
        self.core.abort(batch.sequences)
        self._drain()

    def _drain(self) -> None:
        """Step until the engine is empty: aborted requests end, and steps in flight complete. Drop the output."""
        while self.core.busy and not self._broken and not self._closed:
            self._turn()
            self.core.take_invalid()


class _Batch(OutputDelivery["_Job"]):
    """Open sequences of one call. A sample that fails ends alone."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self._core = core
        self._chunks: list[tuple[_Job, SequenceChunk]] = []

    @property
    def sequences(self) -> list[str]:
        return list(self._sequences)

    def add(self, request_id: str, job: "_Job") -> None:
        job.chunks = self._chunks
        for text in job.texts:
            self._sequences[sequence_id(request_id, text.index)] = (job, text)

    def deliver(self, outputs: list[SequenceOutput], now_s: float) -> list[tuple["_Job", SequenceChunk]]:
        """Return the chunks of a step that ended at `now_s`."""
        self._deliver(outputs, now_s)
        chunks = self._chunks.copy()
        self._chunks.clear()
        return chunks

    def _fail_sample(
        self, request: "_Job", text: SequenceText, output: SequenceOutput, error: RequestFailedError
    ) -> None:
        text.ended = True
        self._end_sequence(output.request_id, request)
        if output.end is None:
            self._abort([output.request_id])
        request.sink.put(SequenceChunk(text.index, finish_reason=FinishReason.ERROR, stop_reason=str(error)))

    def _abort(self, sequences: list[str]) -> None:
        self._core.abort(sequences)


class _Job:
    """One prompt of a call, and its completion so far."""

    def __init__(self, prompt: Prompt, n: int, tokenizer: Tokenizer) -> None:
        self.chunks: list[tuple[_Job, SequenceChunk]] = []
        self.prompt = prompt
        self.n = n
        self.texts = [SequenceText(i, prompt.params, tokenizer) for i in range(n)]
        self.completion = Completion(prompt.ids, [Sample() for _ in range(n)])

    @property
    def sink(self) -> "_Job":
        return self

    def put(self, chunk: SequenceChunk) -> None:
        self.chunks.append((self, chunk))

    def take(self, chunk: SequenceChunk) -> None:
        sample = self.completion.samples[chunk.index]
        sample.text += chunk.text
        sample.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            sample.logprobs = (sample.logprobs or []) + chunk.logprobs
        if chunk.prompt_logprobs is not None:
            self.completion.prompt_logprobs = chunk.prompt_logprobs
        if chunk.index == 0:
            self.completion.cached_tokens = chunk.cached_tokens
        sample.finish_reason, sample.stop_reason = chunk.finish_reason, chunk.stop_reason
        sample.rejection = chunk.rejection
        sample.why = chunk.why or sample.why
        if chunk.finish_reason is FinishReason.ERROR:
            sample.error = str(chunk.stop_reason)
            sample.stop_reason = None


def _as_batch(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    if isinstance(prompts, str):
        return [prompts]
    batch = list(prompts)
    if batch and all(isinstance(item, int) for item in batch):
        return [batch]  # type: ignore[list-item]  # one prompt of token ids
    return batch  # type: ignore[return-value]


def _guide_of_each(guide: GuideSpec | Sequence[GuideSpec | None] | None, count: int) -> list[GuideSpec | None]:
    if guide is None or isinstance(guide, GuideSpec):
        return [guide] * count
    if len(guide) != count:
        raise InvalidRequestError(f"{len(guide)} guides for {count} prompts", "guide")
    return list(guide)


def _as_ids(prompt: Sequence[int]) -> list[int]:
    """Convert to a list of integers. Raise `InvalidRequestError` for other values."""
    try:
        return list(map(operator.index, prompt))
    except TypeError as error:
        raise InvalidRequestError("the token ids of a prompt must be integers", "prompt") from error


def make_engine_config(**options: Any) -> EngineConfig:
    """Sort options into the configs that define them. Raise `ConfigError` for an unknown option."""
    config = EngineConfig(
        model=_take(ModelConfig, options),
        cache=_take(CacheConfig, options),
        scheduler=_take_scheduler(options),
        profile=_take(ProfileConfig, options),
        priced=_take(PricedConfig, options),
        kv_events=_take(KvEventsConfig, options),
    )
    if options:
        raise ConfigError(f"unknown option {min(options)!r}")
    return config


def _take(kind: type[Part], options: dict[str, Any]) -> Part:
    """Build a config from the options that are its fields, and remove them. Fields without metadata are not options:
    code that starts several engines sets them.
    """
    names = [f.name for f in fields(kind) if f.metadata]
    return kind(**{name: options.pop(name) for name in names if name in options})


def _take_scheduler(options: dict[str, Any]) -> SchedulerConfig:
    """Build the scheduler's config, including the options of its policy, and remove these options."""
    names = {f.name for f in fields(SchedulerConfig)} | option_names()
    return scheduler_config(**{name: options.pop(name) for name in names if name in options})
