"""Tells by ZeroMQ, in vLLM's format, which KV blocks an engine holds: once a step, and again to those who ask.

The format is that of vLLM's `distributed/kv_events.py`: three frames, the topic, a sequence number of 8 bytes, and
msgpack `[seconds since 1970, events, rank]`, each event a map with its `type`. A block's hash is the last 64 bits of
its key. Nothing here ever waits: what a subscriber does not take in time it loses, and sees so by the numbers.
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
from roseinfer.kv.events import BlockRemoved as Removed
from roseinfer.kv.events import KvEvent, KvEvents

log = logging.getLogger("roseinfer.engine")

SEQUENCE_BYTES = 8
END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
LARGEST_QUESTION = 4096  # bytes; a topic too
# An engine whose owner was killed ends within seconds, and has its ports until then.
TAKEN_PATIENCE_S, TRY_AGAIN_S = 8.0, 0.1


class BlockStored(msgspec.Struct, tag=True):
    """Blocks of one prefix, one behind the other; `token_ids` are theirs."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: str
    lora_id: None = None
    lora_name: None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


def wire_events(events: Iterable[KvEvent]) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
    """The events in their order; those of neighbours in one."""
    told: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
    for event in events:
        last, name = told[-1] if told else None, _hash(event.key)
        if isinstance(event, Removed):
            if isinstance(last, BlockRemoved) and last.medium == event.medium:
                last.block_hashes.append(name)
            else:
                told.append(BlockRemoved([name], event.medium))
            continue
        parent = None if event.parent is None else _hash(event.parent)
        if isinstance(last, BlockStored) and last.medium == event.medium and last.block_hashes[-1] == parent:
            last.block_hashes.append(name)
            last.token_ids.extend(event.tokens)
        else:
            told.append(BlockStored([name], parent, list(event.tokens), len(event.tokens), event.medium))
    return told


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


class KvEventsPublisher:
    """Publishes what `events` has collected with each `flush`. One thread calls; another one answers questions.

    Raises `ConfigError` if ZeroMQ is missing, `ResourceError` if an address cannot be had; one that somebody else has
    is waited for some seconds.
    """

    def __init__(self, config: KvEventsConfig, model: str) -> None:
        endpoint = config.endpoint
        assert endpoint is not None, "nobody asked for KV events"
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
            self._questions = None
            if config.replay_endpoint is not None:
                self._questions = self._bind(
                    self._zmq.ROUTER, config.replay_endpoint, config.kv_events_buffer_steps + 1
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        if self._questions is not None:
            threading.Thread(target=self._answer, name="kv-events-replay", daemon=True).start()

    def _bind(self, kind: int, endpoint: str, queued: int) -> Any:
        zmq = self._zmq
        made = self._context.socket(kind)
        made.set(zmq.LINGER, 0)
        made.set(zmq.SNDHWM, queued)
        made.set(zmq.MAXMSGSIZE, LARGEST_QUESTION)
        made.set(zmq.IPV6, "[" in endpoint)
        until_s = time.monotonic() + TAKEN_PATIENCE_S
        while True:
            try:
                made.bind(endpoint)
                break
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or time.monotonic() > until_s:
                    raise ResourceError(f"KV events cannot be published at {endpoint}: {error.strerror}") from error
                time.sleep(TRY_AGAIN_S)
        log.info("KV events: %s at %s", "replay" if kind == zmq.ROUTER else "published", endpoint)
        return made

    def clear(self) -> None:
        """Tell that nothing is held: what another engine at this address has told is void."""
        self._send([AllBlocksCleared()])

    def flush(self) -> None:
        """Publish what has changed since the last call."""
        events = self.events.take()
        if events:
            self._send(wire_events(events))

    def _send(self, events: list[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        payload = self._encode(Batch(time.time(), events, self._rank))
        with self._lock:
            self._sent.append((self._sequence, payload))
        self._socket.send_multipart((self._topic, _number(self._sequence), payload))
        self._sequence += 1

    def close(self) -> None:
        """Subscribers get no more; returns when the addresses are free."""
        self._socket.close()
        self._context.term()  # ends the other thread, which closes its own socket

    def _answer(self) -> None:
        """Answer each question `[b"", sequence]` by all that is kept from there on, as it was published, and an end,
        until closed.
        """
        assert self._questions is not None
        try:
            while True:
                asker, *question = self._questions.recv_multipart()
                if len(question) == 2 and not question[0] and len(question[1]) == SEQUENCE_BYTES:
                    self._replay(asker, int.from_bytes(question[1], "big"))
        except self._zmq.ContextTerminated:
            pass
        finally:
            self._questions.close()

    def _replay(self, asker: bytes, first: int) -> None:
        assert self._questions is not None
        with self._lock:
            kept = [each for each in self._sent if each[0] >= first]
        for sequence, payload in kept:
            self._questions.send_multipart((asker, b"", self._topic, _number(sequence), payload))
        self._questions.send_multipart((asker, b"", b"", END_OF_REPLAY, b""))


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise ConfigError("kv_events_endpoint needs ZeroMQ: pip install 'roseinfer[kv-events]'") from error
    return zmq
