"""`bench streaming`: requests arrive at an engine in this process, and each is read token by token."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise

from roseinfer.bench.config import StreamingConfig, parse_repeats
from roseinfer.core.errors import ConfigError, TooManyInflightError
from roseinfer.core.outputs import RequestTimes
from roseinfer.core.request import Prompt, RequestMeta
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import Engine, GenerateRequest, RequestStream, SequenceChunk
from roseinfer.text.tokenizer import Tokenizer


@dataclass(slots=True)
class StreamedRequest:
    """Client-side record of one request. Times are seconds of `time.perf_counter`, `times` of the monotonic clock.

    `add_s`: time inside `Engine.generate`. `reads`: (time, tokens) of each chunk.
    """

    submitted_s: float = 0.0
    tokenize_s: float = 0.0
    add_s: float = 0.0
    prompt_tokens: int = 0
    reads: list[tuple[float, int]] = field(default_factory=list)
    times: RequestTimes | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(tokens for _, tokens in self.reads)

    @property
    def ttft_s(self) -> float:
        return self.reads[0][0] - self.submitted_s

    @property
    def latency_s(self) -> float:
        return self.reads[-1][0] - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first chunk; None if there are none."""
        tokens = self.completion_tokens - self.reads[0][1]
        return (self.reads[-1][0] - self.reads[0][0]) / tokens if tokens else None

    @property
    def itl_s(self) -> list[float]:
        """Gaps between the chunks that were read."""
        return [later - earlier for (earlier, _), (later, _) in pairwise(self.reads)]

    @property
    def queue_wait_s(self) -> float | None:
        return self.times.scheduled_s - self.times.arrival_s if self.times else None

    @property
    def prefill_s(self) -> float | None:
        """Time from the first step that computes part of the prompt to the first token."""
        return self.times.first_token_s - self.times.scheduled_s if self.times else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Record of one run. `submit_wall_s`: until the last request was added; `wall_s`: until the last token was read."""

    requests: list[StreamedRequest]
    submit_wall_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class StreamingLoad:
    """Requests of a run; `params` are those of every request."""

    config: StreamingConfig
    params: SequenceParams

    def texts(self) -> list[str]:
        config, repeats = self.config, parse_repeats(self.config.prompt_repeats)
        texts = [config.prompt * repeats[i % len(repeats)] for i in range(config.num_requests)]
        return [f"{i:06}: {text}" for i, text in enumerate(texts)] if config.unique_prompts else texts

    def cache_salt(self, run: str, request: int) -> str:
        """Return the salt: requests with other salts share no prefix. Runs never do; requests of one may."""
        return f"{run}/{request}" if self.config.unique_prompts else run


class StreamingRun:
    """One run of a load. `name` distinguishes runs on one engine; `on_end` is called as each request ends."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, load: StreamingLoad, name: str, on_end: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._load = load
        self._name = name
        self._on_end = on_end
        self._pool: Executor | None = None
        self._readers: list[asyncio.Task[None]] = []
        self._records = [StreamedRequest() for _ in range(load.config.num_requests)]
        self._prompts: list[list[int]] | None = None
        self._ended = asyncio.Event()
        self._last_added_s = 0.0

    async def run(self) -> RunRecord:
        """Run the load. Raise the errors of `Engine.generate`, except that requests wait if too many are in flight."""
        config = self._load.config
        phase = _nvtx if config.nvtx else _no_phase
        try:
            if config.tokenize_workers:
                self._pool = ThreadPoolExecutor(config.tokenize_workers, "tokenize")
            texts = self._load.texts()
            if config.pretok:
                tokenizing = [self._tokenized(i, text) for i, text in enumerate(texts)]
                self._prompts = list(await asyncio.gather(*tokenizing))
            began = time.perf_counter()
            with phase(f"{self._name}: submit"):
                await self._submit_all(texts, began)
            with phase(f"{self._name}: read"):
                await asyncio.gather(*self._readers)
        finally:
            await self._clean_up()
        last = max(record.reads[-1][0] for record in self._records)
        return RunRecord(self._records, self._last_added_s - began, last - began)

    async def _clean_up(self) -> None:
        """Cancel the readers that a failed run leaves."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown()

    async def _submit_all(self, texts: list[str], began: float) -> None:
        """Submit all requests; the readers do not run between those of a burst."""
        interval_s = self._load.config.submit_interval_ms / 1e3
        absolute = self._load.config.submit_schedule == "absolute"
        for i, text in enumerate(texts):
            if interval_s and i:
                due = began + i * interval_s if absolute else time.perf_counter() + interval_s
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            self._readers.append(self._submit(i, text))

    def _submit(self, i: int, text: str) -> asyncio.Task[None]:
        record = self._records[i]
        record.submitted_s = time.perf_counter()
        if self._prompts is not None:
            return self._start(i, self._prompts[i])
        if self._pool is not None:
            return asyncio.create_task(self._tokenize_and_read(i, text))
        prompt_ids = self._tokenizer.encode(text)
        record.tokenize_s = time.perf_counter() - record.submitted_s
        return self._start(i, prompt_ids)

    def _start(self, i: int, prompt_ids: list[int]) -> asyncio.Task[None]:
        """Add the request now, or in its task if too many are in flight."""
        try:
            stream = self._add(i, prompt_ids)
        except TooManyInflightError:
            return asyncio.create_task(self._wait_and_read(i, prompt_ids))
        return asyncio.create_task(self._read(self._records[i], stream))

    def _add(self, i: int, prompt_ids: list[int]) -> RequestStream:
        record = self._records[i]
        record.prompt_tokens = len(prompt_ids)
        request = GenerateRequest(
            request_id=f"{self._name}/{i}",
            prompt=Prompt(prompt_ids, self._load.params, RequestMeta(cache_salt=self._load.cache_salt(self._name, i))),
        )
        before = time.perf_counter()
        stream = self._engine.generate(request)
        self._last_added_s = time.perf_counter()
        record.add_s = self._last_added_s - before
        return stream

    async def _tokenize_and_read(self, i: int, text: str) -> None:
        await self._wait_and_read(i, await self._tokenized(i, text))

    async def _wait_and_read(self, i: int, prompt_ids: list[int]) -> None:
        while True:
            try:
                stream = self._add(i, prompt_ids)
                break
            except TooManyInflightError:
                self._ended.clear()
                await self._ended.wait()
        await self._read(self._records[i], stream)

    async def _tokenized(self, i: int, text: str) -> list[int]:
        began = time.perf_counter()
        if self._pool is None:
            ids = self._tokenizer.encode(text)
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._pool, self._tokenizer.encode, text)
        self._records[i].tokenize_s = time.perf_counter() - began
        return ids

    async def _read(self, record: StreamedRequest, stream: RequestStream) -> None:
        """Record the first chunk as it comes, later ones once they have `stream_interval` tokens."""
        unread = 0
        async for chunk in stream:
            now = time.perf_counter()
            unread += len(chunk.token_ids)
            last = chunk.finish_reason is not None
            if unread and (unread >= self._load.config.stream_interval or not record.reads or last):
                record.reads.append((now, unread))
                unread = 0
            if last:
                self._record_end(record, chunk)

    def _record_end(self, record: StreamedRequest, chunk: SequenceChunk) -> None:
        record.times = chunk.times
        self._ended.set()
        self._on_end()


def check_nvtx(device: str) -> None:
    """Raise `ConfigError` unless an engine on `device` (as in `ModelConfig`) uses CUDA."""
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        raise ConfigError("nvtx needs an engine on CUDA")


def _no_phase(name: str) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def _nvtx(name: str) -> Iterator[None]:
    import torch

    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
