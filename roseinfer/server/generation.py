"""The engine's side of one HTTP request: a stream per prompt, merged, accounted for, and ended whatever happens."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Protocol

from roseinfer.core.clock import Clock
from roseinfer.core.errors import RequestFailedError
from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import Engine, GenerateRequest, RequestStream, SequenceChunk
from roseinfer.server.account import Account, PromptRun, Sample
from roseinfer.server.job import Job

# (prompt, what is new of one of its samples)
Chunks = AsyncGenerator[tuple[int, SequenceChunk], None]

_PROPER_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class Observer(Protocol):
    def prompt_done(self, tokens: int, cached_tokens: int) -> None: ...

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, tokens: int) -> None: ...


class Generation:
    """`start`, iterate `chunks` to the end, `cancel` in any case."""

    def __init__(self, job: Job, engine: Engine, ids: Iterator[int], observer: Observer, clock: Clock) -> None:
        self.job = job
        self.account = Account()
        self._engine = engine
        self._ids = ids
        self._observer = observer
        self._clock = clock
        self._streams: list[RequestStream] = []

    def start(self) -> None:
        """Raises what `Engine.generate` raises; `cancel` then ends those that had started."""
        job = self.job
        for prompt in job.prompts:
            request = GenerateRequest(
                # Unique even if a client uses an id twice at a time.
                request_id=f"{job.request_id}-{next(self._ids)}",
                prompt_ids=prompt.ids,
                params=prompt.params,
                n=job.n,
                cache_salt=job.cache_salt,
                arrival_s=job.arrival_s,
            )
            samples = [Sample() for _ in range(job.n)]
            run = PromptRun(len(prompt.ids), prompt.params.max_tokens, job.arrival_s, samples)
            self.account.runs.append(run)
            self._streams.append(self._engine.generate(request))

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def chunks(self) -> Chunks:
        """(prompt, chunk), interleaved as they come. With prompt logprobs, sample 0 of a prompt comes first.

        Raises what the streams raise, and `RequestFailedError` if a sample ends without a proper finish reason.
        """
        source = self._single() if len(self._streams) == 1 else self._merged()
        if self.job.n > 1 and self.job.prompts[0].params.prompt_logprobs is not None:
            source = _sample_0_first(source)
        async with aclosing(source):
            async for prompt, chunk in source:
                self._note(prompt, chunk)
                yield prompt, chunk
        self._check_complete()

    async def _single(self) -> Chunks:
        async for chunk in self._streams[0]:
            yield 0, chunk

    async def _merged(self) -> Chunks:
        queue: asyncio.Queue[tuple[int, SequenceChunk | Exception | None]] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(self._streams)]
        try:
            running = len(pumps)
            while running:
                prompt, item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield prompt, item
        finally:
            for pump in pumps:
                pump.cancel()

    def _note(self, prompt: int, chunk: SequenceChunk) -> None:
        run = self.account.runs[prompt]
        sample = run.samples[chunk.index]
        new_tokens = chunk.num_output_tokens - sample.tokens
        if chunk.index == 0:  # the other samples share what sample 0 computed, which is no hit of the prompt's
            if not sample.tokens:
                self._observer.prompt_done(run.prompt_tokens, chunk.cached_tokens)
            run.cached_tokens = chunk.cached_tokens
        sample.note(chunk)
        if new_tokens > 0:
            self._note_tokens(run, sample, new_tokens)
        if chunk.finish_reason is not None and chunk.finish_reason not in _PROPER_ENDS:
            raise RequestFailedError(f"a sample ended with {chunk.finish_reason}")

    def _note_tokens(self, run: PromptRun, sample: Sample, tokens: int) -> None:
        now_s = self._clock.now()
        if run.first_s is None:
            run.first_s = now_s
            self._observer.first_token(now_s - run.arrival_s)
        if sample.last_s:
            self._observer.inter_token((now_s - sample.last_s) / tokens, tokens)
        sample.last_s = now_s

    def _check_complete(self) -> None:
        for run in self.account.runs:
            if any(sample.finish_reason is None for sample in run.samples):
                raise RequestFailedError("the engine ended a stream without a finish reason")


async def _pump(
    prompt: int, stream: RequestStream, queue: asyncio.Queue[tuple[int, SequenceChunk | Exception | None]]
) -> None:
    try:
        async for chunk in stream:
            queue.put_nowait((prompt, chunk))
        queue.put_nowait((prompt, None))
    except Exception as error:
        queue.put_nowait((prompt, error))


async def _sample_0_first(
    source: Chunks,
) -> Chunks:
    """Holds the other samples of a prompt back until sample 0, which brings the prompt's logprobs, has begun."""
    held: dict[int, list[SequenceChunk] | None] = {}
    async with aclosing(source):
        async for prompt, chunk in source:
            waiting = held.setdefault(prompt, [])
            if chunk.index != 0 and waiting is not None:
                waiting.append(chunk)
                continue
            yield prompt, chunk
            held[prompt] = None
            for earlier in waiting or ():
                yield prompt, earlier
