"""What the manager and a worker say to each other, and how. Connections go another way: see `handover`."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from roseinfer.cluster.addresses import EngineAddresses
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.processes.frames import FrameReader, frame
from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.request.slo_classes import SloClasses


class WorkerBoot(msgspec.Struct):
    """What a worker is told on its standard input. The last three are descriptors that it inherits.

    `index`: its place among `workers`; `number`: its own among all workers there ever were. `record`: the file of
    what its router decides; `response_file`: where all store responses, None: nowhere.
    """

    config: ServerConfig
    replicas: ReplicasConfig
    slo_classes: SloClasses
    model_name: str
    tokenizer: str
    engines: EngineAddresses
    record: str | None
    response_file: str | None
    max_inflight: int | None
    index: int
    number: int
    workers: int
    control: int
    connections: int
    counters: int


class Serving(msgspec.Struct, tag="serving"):
    """From now on connections can be handed over."""


class Up(msgspec.Struct, tag="up"):
    """The engine is there: requests are taken."""


class Broken(msgspec.Struct, tag="broken"):
    """The worker cannot do its work. `error`: name of a class in `core.errors`, or empty for an unexpected failure."""

    error: str
    message: str


class Drain(msgspec.Struct, tag="drain"):
    """Take no more requests."""


class Idle(msgspec.Struct, tag="idle"):
    """After a `Drain`: no request is left."""


class Stop(msgspec.Struct, tag="stop"):
    """End what is left, and then yourself."""


class Scrape(msgspec.Struct, tag="scrape"):
    """A worker wants what all know together; `own` is what it knows itself."""

    number: int
    own: Snapshot


class Scraped(msgspec.Struct, tag="scraped"):
    number: int
    all: Snapshot


class Collect(msgspec.Struct, tag="collect"):
    """What do you know?"""

    number: int


class Collected(msgspec.Struct, tag="collected"):
    number: int
    own: Snapshot


class Ask(msgspec.Struct, tag="ask"):
    """A worker wants to know what all others know, see `observe.peer_queries`."""

    number: int
    topic: str
    body: bytes


class Answers(msgspec.Struct, tag="answers"):
    """To an `Ask`, of those that know something."""

    number: int
    answers: list[bytes]


class Question(msgspec.Struct, tag="question"):
    """Another worker's, passed on."""

    number: int
    topic: str
    body: bytes


class Answer(msgspec.Struct, tag="answer"):
    """To a `Question`. `body` None: nothing is known."""

    number: int
    body: bytes | None


FromWorker = Serving | Up | Broken | Idle | Scrape | Collected | Ask | Answer
FromManager = Drain | Stop | Scraped | Collect | Answers | Question
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ControlChannel(asyncio.Protocol, Generic[Sent, Received]):
    """One end of the control socket. `lost` is called when the other side is gone."""

    def __init__(self, received: Any, on_message: Callable[[Received], None], on_lost: Callable[[], None]) -> None:
        self._decode = msgspec.msgpack.Decoder(received).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._frames = FrameReader()
        self._on_message = on_message
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._on_message(self._decode(body))

    def send(self, message: Sent) -> None:
        """What goes to somebody who has just ended is lost."""
        if self._transport is not None:
            self._transport.write(frame(self._encode(message)))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
