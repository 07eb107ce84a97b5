"""Open requests of a client process, on whichever engine they run, and streams of their chunks.

All output that a reader has seen is kept here, so a request can continue on another engine.
"""

import asyncio
import itertools
import operator
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.errors import EngineClosedError, InvalidRequestError, RoseinferError, TooManyInflightError
from roseinfer.core.request import Prompt, check_context, context_error, kept_prompt_tokens, sequence_id
from roseinfer.core.sampling import Seeds, SequenceParams
from roseinfer.engine.api import EngineInfo, GenerateRequest, Route, SequenceChunk, Sink, Submission
from roseinfer.engine.output import SequenceText, merge, sequence_text
from roseinfer.text.tokenizer import Tokenizer


class Routing(Protocol):
    """Routing state of a request, where there are several engines."""

    route: Route


class EngineHandle(Protocol):
    """Engine that holds a request, as the request sees it."""

    def withdraw(self, live: "LiveRequest") -> None:
        """Abort the open samples of a request. Later output of them is dropped."""
        ...

    def cancel(self, live: "LiveRequest") -> None:
        """Withdraw a request that its reader cancelled."""
        ...


class LiveRequest:
    """Request that has not ended, on an engine or between two.

    `seed`: used if its sampling parameters have none. `keys`: keys of the prompt's full blocks, if known. `texts`: its
    samples with their output so far. `engine`: the one that holds it, or None. `wire_id`: its id there. `routing`: set
    with several engines.
    """

    __slots__ = ("_requests", "engine", "keys", "left", "request", "routing", "seed", "sink", "texts", "wire_id")

    def __init__(
        self, requests: "LiveRequests", request: GenerateRequest, texts: list[SequenceText], sink: Sink
    ) -> None:
        self._requests = requests
        self.request = request
        self.texts = texts
        self.sink = sink
        self.left = len(texts)
        self.engine: EngineHandle | None = None
        self.wire_id = ""
        self.seed: int | None = None
        self.keys = b""
        self.routing: Routing | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def was_sent(self) -> bool:
        """True if an engine has had it. That stays so after the engine was lost."""
        return self.wire_id != ""

    @property
    def has_output(self) -> bool:
        """True if its reader has received anything."""
        return any(text.ids or text.ended for text in self.texts)

    @property
    def route(self) -> Route | None:
        """Path of the request, see `Submission`."""
        return None if self.routing is None else self.routing.route

    def sequence_id(self, text: SequenceText) -> str:
        """Return the engine's id of a sample."""
        return sequence_id(self.wire_id, text.index)

    def cancel(self) -> None:
        if self in self._requests:
            if self.engine is not None:
                self.engine.cancel(self)
            self.fail(EngineClosedError("the request was cancelled"))

    def fail(self, error: RoseinferError) -> None:
        """End it with an error. Its engine, if any, must have withdrawn it."""
        self._requests.remove(self)
        self.sink.fail(error)


