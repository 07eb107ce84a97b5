"""Engine side of one HTTP request: submits its prompts, tracks their progress and passes their chunks on."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from roseinfer.core.clock import Clock
from roseinfer.core.errors import RequestFailedError, RoseinferError
from roseinfer.core.outputs import COMPLETE, FinishReason
from roseinfer.engine.api import Engine, GenerateRequest, SequenceChunk, Submission
from roseinfer.server.http.errors import ApiError, SloUnattainable, deadline_exceeded
from roseinfer.server.request.job import Job, JobProgress, PromptRun, SampleRecord, UnreadRequest

_PROPER_ENDS = (*COMPLETE, FinishReason.TIMEOUT)


class Observer(Protocol):
    """Observer of requests, for metrics and logs."""

    def started(self, job: Job, progress: JobProgress, state: Mapping[str, Any], now_s: float) -> None:
        """Note a started request; `progress` is live until `ended`. `state`: see `EdgeMiddleware`."""
        ...

    def prompt_done(self, tokens: int, cached_tokens: int) -> None:
        """Note a processed prompt of `tokens`, of which `cached_tokens` were in the prefix cache."""
        ...

    def first_token(self, seconds: float) -> None:
        """Note the time from arrival to the first token of a prompt."""
        ...

    def inter_token(self, seconds: float, tokens: int) -> None:
        """Note `tokens` that arrived together, at `seconds` per token."""
        ...

    def refused(self, reason: str) -> None:
        """Count a rejected request; `reason` names the limit."""
        ...

    def rejected_unread(self, visit: UnreadRequest, seconds: float, error: ApiError) -> None:
        """Note a request that arrived `seconds` ago and was rejected before its body was read."""
        ...

    def ended_early(self, request_id: str, cause: BaseException) -> None:
        """Note that `cause` ended a request before it reached an engine."""
        ...

    def ended(self, job: Job, progress: JobProgress, now_s: float, cause: BaseException | None) -> None:
        """Note an ended request. `cause`: the error that ended it early, None if all samples finished."""
        ...

    def why(self, job: Job, progress: JobProgress, now_s: float) -> dict[str, Any]:
        """Explain the latency of a request whose samples have all ended."""
        ...


class Receiver(Protocol):
    """Receiver of the chunks of all prompts. `end` is called once, last."""

    def put(self, prompt: int, chunk: SequenceChunk) -> None: ...

    def end(self, error: Exception | None) -> None:
        """End with `error`, or None if every sample has a normal finish reason."""
        ...


class Generation:
    """Run of one job on the engine. Call `start` once and `cancel` in any case.

    With prompt logprobs, sample 0 of a prompt precedes the others.
    """

    def __init__(self, job: Job, engine: Engine, ids: Iterator[int], observer: Observer, clock: Clock) -> None:
        self.job = job
        # For all prompts: those never submitted because the client left count as ended too.
        runs = [
            PromptRun(len(prompt.ids), prompt.params.max_tokens, job.arrival_s, [SampleRecord() for _ in range(job.n)])
            for prompt in job.prompts
        ]
        self.progress = JobProgress(runs, job.parser is not None, predicted=bool(job.prompts[0].prediction))
        self._engine = engine
        self._ids = ids
        self._observer = observer
        self._clock = clock
        self._submissions: list[Submission] = []
        self._receiver: Receiver | None = None
        self._left = job.num_choices

    def start(self, receiver: Receiver) -> None:
        """Submit all prompts. Raises what `Engine.submit` raises; `cancel` then ends the submitted ones."""
        job = self.job
        needs_sample_0 = job.n > 1 and job.prompts[0].params.prompt_logprobs is not None
        self._receiver = _Sample0First(receiver) if needs_sample_0 else receiver
        for position, prompt in enumerate(job.prompts):
            request_id = f"{job.request_id}-{next(self._ids)}"  # unique even if a client reuses an id
            request = GenerateRequest(request_id=request_id, prompt=prompt, n=job.n, parser=job.parser)
            run = self.progress.runs[position]
            submission = self._engine.submit(request, _PromptSink(self, position, run))
            self._submissions.append(submission)
            run.route = submission.route

    def cancel(self) -> None:
        self._receiver = None
        submissions, self._submissions = self._submissions, []  # breaks a reference cycle
        for submission in submissions:
            submission.cancel()

    def take(self, prompt: int, run: PromptRun, chunk: SequenceChunk) -> None:
        """Take a chunk of the engine. An exception ends this request only, not the calling engine client."""
        if self._receiver is None:
            return
        try:
            self._note(run, chunk)
            self._receiver.put(prompt, chunk)
        except Exception as error:
            self.end(error)
            return
        if chunk.finish_reason is not None:
            self._left -= 1
            if not self._left:
                self.end(None)

    def end(self, error: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.end(error)

    def _note(self, run: PromptRun, chunk: SequenceChunk) -> None:
        sample = run.samples[chunk.index]
        new_tokens = chunk.num_output_tokens - sample.tokens
        if chunk.index == 0:  # others share sample 0's blocks, which is no cache hit of the prompt
            if not sample.tokens and (new_tokens or chunk.finish_reason in COMPLETE):
                self._observer.prompt_done(run.prompt_tokens, chunk.cached_tokens)
            run.cached_tokens = chunk.cached_tokens
        sample.tokens = chunk.num_output_tokens
        if chunk.why is not None:
            sample.why = chunk.why
            sample.first_why = sample.first_why or chunk.why
        if chunk.drafts is not None:
            sample.drafts = chunk.drafts
        if chunk.events is not None:
            sample.note_events(chunk)
        if new_tokens > 0:
            self._note_tokens(run, sample, new_tokens)
        if chunk.finish_reason is not None:
            sample.finish_reason, sample.times, sample.preemptions = chunk.finish_reason, chunk.times, chunk.preemptions
            self._check_end(sample, chunk)

    def _check_end(self, sample: SampleRecord, chunk: SequenceChunk) -> None:
        """Raise if the answer fails: a sample was rejected or failed, or no token came in time."""
        if chunk.finish_reason is FinishReason.REJECTED:
            assert chunk.rejection is not None, "rejected chunks carry a rejection"
            raise SloUnattainable(chunk.rejection)
        if chunk.finish_reason is FinishReason.TIMEOUT and not self.progress.begun:
            raise deadline_exceeded()
        if chunk.finish_reason not in _PROPER_ENDS:
            raise RequestFailedError(f"a sample ended with {chunk.finish_reason}")
        if not sample.tokens and chunk.finish_reason in COMPLETE:  # max_tokens 0: the prompt was scored
            sample.first_s = sample.last_s = self._clock.now()

    def _note_tokens(self, run: PromptRun, sample: SampleRecord, tokens: int) -> None:
        now_s = self._clock.now()
        if run.first_s is None:
            run.first_s = now_s
            self._observer.first_token(now_s - run.arrival_s)
        if sample.last_s:
            self._observer.inter_token((now_s - sample.last_s) / tokens, tokens)
        else:
            sample.first_s = now_s
        sample.last_s = now_s


class _PromptSink:
    """Sink of the engine's chunks for one prompt."""

    __slots__ = ("_generation", "_position", "_run")

    def __init__(self, generation: Generation, position: int, run: PromptRun) -> None:
        self._generation = generation
        self._position = position
        self._run = run

    def put(self, chunk: SequenceChunk) -> None:
        self._generation.take(self._position, self._run, chunk)

    def fail(self, error: RoseinferError) -> None:
        self._generation.end(error)


class _Sample0First:
    """Hold back other samples of a prompt until sample 0, which carries the prompt's logprobs, has begun."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._held: dict[int, list[SequenceChunk] | None] = {}

    def put(self, prompt: int, chunk: SequenceChunk) -> None:
        waiting = self._held.setdefault(prompt, [])
        if chunk.index != 0 and waiting is not None:
            waiting.append(chunk)
            return
        self._receiver.put(prompt, chunk)
        self._held[prompt] = None
        for earlier in waiting or ():
            self._receiver.put(prompt, earlier)

    def end(self, error: Exception | None) -> None:
        self._receiver.end(error)
