"""Publish by ZeroMQ, in vLLM's format, which KV blocks an engine holds: once a step, and again on request.

The format is that of vLLM's `distributed/kv_events.py`: three frames, the topic, a sequence number of 8 bytes, and
msgpack `[seconds since 1970, events, rank]`, each event a map with its `type`. A block's hash is the last 64 bits of
its key. Nothing here waits: a subscriber that is too slow loses messages, and sees so by the numbers.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from roseinfer.core.config.kv_events import KvEventsConfig
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.core.extras import install_command
from roseinfer.kv.events import BlockRemoved, KvEvent, KvEvents

log = logging.getLogger("roseinfer.engine")

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
MAX_REQUEST_BYTES = 4096  # of replay requests and of topics
# An engine whose owner was killed ends within seconds, and keeps its ports until then.
BIND_TIMEOUT_S, BIND_RETRY_S = 8.0, 0.1


class StoredBlocks(msgspec.Struct, tag="BlockStored"):
    """Consecutive blocks of one prefix, with their tokens."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str
    lora_id: None = None
    lora_name: None = None


class RemovedBlocks(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StoredBlocks | RemovedBlocks | AllBlocksCleared]
    data_parallel_rank: int


def wire_events(events: Iterable[KvEvent]) -> list[StoredBlocks | RemovedBlocks | AllBlocksCleared]:
    """Convert events in their order; join those of consecutive blocks."""
    joined: list[StoredBlocks | RemovedBlocks | AllBlocksCleared] = []
    for event in events:
        last, name = joined[-1] if joined else None, _hash(event.key)
        if isinstance(event, BlockRemoved):
            if isinstance(last, RemovedBlocks) and last.medium == event.medium:
                last.block_hashes.append(name)
            else:
                joined.append(RemovedBlocks([name], event.medium))
            continue
        parent = None if event.parent is None else _hash(event.parent)
        if isinstance(last, StoredBlocks) and last.medium == event.medium and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(event.tokens)
        else:
            joined.append(StoredBlocks([name], parent, list(event.tokens), len(event.tokens), event.medium))
    return joined


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


class KvEventsPublisher:
    """Publish what `events` has collected with each `flush`. One thread calls it; another one answers replay requests.

    Raise `ConfigError` if ZeroMQ is missing. Raise `ResourceError` if an address cannot be used, after some seconds if
    another process uses it.
    """

    def __init__(self, config: KvEventsConfig, model: str) -> None:
        endpoint = config.endpoint
        assert endpoint is not None, "KV events are enabled"
        self.events = KvEvents()
        self._zmq = _zmq()
        self._rank = config.rank
        self._topic = config.topic(model).encode()
        self._sequence = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.kv_events_buffer_steps)
        self._lock = threading.Lock()  # of `_sent`
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = self._zmq.Context()
        try:
            self._socket = self._bind(self._zmq.PUB, endpoint, config.kv_events_buffer_steps)
            self._replay_socket = None
            if config.replay_endpoint is not None:
                self._replay_socket = self._bind(
                    self._zmq.ROUTER, config.replay_endpoint, config.kv_events_buffer_steps + 1
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if self._replay_socket is not None:
            threading.Thread(target=self._answer, name="kv-events-replay", daemon=True).start()

    def _bind(self, kind: int, endpoint: str, queued: int) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.SNDHWM, queued)
        made.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        made.set(zmq.IPV6, "[" in endpoint)
        until_s = time.monotonic() + BIND_TIMEOUT_S
        while True:
            try:
                made.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > until_s:
                    raise ResourceError(f"cannot publish KV events at {endpoint}: {error.strerror}") from error
                time.sleep(BIND_RETRY_S)
        log.info("KV events: %s at %s", "replay" if kind == zmq.ROUTER else "published", endpoint)
        return made

    def clear(self) -> None:
        """Publish that no block is held, so that events of the previous engine at this address are void."""
        self._send([AllBlocksCleared()])

    def flush(self) -> None:
        """Publish the changes since the last call."""
        events = self.events.take()
        if events:
            self._send(wire_events(events))

    def _send(self, events: list[StoredBlocks | RemovedBlocks | AllBlocksCleared]) -> None:
        payload = self._encode(Batch(time.time(), events, self._rank))
        with self._lock:
            self._sent.append((self._sequence, payload))
        self._socket.send_multipart((self._topic, _number(self._sequence), payload))
        self._sequence += 1

    def close(self) -> None:
        """Stop publishing, and return when the addresses are free."""
        self._socket.close()
        self._context.term()  # ends the other thread, which closes its own socket

    def _answer(self) -> None:
        """Answer each request `[b"", sequence]` with the kept messages from there on and an end mark, until closed."""
        assert self._replay_socket is not None
        try:
            while True:
                client, *request = self._replay_socket.recv_multipart()
                if len(request) == 2 and not request[0] and len(request[1]) == SEQUENCE_BYTES:
                    self._replay(client, int.from_bytes(request[1], "big"))
        except self._zmq.ContextTerminated:
            pass
        finally:
            self._replay_socket.close()

    def _replay(self, client: bytes, first: int) -> None:
        assert self._replay_socket is not None
        with self._lock:
            kept = [each for each in self._sent if each[0] >= first]
        for sequence, payload in kept:
            self._replay_socket.send_multipart((client, b"", self._topic, _number(sequence), payload))
        self._replay_socket.send_multipart((client, b"", b"", END_OF_REPLAY, b""))


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ConfigError(f"kv_events_endpoint needs ZeroMQ: {install_command('kv-events')}") from error
    return zmq