class InflightLimit:
    """Limit of concurrent requests; None = unlimited. Processes that share a limit override `total` and `update`."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.own = 0

    def total(self) -> int:
        return self.own

    def update(self, own: int) -> None:
        self.own = own

    def check(self) -> None:
        """Raise `TooManyInflightError` if one more request exceeds the limit."""
        if self.limit is not None and self.total() >= self.limit:
            limit = f"--max-inflight-requests {self.limit}"
            raise TooManyInflightError(f"The server is at its limit of requests in the engine ({limit})")


class LiveRequests:
    """Open requests of this process by id. `prefix`: of the engine's ids, unique among its clients.

    Several calls end a request or a part of it. What each of them does:

    | call | samples' ids in the client | abort at the engine | here | reader |
    | --- | --- | --- | --- | --- |
    | `AsyncEngine._forget`, `_release` | removed | - | - | - |
    | `AsyncEngine.withdraw` | removed | yes | - | - |
    | `AsyncEngine.cancel` | removed | yes, and notifies `failover` | - | - |
    | `AsyncEngine._end_sequence` | one removed | - | removed with the last sample | - |
    | `LiveRequests.remove` | - | - | removed | - |
    | `LiveRequest.fail` | - | - | removed | gets the error |
    | `LiveRequest.cancel` | removed | yes, and notifies `failover` | removed | gets the error |
    """

    def __init__(self, tokenizer: Tokenizer, clock: Clock | None, inflight: InflightLimit, prefix: str) -> None:
        self.clock = clock or MonotonicClock()
        self._tokenizer = tokenizer
        self._inflight = inflight
        self._prefix = prefix
        self._numbers = itertools.count()
        self._live: dict[str, LiveRequest] = {}
        self._seeds: Seeds | None = None

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, live: LiveRequest) -> bool:
        return self._live.get(live.request_id) is live

    def all(self) -> list[LiveRequest]:
        """Return a list that stays valid while requests end."""
        return list(self._live.values())

    def make(self, request: GenerateRequest, sink: Sink, info: EngineInfo) -> LiveRequest:
        """Check a request and make its state, which counts from `add` on. Raise the errors of `Engine.submit`."""
        self._check(request, info)
        prompt = request.prompt
        if prompt.meta.arrival_s is None:
            meta = replace(prompt.meta, arrival_s=self.clock.now())
            request = replace(request, prompt=replace(prompt, meta=meta))
        live = LiveRequest(self, request, [sequence_text(request, i, self._tokenizer) for i in range(request.n)], sink)
        if prompt.params.seed is None:
            # Drawn in the client, so that another engine that continues the request draws the same tokens.
            self._seeds = self._seeds or Seeds(info.seed, self._prefix)
            live.seed = self._seeds.draw(request.n)
        return live

    def _check(self, request: GenerateRequest, info: EngineInfo) -> None:
        self._inflight.check()
        if request.request_id in self._live:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        if request.n < 1:
            raise InvalidRequestError("n must be positive", "n")
        prompt = request.prompt
        if not prompt.ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        try:
            count = len(list(map(operator.index, prompt.ids)))
        except TypeError as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}", "prompt") from error
        check_context(count, prompt.params.max_tokens, info.facts.max_model_len)

    def wire_id(self) -> str:
        """Return a new id for an engine. It is never reused, because messages about a cancelled or moved request may
        still be in flight when its `request_id` is reused. It is short, because every token carries it.
        """
        return f"{self._prefix}{next(self._numbers)}"

    def add(self, live: LiveRequest) -> None:
        self._live[live.request_id] = live
        self._inflight.update(len(self._live))

    def remove(self, live: LiveRequest) -> None:
        if self._live.get(live.request_id) is live:
            del self._live[live.request_id]
            for text in live.texts:
                text.drop()
            self._inflight.update(len(self._live))


class ChunkBuffer:
    """Sink that merges unread chunks, at most one per sample, so that a slow reader never delays others.

    `samples`: number of samples of the request. `fail` drops unread chunks.
    """

    def __init__(self, samples: int) -> None:
        self._open = samples
        self._unread: dict[int, SequenceChunk] = {}
        self._error: RoseinferError | None = None
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._open == 0 or self._error is not None

    def put(self, chunk: SequenceChunk) -> None:
        unread = self._unread.get(chunk.index)
        self._unread[chunk.index] = chunk if unread is None else merge(unread, chunk)
        if chunk.finish_reason is not None:
            self._open -= 1
        self._changed.set()

    def fail(self, error: RoseinferError) -> None:
        self._error = error
        self._changed.set()

    async def read(self) -> SequenceChunk:
        """Return the next chunk. Raise the error of `fail`, or `StopAsyncIteration` after the last chunk."""
        while True:
            if self._error is not None:
                raise self._error
            if self._unread:
                index = next(iter(self._unread))
                return self._unread.pop(index)
            if self.ended:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()


class ChunkStream:
    """Stream that `Engine.generate` returns."""

    def __init__(self, buffer: ChunkBuffer, submission: Submission) -> None:
        self._buffer = buffer
        self._submission = submission

    @property
    def ended(self) -> bool:
        return self._buffer.ended

    def __aiter__(self) -> AsyncIterator[SequenceChunk]:
        return self

    async def __anext__(self) -> SequenceChunk:
        return await self._buffer.read()

    @property
    def route(self) -> Route | None:
        return self._submission.route

    def cancel(self) -> None:
        self._submission.cancel()


def fit_context(params: SequenceParams, prompt_len: int, max_model_len: int, param: str = "prompt") -> SequenceParams:
    """Clamp the output to the rest of the context after the prompt.

    Raise `RequestTooLongError` naming `param`, the prompt's field, if nothing is left.
    """
    room = max_model_len - prompt_len
    if room < min(1, params.max_tokens):
        but = f"the prompt has {prompt_len} tokens, which leaves no room for an output"
        raise context_error(max_model_len, but, param, prompt_len)
    if params.max_tokens <= room:
        return params
    return replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def prepare(prompt: Prompt, tokenizer: Tokenizer, max_model_len: int) -> Prompt:
    """Apply `truncate_prompt_tokens`, and replace `bad_words` by token ids. Both fields are empty in the result.

    Raise `InvalidRequestError`. The result may be prepared again without effect.
    """
    params = prompt.params
    if params.truncate_prompt_tokens is not None:
        keep = kept_prompt_tokens(params.truncate_prompt_tokens, params.max_tokens, max_model_len)
        ids = prompt.ids if keep is None else prompt.ids[-keep:]
        prompt = replace(prompt, ids=ids, params=replace(params, truncate_prompt_tokens=None))
    if params.bad_words:
        prompt = replace(prompt, params=resolve_bad_words(prompt.params, tokenizer))
    return prompt


def resolve_bad_words(params: SequenceParams, tokenizer: Tokenizer) -> SequenceParams:
    """Move `bad_words` to `bad_token_ids`. Raise `InvalidRequestError` for a word that has no tokens."""
    found = list(params.bad_token_ids)
    for word in params.bad_words:
        try:
            spellings = tokenizer.spellings(word)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"bad_words: {error.message}", "bad_words") from error
        if not spellings:
            raise InvalidRequestError("bad_words contains a word without tokens", "bad_words")
        found += spellings
    return replace(params, bad_words=(), bad_token_ids=tuple(found))
