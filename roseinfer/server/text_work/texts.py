"""Routing of text work: short texts go to threads, all others to processes that can be killed.

| lane | takes | is done by |
| --- | --- | --- |
| short | texts of up to `SHORT_CHARS` | threads of this process |
| chat | chats of up to `SHORT_CHARS` | workers that stay |
| long | both, of up to `LONG_CHARS` | workers that stay |
| bulk | everything else | one worker for each, one at a time |
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable

from roseinfer.core.errors import ConfigError
from roseinfer.core.pooling import PairFormat
from roseinfer.server.http.errors import ApiError, unavailable
from roseinfer.server.text_work.lane import Lane
from roseinfer.server.text_work.offload import MAX_THREADS, Offload
from roseinfer.text.chat import ChatTemplate
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.worker.client import TextHost, TextWorkerPool, WorkerLostError
from roseinfer.text.worker.memory import trim
from roseinfer.text.worker.messages import EncodeChat, Job, ListTokens, Result, TextFacts
from roseinfer.text.worker.perform import TextPerformer

SHORT_CHARS = 2**16
LONG_CHARS = 2**20
# Limits on all jobs in a lane.
MAX_LANE_CHARS = 2**25
MAX_BULK_CHARS = 2**24
# Memory of a worker beyond what it shares with the other ones.
MAX_WORKER_BYTES = 7 * 2**24
# Processor time for a job, and for each character of it.
JOB_CPU_S = 1.0
CHAR_CPU_S = 4e-6
MAX_BULK_CPU_S = 6.0
MAX_BULK_S = 8.0
# From the end of a large job until its memory is returned to the system.
TRIM_AFTER_S = 1.0

log = logging.getLogger(__name__)


class Texts:
    """Text work of a server process.

    `on_refused` is called for each job that finds its queue full, `on_done` for each finished job with its lane and the
    seconds since its arrival.
    """

    def __init__(
        self, tokenizer: Tokenizer, on_refused: Callable[[], None], on_done: Callable[[str, float], None]
    ) -> None:
        self._on_done = on_done
        self._facts: TextFacts | None = None
        self._tokenizer = tokenizer
        self._host = host = TextHost(tokenizer)
        self._trimming: asyncio.TimerHandle | None = None
        self._performer = TextPerformer(tokenizer, None)
        self._threads = Offload()
        runners = max(2, min(MAX_THREADS, os.cpu_count() or 1))
        self._short = Lane(self._threads.threads, MAX_LANE_CHARS, on_refused)
        self._chat = Lane(runners, MAX_LANE_CHARS, on_refused)
        self._long = Lane(2, MAX_LANE_CHARS, on_refused, kills=True)
        self._bulk = Lane(1, MAX_BULK_CHARS, on_refused, max_s=MAX_BULK_S, kills=True)
        self._chat_workers = TextWorkerPool(host, memory_bytes=MAX_WORKER_BYTES, reuse=True)
        self._long_workers = TextWorkerPool(host, memory_bytes=MAX_WORKER_BYTES, reuse=True)
        self._bulk_workers = TextWorkerPool(host, memory_bytes=MAX_WORKER_BYTES, niceness=5, reuse=False)

    async def start(self) -> None:
        """Try the chat template in a process of its own. Raises `ConfigError` if it cannot be used."""
        self._facts = await self._host.start()

    @property
    def facts(self) -> TextFacts:
        if self._facts is None:  # not started: the chat template is trusted, and compiled in this process
            template = ChatTemplate.from_tokenizer(self._tokenizer)
            variables = None if template is None else template.kwargs
            self._facts = TextFacts(variables, self._tokenizer.max_token_bytes)
        return self._facts

    async def perform(self, job: Job, chars: int) -> Result:
        """Perform a job of `chars` characters and return its result.

        Raises `InvalidRequestError`, also for a job that costs too much, `TokenizerFailedError`, and `ApiError` 503.
        """
        try:
            return await self._perform(job, chars)
        except (WorkerLostError, ConfigError) as error:
            log.warning("no text worker: %s", error)
            raise unavailable("text_worker_lost", "The process that tokenises texts has ended", 1.0) from error
        finally:
            if chars > LONG_CHARS:
                self._trim_soon()

    async def _perform(self, job: Job, chars: int) -> Result:
        began_s = time.monotonic()
        cpu_s = min(JOB_CPU_S + chars * CHAR_CPU_S, MAX_BULK_CPU_S)
        if chars > LONG_CHARS:
            name, lane, workers = "bulk", self._bulk, self._bulk_workers
        elif chars > SHORT_CHARS:
            name, lane, workers = "long", self._long, self._long_workers
        elif isinstance(job.prompt if isinstance(job, ListTokens) else job, EncodeChat):
            name, lane, workers = "chat", self._chat, self._chat_workers
        else:
            done = await self._short.run(chars, lambda: self._threads.start(self._performer.perform, job))
            self._on_done("short", time.monotonic() - began_s)
            return done
        done = await lane.run(chars, lambda: asyncio.ensure_future(workers.perform(job, cpu_s)))
        self._on_done(name, time.monotonic() - began_s)
        return done

    def prepare_pairs(self, form: PairFormat) -> None:
        """Start to prepare the encoding of pairs in a thread."""
        self._threads.start(self._performer.pair_encoder(form).prepare)

    def refuse(self, cause: ApiError) -> None:
        """Fail waiting jobs and all later ones."""
        for lane in (self._short, self._chat, self._long, self._bulk):
            lane.refuse(cause)

    def _trim_soon(self) -> None:
        """Return memory to the system soon, once for all large jobs that end at about the same time."""
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        threading.Thread(target=trim, daemon=True).start()

    def close(self) -> None:
        if self._trimming is not None:
            self._trimming.cancel()
        self._threads.close()
        self._host.close()
