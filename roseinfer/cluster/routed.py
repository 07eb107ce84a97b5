"""One or several engines as one: each request goes to the engine that can best meet its objectives.

All output that a reader has seen is in this process, so a request survives its engine. Without output it starts again
on another one, with the same seed and age. With output, the other engine recomputes its tokens and continues.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from roseinfer.cluster.adapters import FleetAdapters
from roseinfer.cluster.dispatch import Dispatcher, NullRoutingObserver, RequestDispatcher, SingleDispatcher
from roseinfer.cluster.displaced import SETTLE_S
from roseinfer.cluster.endpoint import Connector, Endpoint
from roseinfer.cluster.endpoints import Endpoints, incompatibility, unavailable_error
from roseinfer.cluster.engine_rows import EngineRows
from roseinfer.core.adapters import Adapter
from roseinfer.core.config.replicas import DEFAULT_ROUTER
from roseinfer.core.errors import EngineClosedError, RoseinferError
from roseinfer.core.outputs import SchedulerStats
from roseinfer.core.slo import Rejection
from roseinfer.engine.adapter_names import AdapterEntry
from roseinfer.engine.api import (
    EngineHealth,
    EngineInfo,
    EngineReport,
    GenerateRequest,
    RoutingObserver,
    Sink,
    StepRecord,
)
from roseinfer.engine.client import AsyncEngine
from roseinfer.engine.live import ChunkBuffer, ChunkStream, LiveRequest, LiveRequests
from roseinfer.engine.transport import Transport, UnixSocketTransport
from roseinfer.router.placer import Placer
from roseinfer.router.record import RecordingPlacer
from roseinfer.router.registry import PREFIX_AWARE

log = logging.getLogger(__name__)

# Period of checks for draining and quiet engines, and how long a start waits for further engines after the first.
TICK_S = 0.1
OTHERS_START_TIMEOUT_S = 0.5
# Seconds until an engine has read a request, about.
SEND_DELAY_S = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSetup:
    """Choice among several engines. `processes`: clients that share the engines. `record`: file of the decisions."""

    name: str = DEFAULT_ROUTER
    processes: int = 1
    record: Path | None = None
    seed: int | None = None


class RoutedEngine:
    """Implementation of `engine.api.Engine` over one or several engines, and the `FailoverHandler` of their clients.

    Made by `RoutedEngine.start`, or by `start_from_directory` if engines may be added later. Belongs to one event loop.
    """

    def __init__(
        self,
        connectors: Sequence[Connector],
        requests: LiveRequests,
        router: RouterSetup,
        *,
        dynamic: bool = False,
        first: int = 0,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        """Add the initial engines of `connectors`, numbered from `first` on.

        `dynamic`: engines with other configurations may be added later, so compatibility is checked. `on_close`: called
        at the end of `close`.
        """
        self.info: EngineInfo
        self.several = dynamic or len(connectors) > 1
        self._dynamic = dynamic
        self._requests = requests
        self._clock = requests.clock
        self.endpoints = Endpoints(self._clock)
        self._adapters = FleetAdapters(self.endpoints)
        self._router = router
        self.placer: Placer | None = None  # with several engines, once one is up
        self._observer: RoutingObserver = NullRoutingObserver()
        # With several engines, a `Dispatcher` replaces it once one is up.
        self._dispatcher: RequestDispatcher = SingleDispatcher(self.endpoints, requests)
        self._has_info = False
        self._connect_tasks: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._first_up: asyncio.Future[None] | None = None  # once it is open
        self._on_close = on_close
        self._closed = False
        for connector in connectors:
            self._add_endpoint(self.endpoints.number(first), connector)

    @classmethod
    async def start(
        cls,
        addresses: Sequence[Path],
        rows_path: Path,
        requests: LiveRequests,
        router: RouterSetup,
        first: int = 0,
    ) -> "RoutedEngine":
        """Connect to engines of another owner, and return once one is up.

        There is no timeout: the owner reports failures. Raise `ResourceError` if the shared memory cannot be read, and
        `ConfigError` if the file of the router's decisions cannot be written. `first`: number of the first engine.
        """
        rows = EngineRows.open(rows_path)
        connectors = [Connector(partial(UnixSocketTransport, address), rows) for address in addresses]
        engine = cls(connectors, requests, router, first=first, on_close=rows.close)
        await engine.open()
        return engine

    async def open(self) -> None:
        """Return once an engine is up, after a short wait for the others. Close everything on failure."""
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        self._first_up = asyncio.get_running_loop().create_future()
        for endpoint in self.endpoints:
            self._connect(endpoint)
        self.run_background(self._watch())
        await self._first_up
        ups = [asyncio.create_task(_wait(endpoint.up)) for endpoint in self.endpoints]
        try:
            await asyncio.wait(ups, timeout=OTHERS_START_TIMEOUT_S)
        finally:
            for up in ups:
                up.cancel()

    def run_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until `close`. Log the error that ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._first_up is not None and not self._first_up.done():
            self._first_up.set_exception(error)
            return
        known = isinstance(error, RoseinferError)
        log.error("a background task of the engine client failed: %s", error, exc_info=None if known else error)

    # --- engines come and go ------------------------------------------------------------------------------------
    def add(self, make_connector: Callable[[int], Connector], number: int | None = None) -> int:
        """Add an engine and return its number: the given one if it was never used, else the next unused one.

        `make_connector`: makes the connector for that number, and may raise. Raise `EngineClosedError` after `close`.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed")
        number = self.endpoints.number(number)
        endpoint = self._add_endpoint(number, make_connector(number))
        self._dispatcher.add(number)
        if self._first_up is not None:
            self._connect(endpoint)
        return number

    def _add_endpoint(self, number: int, connector: Connector) -> Endpoint:
        endpoint = Endpoint(number, connector, self._connection, self._clock, self._incompatibility)
        self.endpoints.add(endpoint)
        return endpoint

    def _connection(self, transport: Transport) -> AsyncEngine:
        return AsyncEngine(transport, self._requests, self)

    def retire(self, number: int, timeout_s: float) -> None:
        """Retire an engine: move waiting requests to others at once, and running ones after `timeout_s` seconds.

        It is removed when it is empty. Unknown numbers are ignored.
        """
        if self.has(number):
            self.endpoints[number].retire(timeout_s)

    def set_listed(self, number: int, listed: bool) -> None:
        """Set whether the directory lists an engine. An unlisted one is removed once it cannot be reached."""
        self.endpoints[number].listed = listed

    def has(self, number: int) -> bool:
        """True if there is an engine of this number."""
        return number in self.endpoints

    def _incompatibility(self, info: EngineInfo) -> str | None:
        return incompatibility(self.info, info) if self._dynamic and self._has_info else None

    def _connect(self, endpoint: Endpoint) -> None:
        task = self._connect_tasks[endpoint.number] = asyncio.create_task(endpoint.maintain_connection(self.on_up))
        task.add_done_callback(self._on_done)

    def _remove_lost(self) -> None:
        for endpoint in list(self.endpoints):
            if endpoint.engine is None:
                over = endpoint.retiring or not endpoint.listed
            else:
                over = endpoint.retiring and not self._has_requests(endpoint.engine)
            if over:
                self._forget(endpoint)

    def _has_requests(self, engine: AsyncEngine) -> bool:
        return any(live.engine is engine for live in self._requests.all())

    def _forget(self, endpoint: Endpoint) -> None:
        log.info("engine %d was removed", endpoint.number)
        self.endpoints.drop(endpoint)
        self._dispatcher.remove(endpoint.number)
        self.run_background(_stop_connecting(self._connect_tasks.pop(endpoint.number, None), endpoint))

    # --- requests -----------------------------------------------------------------------------------------------
    def generate(self, request: GenerateRequest) -> ChunkStream:
        buffer = ChunkBuffer(request.n)
        return ChunkStream(buffer, self.submit(request, buffer))

    def submit(self, request: GenerateRequest, sink: Sink) -> LiveRequest:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        live = self._requests.make(request, sink, self.info)
        endpoint = self._dispatcher.place(live)
        if endpoint is None:
            raise unavailable_error(self.endpoints)
        assert endpoint.engine is not None
        endpoint.engine.send(live)
        self._requests.add(live)
        return live

    # --- engines ------------------------------------------------------------------------------------------------
    def on_up(self, endpoint: Endpoint, another: bool) -> None:
        assert endpoint.info is not None and endpoint.engine is not None
        if not self.several or not self._has_info:
            self.info = endpoint.info
        if self.several and not self._has_info:
            self._dispatcher = self._dispatcher_for(endpoint.info)
        self._has_info = True
        self._adapters.join(endpoint.engine.adapter_client)
        if self._first_up is not None and not self._first_up.done():
            self._first_up.set_result(None)
        self._dispatcher.on_connected(endpoint, another)

    def _dispatcher_for(self, info: EngineInfo) -> Dispatcher:
        router = self._router
        make = Placer if router.record is None else partial(RecordingPlacer, router.record)
        placer = make(
            router.name,
            [endpoint.number for endpoint in self.endpoints],
            share=router.processes,
            blocks=info.facts.num_blocks,
            delay_s=SEND_DELAY_S,
            seed=router.seed,
        )
        self.placer = placer
        keyed = router.name in PREFIX_AWARE and info.facts.prefix_caching
        dispatcher = Dispatcher(self.endpoints, placer, self._requests, keyed=keyed, block_size=info.facts.block_size)
        dispatcher.observe(self._observer)
        return dispatcher

    async def _watch(self) -> None:
        """Run `tick` periodically until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("cannot check the engines")

    def tick(self) -> None:
        """Move requests off draining and quiet engines, and remove retired ones. Called every `TICK_S` seconds."""
        self._dispatcher.tick()
        self._remove_lost()

    # --- FailoverHandler ----------------------------------------------------------------------------------------
    def lost(self, engine: AsyncEngine, requests: list[LiveRequest], reason: str, suspects: Collection[str]) -> None:
        endpoint = next((endpoint for endpoint in self.endpoints if endpoint.engine is engine), None)
        if endpoint is None:  # it was not up yet
            return
        endpoint.set_lost(reason)
        level = logging.INFO if endpoint.draining else logging.WARNING
        log.log(level, "lost engine %d with %d requests: %s", endpoint.number, len(requests), reason)
        self._dispatcher.lost(endpoint, requests, reason, suspects)
        asyncio.get_running_loop().call_later(SETTLE_S, self.place_displaced)

    def place_displaced(self) -> None:
        """Send the requests of lost engines to other engines. Called `SETTLE_S` seconds after a loss."""
        if not self._closed:
            self._dispatcher.place_displaced()

    def rejected(self, live: LiveRequest, rejection: Rejection) -> Rejection | None:
        return self._dispatcher.rejected(live, rejection)

    def cancelled(self, live: LiveRequest) -> None:
        self._dispatcher.cancelled(live)

    def started(self, live: LiveRequest, cached_tokens: int) -> None:
        self._dispatcher.started(live, cached_tokens)

    def adapters_changed(self, entries: Mapping[str, AdapterEntry]) -> None:
        self._adapters.spread(entries)

    # --- adapters -----------------------------------------------------------------------------------------------
    def adapters(self) -> Mapping[str, Adapter]:
        return self._adapters.names.adapters

    async def put_adapter(self, name: str, path: str) -> Adapter:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        return await self._adapters.put(name, path)

    async def drop_adapter(self, name: str) -> Adapter:
        if self._closed:
            raise EngineClosedError("the engine is closed")
        return await self._adapters.drop(name)

    # --- reports ------------------------------------------------------------------------------------------------
    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def health(self) -> EngineHealth:
        """Return the health of the healthiest engine. It is never final if engines may be added."""
        health = self.endpoints.health()
        return replace(health, final=False) if self._dynamic else health

    def stats(self) -> SchedulerStats:
        """Return the sum over all engines, removed ones included."""
        return self.endpoints.stats()

    def reports(self) -> list[EngineReport]:
        if not self._closed:
            self._dispatcher.refresh()  # each promise is new once, and the router must not miss it
        return self.endpoints.reports()

    def on_step(self, listener: Callable[[StepRecord], None]) -> None:
        """Do nothing: only the owner of the engines receives step records."""

    def on_routing(self, observer: RoutingObserver) -> None:
        self._observer = observer
        self._dispatcher.observe(observer)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for live in self._requests.all():
            if live in self._requests:
                if live.engine is not None:
                    live.engine.withdraw(live)
                live.fail(EngineClosedError("the engine was closed"))
        tasks = [*self._tasks, *self._connect_tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for endpoint in self.endpoints:
            await endpoint.close()
        if isinstance(self.placer, RecordingPlacer):
            self.placer.close()
        if self._on_close is not None:
            self._on_close()


async def _stop_connecting(keeper: "asyncio.Task[None] | None", endpoint: Endpoint) -> None:
    """Stop the connection task of an engine, and close its connection."""
    try:
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
    finally:
        await endpoint.close()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
