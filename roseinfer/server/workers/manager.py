"""Manager of a server in several processes: it owns the address, the engines and the workers."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from roseinfer.cluster.models import ModelSupervisors
from roseinfer.cluster.start import router_record
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.models import ServedModelConfig, all_names
from roseinfer.core.recorder import file_after_restart
from roseinfer.engine.api import EngineInfo
from roseinfer.integrations.systemd import SystemdNotifier
from roseinfer.processes.shared_rows import SharedRows
from roseinfer.server.console.engines import answer_engine_queries
from roseinfer.server.console.steps import MAX_STEPS
from roseinfer.server.hosting import (
    Reload,
    Signals,
    configure_logging,
    end_of,
    first_of,
    greeting,
    listen,
    say,
    unless_stopped,
)
from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.observe.metric_registry import MetricRegistry
from roseinfer.server.observe.model_names import ModelNames
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.step_metrics import StepMetrics
from roseinfer.server.request.slo_classes import configured_classes
from roseinfer.server.response_store.start import response_file
from roseinfer.server.workers.acceptor import Acceptor
from roseinfer.server.workers.counters import WORKER_ROWS, Count
from roseinfer.server.workers.launch import WorkerProcess, launch_worker
from roseinfer.server.workers.messages import (
    CollectedMetrics,
    FromWorker,
    MetricsRequest,
    PeerQuery,
    QueryAnswer,
    WorkerBoot,
    WorkerModel,
)
from roseinfer.server.workers.pool import WorkerPool
from roseinfer.server.workers.queries import QueryForwarder
from roseinfer.server.workers.scrapes import ScrapeCollector

log = logging.getLogger(__name__)


async def serve_with_workers(models: Sequence[ServedModelConfig], workers: int) -> None:
    """Serve as `run.serve_models` does, with `workers` processes that answer requests.

    Raises what `run.serve_models` raises, and `WorkersDiedError` if they cannot be kept alive.
    """
    configure_logging(models[0].server)
    await ServerManager(models, workers).run()


class ServerManager:
    """Manager of one server. Made in its event loop; `run` returns at the end of the server."""

    def __init__(self, models: Sequence[ServedModelConfig], workers: int) -> None:
        self._models = models
        self._workers = workers
        self._config = config = models[0].server
        # Read once, as the file may change.
        self._slo_classes = configured_classes(config, all_names(models))
        self._listener = listen(config)
        stored = response_file(config, None)  # before the supervisor's folder, which a failure would leave
        self._supervisor = ModelSupervisors.of(models)
        self._response_file = stored or response_file(config, self._supervisor.folder)
        self._counters_paths = [self._supervisor.folder / f"counters{index}" for index in range(len(models))]
        # One file per model. The first also has what counts for the whole worker.
        self._counters = [SharedRows.create(path, WORKER_ROWS, workers) for path in self._counters_paths]
        self._acceptor = Acceptor(self._listener, self._counters[0])
        self._registry = MetricRegistry()
        self._scrapes = ScrapeCollector(self._own_snapshot)
        self._peer_queries = PeerQueries()
        self._queries = QueryForwarder(self._peer_queries)
        names = ModelNames(models[0].name)
        for model in models[1:]:
            names.add(model.name, model.first_engine)
        self._steps = StepMetrics(self._registry, names, MAX_STEPS if config.console else 0)
        answer_engine_queries(self._peer_queries, self._steps, self._supervisor.reports, names)
        self._pool = WorkerPool(
            workers,
            partial(launch_worker, self._boot),
            self,
            self._restarts_enabled,
            self._counters[0],
            config.worker_timeout,
            MonotonicClock(),
        )
        self._service_manager = SystemdNotifier()
        self._signals = Signals(Reload(self._supervisor.rolling_restart, self._service_manager))
        self._ending = False

    async def run(self) -> None:
        self._signals.install()
        self._supervisor.on_step(self._steps.step)
        failures = (self._pool.failure, self._supervisor.failure)
        try:
            # A worker that fails sets the pool's failure, which is raised below.
            info = await unless_stopped(self._start(), self._signals.first.wait(), end_of(self._pool.failure))
            if info is not None:
                chats = any(worker.chats for worker in self._pool.workers.values())
                names = [model.name for model in self._models]
                words = greeting(self._config, names, self._listener, info, chats=chats)
                say(words)
                self._service_manager.ready(words.partition(";")[0])
                await first_of(self._signals.first.wait(), *map(end_of, failures))
                self._service_manager.stopping()
                await self._drain()
        finally:
            self._service_manager.close()
            await self._end()
            for failure in failures:
                if failure.done():
                    failure.result()

    async def _start(self) -> EngineInfo:
        """Start engines and workers. Raises the error of an engine that cannot start."""
        indices = range(len(self._models))
        await asyncio.gather(*map(self._supervisor.launch, indices))
        # The workers load their tokenizers while the engines load the model.
        starting = asyncio.create_task(self._pool.start())
        try:
            infos = await asyncio.gather(*map(self._supervisor.connect, indices))
            await starting
            return infos[0]
        finally:
            starting.cancel()

    async def _drain(self) -> None:
        """Reject new requests, and let running ones finish for `shutdown_timeout` seconds."""
        self._ending = True
        self._pool.drain()
        requests = sum(counters.total(Count.REQUESTS) for counters in self._counters)
        wait_s = self._config.shutdown_timeout
        if requests:
            log.info("shutting down: %d requests may finish within %g s", requests, wait_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await first_of(self._pool.idle(), self._signals.second.wait())

    async def _end(self) -> None:
        self._ending = True
        self._acceptor.close()
        await self._pool.stop()
        await self._supervisor.close()
        for counters in self._counters:
            counters.close()

    # --- workers ------------------------------------------------------------------------------------------------
    def _boot(self, index: int, number: int, control: int, connections: int) -> WorkerBoot:
        return WorkerBoot(
            models=[self._model(at, number) for at in range(len(self._models))],
            slo_classes=self._slo_classes,
            response_file=None if self._response_file is None else str(self._response_file),
            index=index,
            number=number,
            workers=self._workers,
            control=control,
            connections=connections,
        )

    def _model(self, index: int, number: int) -> WorkerModel:
        model = self._models[index]
        record = router_record(model.engine, number)
        return WorkerModel(
            config=model.server,
            replicas=model.replicas,
            model_name=model.model_name,
            tokenizer=model.tokenizer,
            engines=self._supervisor.supervisors[index].engine_addresses,
            first_engine=model.first_engine,
            record=file_after_restart(record) if number > self._workers else record,
            max_inflight=model.engine.scheduler.max_inflight_requests,
            counters=str(self._counters_paths[index]),
        )

    def _restarts_enabled(self) -> bool:
        return not self._ending

    def on_serving(self, worker: WorkerProcess) -> None:
        self._acceptor.add(worker, loading=True)

    def on_up(self, worker: WorkerProcess) -> None:
        self._acceptor.set_loaded(worker)

    def on_late(self, worker: WorkerProcess) -> None:
        self._acceptor.set_late(worker, worker.late)

    def on_message(self, worker: WorkerProcess, message: FromWorker) -> None:
        if isinstance(message, MetricsRequest):
            self._scrapes.start(worker, message, self._others(worker))
        elif isinstance(message, CollectedMetrics):
            self._scrapes.on_collected(worker, message)
        elif isinstance(message, PeerQuery):
            self._queries.start(worker, message, self._others(worker))
        elif isinstance(message, QueryAnswer):
            self._queries.on_answer(worker, message)

    def _others(self, worker: WorkerProcess) -> list[WorkerProcess]:
        return [other for other in self._pool.workers.values() if other is not worker and other.up and not other.late]

    def on_end(self, worker: WorkerProcess) -> None:
        self._acceptor.remove(worker)
        self._scrapes.on_end(worker)
        self._queries.on_end(worker)
        for counters in self._counters:
            counters.clear(worker.index)

    def _own_snapshot(self) -> Snapshot:
        return Snapshot(self._registry.numbers(), self._supervisor.reports())
