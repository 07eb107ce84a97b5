"""Worker process: a server like that of a single process, except for the address, the engine and signals."""

import asyncio
import logging
import os
import socket
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvicorn

from roseinfer.cluster.routed import RoutedEngine
from roseinfer.cluster.start import routed_engine
from roseinfer.core.errors import RoseinferError
from roseinfer.integrations.otel.start import traces_to
from roseinfer.processes.channel import MessageChannel
from roseinfer.processes.child import ErrorReport, exit_with_parent, ignore_terminal_signals, read_boot
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.app import ModelParts, parts_of
from roseinfer.server.asgi import LAST_WORDS_S, Server, attach_engine, uvicorn_config
from roseinfer.server.hosting import (
    configure_logging,
    first_of,
    new_event_loop,
    settle_garbage_collector,
    unless_stopped,
)
from roseinfer.server.http.errors import unavailable
from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.workers.counters import WORKER_ROWS, Count
from roseinfer.server.workers.handover import ConnectionReceiver
from roseinfer.server.workers.heartbeat import LoopHeartbeat
from roseinfer.server.workers.messages import (
    CollectedMetrics,
    CollectMetrics,
    DrainWorker,
    ForwardedQuery,
    FromManager,
    FromWorker,
    Idle,
    MetricsReply,
    MetricsRequest,
    PeerAnswers,
    Serving,
    Stop,
    Up,
    WorkerBoot,
    WorkerFailed,
)
from roseinfer.server.workers.queries import WorkerPeerQueries
from roseinfer.server.workers.replies import ManagerRequests
from roseinfer.server.workers.shared_limits import SharedInflight, SharedOccupancy
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger("roseinfer.server.worker")

# A worker whose manager has ended has this long to end by itself.
ORPHAN_TIMEOUT_S = 5.0


class SocketlessServer(Server):
    """uvicorn without a listening socket, which serves accepted connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        self.up.set()

    async def take(self, connection: socket.socket) -> None:
        """Serve an accepted connection."""
        config = self.config
        connection.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            ),
            connection,
            ssl=config.ssl,
        )


class Worker:
    """Server of one worker. Made in its event loop; `run` returns after the manager's `Stop`."""

    def __init__(self, boot: WorkerBoot) -> None:
        self._boot = boot
        self._counters = [SharedRows.open(Path(model.counters), WORKER_ROWS) for model in boot.models]
        self._connections = ConnectionReceiver(socket.socket(fileno=boot.connections))
        self._channel = MessageChannel[FromWorker, FromManager](FromManager, self._on_message, self._on_lost)
        self._stopped = asyncio.Event()
        self._scrapes = ManagerRequests[Snapshot](self._channel.send)
        self._tasks: set[asyncio.Task[None]] = set()
        self._peer_queries = WorkerPeerQueries(self._channel.send)
        parts = parts_of(
            [self._parts(index) for index in range(len(boot.models))],
            self._gather,
            self._peer_queries,
            response_file=None if boot.response_file is None else Path(boot.response_file),
            tracing=traces_to(boot.models[0].config.otlp_endpoint),
        )
        self._models, self._observation = parts.models, parts.observation
        self._server = SocketlessServer(uvicorn_config(parts, self._on_closed))

    def _parts(self, index: int) -> ModelParts:
        boot = self._boot
        shared = {
            "room": SharedOccupancy(self._counters[index], boot.index),
            "share": 1 / boot.workers,
            "slo_classes": boot.slo_classes,
        }
        model = boot.models[index]
        return ModelParts(model.config, model.model_name, shared, model.first_engine)

    async def run(self) -> None:
        heartbeat = LoopHeartbeat(self._counters[0], self._boot.index)
        await self._channel.open(socket.socket(fileno=self._boot.control))
        serving = asyncio.create_task(self._server.serve())
        engines: list[RoutedEngine] = []
        try:
            await first_of(self._server.up.wait(), asyncio.shield(serving))
            asyncio.get_running_loop().add_reader(self._connections.fileno(), self._on_connections)
            self._channel.send(Serving())
            engines = await unless_stopped(self._attach_all(), self._stopped.wait()) or []
            await self._stopped.wait()
            await self._end_requests()
        except RoseinferError as error:
            self._channel.send(WorkerFailed(ErrorReport.of(error)))
            await self._stopped.wait()
        finally:
            self._server.should_exit = True
            await serving
            for engine in engines:
                await engine.close()
            self._channel.close()
            heartbeat.stop()

    async def _attach_all(self) -> list[RoutedEngine]:
        """Connect to the engines of all models, each of which serves as soon as one is up."""
        engines = await asyncio.gather(*map(self._attach, range(len(self._boot.models))))
        settle_garbage_collector()
        self._channel.send(Up(chats=self._models.first.chats))
        return engines

    async def _attach(self, index: int) -> RoutedEngine:
        boot, model, service = self._boot, self._boot.models[index], self._models.services[index]
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, Path(model.tokenizer), model.config.chat_template)
        inflight = SharedInflight(model.max_inflight, self._counters[index], boot.index)
        starting = routed_engine(
            model.engines,
            tokenizer,
            model.replicas,
            inflight,
            prefix=f"{boot.number}-",
            processes=boot.workers,
            record=model.record,
        )
        return await attach_engine(service, tokenizer, starting)

    async def _end_requests(self) -> None:
        ended = await self._models.wind_down(LAST_WORDS_S)
        if ended:
            log.warning("shutting down: %d requests were cut short", ended)

    # --- from the manager ---------------------------------------------------------------------------------------
    def _on_message(self, message: FromManager) -> None:
        if isinstance(message, DrainWorker):
            self._models.begin_drain()
            self._spawn(self._report_idle())
        elif isinstance(message, Stop):
            self._stopped.set()
        elif isinstance(message, CollectMetrics):
            self._channel.send(CollectedMetrics(message.number, self._observation.snapshot()))
        elif isinstance(message, MetricsReply):
            self._scrapes.on_reply(message.number, message.all)
        elif isinstance(message, ForwardedQuery):
            self._peer_queries.on_query(message)
        elif isinstance(message, PeerAnswers):
            self._peer_queries.on_answers(message)

    def _on_lost(self) -> None:
        # Without a `Stop` the manager has died.
        if not self._stopped.is_set():
            os._exit(1)

    async def _report_idle(self) -> None:
        await self._models.idle()
        self._channel.send(Idle())

    async def _gather(self, own: Snapshot) -> Snapshot:
        """Return the metrics of all workers. Raises `ApiError` 503 if the manager does not reply."""
        try:
            return await self._scrapes.ask(lambda number: MetricsRequest(number, own))
        except TimeoutError:
            # Not this worker's alone: counters that go back would look like a restart.
            raise unavailable("metrics_unavailable", "The server's manager does not reply", 1.0) from None

    # --- connections --------------------------------------------------------------------------------------------
    def _on_connections(self) -> None:
        connections, _ = self._connections.receive()
        for connection in connections:
            self._spawn(self._take(connection))

    async def _take(self, connection: socket.socket) -> None:
        try:
            await self._server.take(connection)
        except OSError:  # the client has closed it
            connection.close()
            self._on_closed()

    def _on_closed(self) -> None:
        self._counters[0].add(self._boot.index, Count.CLOSED, 1)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def main() -> int:
    """Read a `WorkerBoot`, then serve until the manager stops this worker or ends."""
    ignore_terminal_signals()
    boot = read_boot(WorkerBoot)
    configure_logging(boot.models[0].config)
    exit_with_parent(ORPHAN_TIMEOUT_S)

    async def work() -> None:
        await Worker(boot).run()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
