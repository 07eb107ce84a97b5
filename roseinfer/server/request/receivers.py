"""What takes the chunks of a job: a streamed answer, which writes them as the connection takes them, or a whole one.

What they look like on the wire is the business of the answer's format: an `Encoder` or a `Body`.
"""

import asyncio
from collections.abc import Sized
from typing import Any, Protocol

from starlette.types import Send

from roseinfer.engine.api import SequenceChunk
from roseinfer.server.http.connection import ClientConnection
from roseinfer.server.http.errors import ApiError
from roseinfer.server.request.generation import Receiver
from roseinfer.server.request.job import Usage
from roseinfer.server.text_work.offload import Offload

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would hold tokens back.
    (b"x-accel-buffering", b"no"),
]


class Encoder(Protocol):
    """Chunks of a job as the bytes of a stream. `add` each; what is then `due` is `taken` and `encode`d, in order.

    `filler`: what may be written between any two events, once there was one, and means nothing.
    """

    filler: bytes

    @property
    def due(self) -> Sized:
        """What has something to say; empty if nothing has. Asked once a token."""
        ...

    def plain(self, prompt: int, chunk: SequenceChunk) -> bytes | None:
        """What a chunk that brings nothing but text is at once, while nothing is due; None: `add` it."""
        ...

    def add(self, prompt: int, chunk: SequenceChunk) -> bool:
        """Whether the chunk made something due."""
        ...

    def take(self) -> Any:
        """What is due, which then is not any more. In the event loop's thread."""
        ...

    def encode(self, taken: Any) -> bytes:
        """In any thread."""
        ...

    def idle(self) -> bytes:
        """What tells the client of a stream, whether it has begun or not, that it is not forgotten."""
        ...

    def tail(self, usage: Usage) -> bytes:
        """The end of a stream in which every choice has finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last words of a stream that failed."""
        ...


class Body(Protocol):
    """Chunks of a job as an answer in one piece."""

    def add(self, prompt: int, chunk: SequenceChunk) -> None: ...

    def body(self, usage: Usage) -> dict[str, Any]:
        """When every choice has finished. In any thread."""
        ...


class WholeAnswer:
    """A `Receiver` that gathers chunks in a `Body` until all are there."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._ended = asyncio.Event()
        self._error: Exception | None = None

    def put(self, prompt: int, chunk: SequenceChunk) -> None:
        self._body.add(prompt, chunk)

    def end(self, error: Exception | None) -> None:
        self._error = error
        self._ended.set()

    async def complete(self) -> None:
        """Raises the error that the generation ends with."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error


class EventStream:
    """The head, held back until there is something to say, the body, and its end, proper or hard. `filler`: what may
    stand between two writes.
    """

    def __init__(self, send: Send, wire: ClientConnection, filler: bytes) -> None:
        self._send = send
        self._wire = wire
        self._filler = filler
        self.started = False

    async def write(self, data: bytes, last: bool = False) -> None:
        """Waits while the client is slow to take what it was sent."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._wire.filler = self._filler
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    @property
    def open(self) -> bool:
        """Whether `write_now` may be called: the head is out, and the client keeps up."""
        return self.started and not self._wire.write_paused

    def write_now(self, data: bytes) -> None:
        self._wire.write(data)

    async def close(self, data: bytes) -> None:
        """The proper end."""
        await self.write(data, last=True)

    async def fail(self, data: bytes) -> None:
        """Last words, if the client takes anything, and no end: the server cuts a response that its application left
        unfinished.
        """
        if not self._wire.write_paused:
            await self.write(data)


class StreamAnswer:
    """A `Receiver` whose chunks are written by whoever brings them, as long as `run`, the request's own task, has
    nothing to do but to wait: a task that woke for each token would cost as much again as the token.

    The task writes what begins and ends the stream, and what the client was too slow to take: then each choice gathers
    its chunks until there is room. `keep_alive_s`: seconds between comments on an idle stream, 0 = none. `offload`:
    where events are encoded if that is much work, None if it is not. `refusable`: until it has begun it may still be
    refused, and a comment would have said 200.
    """

    def __init__(
        self,
        encoder: Encoder,
        events: EventStream,
        keep_alive_s: float,
        offload: Offload | None,
        refusable: bool = False,
    ) -> None:
        self._encoder = encoder
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._offload = offload
        self._refusable = refusable
        self._news = asyncio.Event()
        self._waiting = False
        self._idle = True
        self._comment_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._ended = False
        self._error: Exception | None = None

    def put(self, prompt: int, chunk: SequenceChunk) -> None:
        encoder = self._encoder
        at_once = self._waiting and not encoder.due and self._events.open
        event = encoder.plain(prompt, chunk) if at_once else None
        if event is None:
            if not encoder.add(prompt, chunk):
                return
            if not at_once or chunk.finish_reason is not None:
                self._news.set()
                return
            event = encoder.encode(encoder.take())
            if not event:  # of some formats not every token is an event
                return
        self._events.write_now(event)
        self._idle = False

    def end(self, error: Exception | None) -> None:
        self._ended = True
        self._error = error
        self._news.set()

    async def run(self) -> bytes:
        """Writes all but the last events, which are returned. Raises the error that the stream ends with."""
        self._set_timer()
        try:
            while True:
                await self._next_news()
                if self._error is not None:
                    raise self._error
                data = await self._take_due()
                if self._ended and self._error is None and not self._encoder.due:
                    return data
                if self._comment_due and not data:
                    data = self._encoder.idle()
                self._comment_due = False
                if data:
                    self._idle = False
                    await self._events.write(data)
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def _next_news(self) -> None:
        self._waiting = self._offload is None
        await self._news.wait()
        self._waiting = False
        self._news.clear()

    async def _take_due(self) -> bytes:
        if not self._encoder.due:
            return b""
        taken = self._encoder.take()
        if self._offload is not None:
            return await self._offload.run(self._encoder.encode, taken)
        return self._encoder.encode(taken)

    # --- comments on an idle stream -----------------------------------------------------------------------------
    def _set_timer(self) -> None:
        if self._keep_alive_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._keep_alive_s, self._on_timer)

    def _on_timer(self) -> None:
        if self._idle and (self._events.started or not self._refusable):
            self._comment_due = True
            self._news.set()
        self._idle = True
        self._set_timer()


class AllBegun:
    """A `Receiver` that passes nothing on until every prompt has its first chunk: until then, one of them may be
    turned away, and the request with it.
    """

    def __init__(self, receiver: Receiver, prompts: int) -> None:
        self._receiver = receiver
        self._left = set(range(prompts))
        self._held: list[tuple[int, SequenceChunk]] = []

    def put(self, prompt: int, chunk: SequenceChunk) -> None:
        if not self._left:
            self._receiver.put(prompt, chunk)
            return
        self._held.append((prompt, chunk))
        if chunk.num_output_tokens or chunk.finish_reason is not None:
            self._left.discard(prompt)
        if not self._left:
            held, self._held = self._held, []
            for earlier in held:
                self._receiver.put(*earlier)

    def end(self, error: Exception | None) -> None:
        self._receiver.end(error)
