"""Engines with the fake runner behind real sockets, in threads of the test: several clients share them."""

import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.core.adapters import AdapterPool
from roseinfer.core.clock import MonotonicClock
from roseinfer.engine.adapters import AdapterRegistry
from roseinfer.engine.live import InflightLimit, LiveRequests
from roseinfer.engine.loop import EngineLoop
from roseinfer.engine.messages import Ready
from roseinfer.engine.sockets import ClientSockets
from roseinfer.engine.transport import UnixSocketTransport
from roseinfer.sched.adapters import AdapterSlots
from tests.helpers.engine_info import engine_info
from tests.helpers.engines import make_core
from tests.helpers.routed_fleet import NO_BOARD
from tests.helpers.tokenizers import byte_tokenizer

POOL = AdapterPool(num_slots=8, max_rank=64, slot_bytes=1000, load_bytes_per_s=1e9)
HOST_BYTES = 10**6


class SocketEngine:
    """Engine at `path`. Its owner is a connection of the test; `die` closes it and leaves nothing."""

    def __init__(self, path: Path, adapters: AdapterRegistry | None) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        self._owner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._owner.connect(str(path))
        self._clients = ClientSockets(listener)
        slots = None if adapters is None else AdapterSlots(POOL, adapters, HOST_BYTES)
        self._core = make_core(num_blocks=64, block_size=4, vocab_size=256, adapters=slots, registry=adapters)
        info = engine_info(adapters=None if adapters is None else POOL)
        if adapters is not None:
            info = replace(info, adapters=tuple(adapters.names.adapters.values()))
        self._clients.greet(Ready(info))
        self._thread = threading.Thread(target=self._run, name="socket-engine")
        self._thread.start()

    def _run(self) -> None:
        EngineLoop(self._core, self._clients, self._clients, MonotonicClock()).run()
        self._clients.close(0.0)

    def die(self) -> None:
        self._owner.close()
        self._thread.join()


async def client_of(engines: Sequence[SocketEngine], prefix: str) -> RoutedEngine:
    """Return a client of these engines, once one is connected. `prefix`: unique among the clients."""
    requests = LiveRequests(byte_tokenizer(), MonotonicClock(), InflightLimit(), prefix)
    connectors = [Connector(partial(UnixSocketTransport, engine.path), NO_BOARD) for engine in engines]
    client = RoutedEngine(connectors, requests, RouterSetup(name="round-robin"))
    await client.open()
    return client
