"""Receivers of a job's chunks: a streamed answer and a whole one. `Encoder` and `Body` define their format."""

import asyncio
from collections.abc import Callable, Sized
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
    # Tells proxies not to buffer tokens.
    (b"x-accel-buffering", b"no"),
]


class Encoder(Protocol):
    """Encoder of chunks into the bytes of a stream: `add` each chunk, then `take` and `encode` what is `due`, in order.

    `filler`: bytes without meaning that may be written between any two events.
    """

    filler: bytes

    @property
    def due(self) -> Sized:
        """Choices with news. Read once per token."""
        ...

    def plain(self, prompt: int, chunk: SequenceChunk) -> bytes | None:
        """Encode a chunk of text alone while nothing is due; None: use `add`."""
        ...

    def add(self, prompt: int, chunk: SequenceChunk) -> bool:
        """Add a chunk; return True if it made something due."""
        ...

    def take(self) -> Any:
        """Return and clear what is due. Call in the event loop's thread."""
        ...

    def encode(self, taken: Any) -> bytes:
        """Encode what `take` returned. Safe in any thread."""
        ...

    def idle(self) -> bytes:
        """Return a keep-alive for an idle stream, begun or not."""
        ...

    def tail(self, usage: Usage) -> bytes:
        """Return the end of a stream in which every choice has finished."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        ...


class Body(Protocol):
    """Builder of a non-streamed answer."""

    @property
    def takes_long(self) -> bool:
        """True if `body` takes too long for the event loop."""
        ...

    def add(self, prompt: int, chunk: SequenceChunk) -> None: ...

    def body(self, usage: Usage) -> dict[str, Any] | bytes:
        """Return the answer after every choice has finished, perhaps encoded. Safe in any thread."""
        ...


class WholeAnswer:
    """Receiver that gathers chunks in a `Body`."""

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
        """Wait for the end of the generation. Raises its error."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error


class EventStream:
    """Event stream on a connection. The HTTP head is sent with the first event. `filler`: see `Encoder`."""

    def __init__(self, send: Send, wire: ClientConnection, filler: bytes) -> None:
        self._send = send
        self._wire = wire
        self._filler = filler
        self.started = False
        # Writes an event at once if `open`. Called once per token, so no method in between.
        self.write_now = wire.write

    async def write(self, data: bytes, last: bool = False) -> None:
        """Write, and wait while the client reads slowly. `last`: end the answer."""
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._wire.filler = self._filler
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    @property
    def open(self) -> bool:
        """True if `write_now` may be called: the head is sent and the client keeps up."""
        return self.started and not self._wire.write_paused

    async def fail(self, data: bytes) -> None:
        """Write a last event without an end, unless the client reads slowly. The server then cuts the connection."""
        if not self._wire.write_paused:
            await self.write(data)


class StreamAnswer:
    """Receiver that writes chunks directly from `put` while `run`, the request's task, only waits.

    Waking the task for each token would double the token's cost. The task writes the first and last events, and
    gathered chunks after the client was slow.

    `keep_alive_s`: seconds between comments on an idle stream, 0 = none. `offload`: threads for expensive encoding, or
    None. `refusable`: a rejection is still possible before the first event, so no comment may send status 200.
    `on_end`: called at the end of the generation.
    """

    def __init__(
        self,
        encoder: Encoder,
        events: EventStream,
        keep_alive_s: float,
        offload: Offload | None,
        refusable: bool = False,
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._encoder = encoder
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._offload = offload
        self._refusable = refusable
        self._on_end = on_end
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
            if not event:  # some formats have no event for some tokens
                return
        self._events.write_now(event)
        self._idle = False

    def end(self, error: Exception | None) -> None:
        if self._on_end is not None:
            self._on_end()
        self._ended = True
        self._error = error
        self._news.set()

    async def run(self) -> bytes:
        """Write all but the last events, and return these. Raises the error that ends the stream."""
        self._set_timer()
        try:
            while True:
                self._waiting = self._offload is None
                await self._news.wait()
                self._waiting = False
                self._news.clear()
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
    """Receiver that holds chunks back until every prompt has begun: until then the whole request may be rejected."""

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
