"""The requests of a process that have not ended, whichever engine they are in.

All of a request that its reader has seen is here: it may go from one engine to another and on from there.
"""

import asyncio
import itertools
import operator
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Protocol

from roseinfer.core.clock import Clock, MonotonicClock
from roseinfer.core.errors import EngineClosedError, InvalidRequestError, RoseinferError, TooManyInflightError
from roseinfer.core.request import Prompt, check_context, kept_prompt_tokens, sequence_id
from roseinfer.core.sampling import SamplingParams, Seeds
from roseinfer.engine.api import EngineInfo, GenerateRequest, Route, SequenceChunk, Sink, Submission
from roseinfer.engine.output import ParsedSequenceText, SequenceText, merge
from roseinfer.text.tokenizer import Tokenizer


class Routing(Protocol):
    """Routing state of a request, where there are several engines."""

    route: Route


class EngineHandle(Protocol):
    """The way to an engine that a request may be in."""

    def withdraw(self, live: "LiveRequest") -> None:
        """Have the engine forget what is left of a request. What it still says of it is dropped."""
        ...

    def cancel(self, live: "LiveRequest") -> None:
        """The same for one that nobody wants any more."""
        ...


class LiveRequest:
    """A request that has not ended: in an engine, or on its way from one to another.

    `request`: as engines get it, and get it again. `seed`: with which it is sampled if it names none. `keys`: of its
    prompt's full blocks, if they are known. `texts`: its samples, with what they have put out. `engine`: where it is;
    None = nowhere. `wire_id`: what that engine calls it. `routing`: set where there are several engines.
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
    def has_output(self) -> bool:
        """Whether its reader has been given anything."""
        return any(text.ids or text.ended for text in self.texts)

    @property
    def route(self) -> Route | None:
        """See `Submission`."""
        return None if self.routing is None else self.routing.route

    def sequence_id(self, text: SequenceText) -> str:
        """What the engine calls one of the samples."""
        return sequence_id(self.wire_id, text.index)

    def cancel(self) -> None:
        if self in self._requests:
            if self.engine is not None:
                self.engine.cancel(self)
            self.fail(EngineClosedError("the request was cancelled"))

    def fail(self, error: RoseinferError) -> None:
        """End it here; whose engine knows of it has to `withdraw` it before."""
        self._requests.remove(self)
        self.sink.fail(error)


class InflightLimit:
    """How many requests may be in the engine at a time, and how many are. `limit` None = any number.

    Who shares the limit with others puts a class in its place that knows of theirs.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.own = 0

    def total(self) -> int:
        return self.own

    def update(self, own: int) -> None:
        self.own = own

    def check(self) -> None:
        """Raises `TooManyInflightError` if one more is too many."""
        if self.limit is not None and self.total() >= self.limit:
            raise TooManyInflightError(f"{self.total()} requests are in the engine, its limit")


class LiveRequests:
    """The requests of this process that have not ended, by their ids. `prefix`: what tells them from those of other
    clients of an engine.
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
        """As of now, to be iterated while they end."""
        return list(self._live.values())

    def make(self, request: GenerateRequest, sink: Sink, info: EngineInfo) -> LiveRequest:
        """It does not count before `add`. Raises what `Engine.submit` raises of a request that is wrong, and
        `TooManyInflightError`.
        """
        self._check(request, info)
        prompt = request.prompt
        if prompt.meta.arrival_s is None:
            meta = replace(prompt.meta, arrival_s=self.clock.now())
            request = replace(request, prompt=replace(prompt, meta=meta))
        live = LiveRequest(self, request, [self._text(request, i) for i in range(request.n)], sink)
        if prompt.params.seed is None:
            live.seed = self._draw(info.seed, request.n)
        return live

    def _draw(self, seed: int, samples: int) -> int:
        """Here rather than in an engine: another one that goes on with the request has to draw as the first did."""
        if self._seeds is None:
            self._seeds = Seeds(seed, self._prefix)
        return self._seeds.draw(samples)

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

    def _text(self, request: GenerateRequest, index: int) -> SequenceText:
        if request.parser is None:
            return SequenceText(index, request.prompt.params, self._tokenizer)
        return ParsedSequenceText(index, request.prompt.params, self._tokenizer, request.parser())

    def wire_id(self) -> str:
        """An engine knows a request by an id that is used once: a cancelled one, or one that has gone elsewhere, may
        still be on its way there and back when its request_id is used again. Short, as it comes back with every token.
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
    """Holds at most one unread chunk per sample, so that a slow reader never delays others.

    `samples`: how many have to end. What was not read when `fail` is called is lost.
    """

    def __init__(self, samples: int) -> None:
        self._open = samples
        self._unread: dict[int, SequenceChunk] = {}
        self._error: RoseinferError | None = None
        self._news = asyncio.Event()

    @property
    def ended(self) -> bool:
        return self._open == 0 or self._error is not None

    def put(self, chunk: SequenceChunk) -> None:
        unread = self._unread.get(chunk.index)
        self._unread[chunk.index] = chunk if unread is None else merge(unread, chunk)
        if chunk.finish_reason is not None:
            self._open -= 1
        self._news.set()

    def fail(self, error: RoseinferError) -> None:
        self._error = error
        self._news.set()

    async def read(self) -> SequenceChunk:
        """Raises the error that the request failed with, and `StopAsyncIteration` after the last chunk."""
        while True:
            if self._error is not None:
                raise self._error
            if self._unread:
                index = next(iter(self._unread))
                return self._unread.pop(index)
            if self.ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()


class ChunkStream:
    """What `Engine.generate` returns."""

    def __init__(self, mailbox: ChunkBuffer, submission: Submission) -> None:
        self._mailbox = mailbox
        self._submission = submission

    @property
    def ended(self) -> bool:
        return self._mailbox.ended

    def __aiter__(self) -> AsyncIterator[SequenceChunk]:
        return self

    async def __anext__(self) -> SequenceChunk:
        return await self._mailbox.read()

    @property
    def route(self) -> Route | None:
        return self._submission.route

    def cancel(self) -> None:
        self._submission.cancel()


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


def resolve_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
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
