"""Messages about a console's feed between processes of a server."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from roseinfer.server.console.steps import NewSteps
from roseinfer.server.observe.metric_registry import Numbers
from roseinfer.server.observe.peer_queries import PeerQueries

TOPIC = "console"


class Position(msgspec.Struct, array_like=True):
    """Position of a console: steps seen, and ended requests seen of each `source`. `live`: include running requests."""

    steps: int = 0
    ended: dict[int, int] = {}
    live: bool = True


class EngineUpdates(msgspec.Struct, array_like=True):
    """Updates from the owner of the engines."""

    engines: list[dict[str, Any]]
    steps: NewSteps


class RequestUpdate(NamedTuple):
    """Record of a request as JSON."""

    live: bool
    record: bytes


class Updates(msgspec.Struct, array_like=True):
    """Updates from one process.

    `requests`: ended ones, newest first, then running ones. `ended`: all requests that ended so far in `source`;
    `dropped`: new ones that are not in `requests`. `routed`: routing metrics, None with one engine.
    """

    engines: EngineUpdates | None = None
    requests: list[RequestUpdate] = []
    source: int = 0
    ended: int = 0
    dropped: int = 0
    routed: Numbers | None = None
    breakers: list[int] = []


encode = msgspec.msgpack.Encoder().encode
decode_position = msgspec.msgpack.Decoder(Position).decode
decode_updates = msgspec.msgpack.Decoder(Updates).decode


def answer_queries(peer_queries: PeerQueries, updates: Callable[[Position], Updates]) -> None:
    """Answer queries of other processes with `updates`."""
    peer_queries.on(TOPIC, lambda body: encode(updates(decode_position(body))))
