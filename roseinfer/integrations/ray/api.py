"""One API process of a deployment: the whole server in a replica of Ray Serve, with connections to all engines.

HAProxy sends it requests on a port that Serve chooses. The server accepts them with the connection class of `serve` and
its limits. Serve's Python proxy sends requests here only if no API process was up; they are answered with 503.
"""

import asyncio
import contextlib
import logging
from typing import Any
from uuid import uuid4

import uvicorn.protocols.http.auto
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roseinfer.cluster.directory import DynamicDirectory, EngineEntry
from roseinfer.cluster.directory_sync import start_from_directory
from roseinfer.cluster.endpoint import Connector
from roseinfer.cluster.remote.address import HostPort
from roseinfer.cluster.remote.engines import RemoteEngines
from roseinfer.cluster.remote.tls import TlsFolder
from roseinfer.cluster.routed import RoutedEngine, RouterSetup
from roseinfer.config.hub import tokenizer_folder
from roseinfer.core.slo import Cause
from roseinfer.engine.live import InflightLimit, LiveRequests
from roseinfer.integrations.otel.start import traces_to
from roseinfer.integrations.ray.directory import directory, fetch_certificate
from roseinfer.integrations.ray.metrics import deployment_snapshot, with_engines, without_clock
from roseinfer.integrations.ray.plan import Plan
from roseinfer.integrations.ray.public import DEPLOYMENT_HEADER
from roseinfer.integrations.ray.register import REGISTER_INTERVAL_S, RegisteredEngine, RequestCounts
from roseinfer.processes.private_folder import private_folder, remove_folder
from roseinfer.server.app import ModelParts, build_app, parts_of
from roseinfer.server.asgi import LAST_WORDS_S, attach_engine
from roseinfer.server.hosting import configure_logging, settle_garbage_collector
from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.connection import EXTENSION, limited_protocol
from roseinfer.server.http.errors import unavailable
from roseinfer.server.observe.exposition import Snapshot
from roseinfer.server.observe.metric_registry import Numbers
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The directory answers after a change, at the latest after CHANGE_TIMEOUT_S; other answers take at most ASK_TIMEOUT_S.
CHANGE_TIMEOUT_S, ASK_TIMEOUT_S = 10.0, 5.0
ATTACH_WAIT_S = 10.0
RETRY_PAUSE_S = 0.5  # before the directory is asked again after a failure
RETRY_AFTER_S = 5.0  # in responses while no API process is up
REQUESTS_METRIC, REJECTIONS_METRIC = "roseinfer:slo_requests", "roseinfer:slo_rejections"


class ApiReplica:
    """Replica of Ray Serve, wrapped by `serve.ingress`.

    Its start takes until it is connected to an engine, but at most `ATTACH_WAIT_S`: Serve ends the process that it
    replaces after that. Then it answers with 503 until an engine is up.
    """

    async def __init__(self, plan: Plan, engines: Any = None) -> None:  # type: ignore[misc]  # Serve awaits it
        plan.set_variables()
        configure_logging(plan.server)
        self._plan = plan
        self._process = uuid4().hex[:12]
        tracing = traces_to(plan.server.otlp_endpoint)
        model = ModelParts(plan.server, plan.engine.model.model)
        self._parts = parts_of([model], self._gather, tracing=tracing)
        # Serve creates uvicorn's server, and uvicorn then looks up its connection class here.
        uvicorn.protocols.http.auto.AutoHTTPProtocol = limited_protocol(self._parts.service.limits)
        self._engine_directory = DynamicDirectory()
        self._engine: RoutedEngine | None = None
        self._remote: RemoteEngines
        self._folder = private_folder()
        attaching = asyncio.create_task(self._attach())
        works = follow_directory(self._engine_directory), self._report()
        self._tasks = [attaching, *(asyncio.create_task(work) for work in works)]
        await asyncio.wait((attaching,), timeout=ATTACH_WAIT_S)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return HaproxyOnly(build_app(self._parts).front, self._plan.deployment)

    async def check_health(self) -> None:
        """Raise the error that has ended a task, if there is one."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    # --- engines ------------------------------------------------------------------------------------------------
    async def _attach(self) -> None:
        """Connect to the engines, and serve requests once one is up."""
        plan, replicas = self._plan, self._plan.replicas
        folder = await asyncio.to_thread(tokenizer_folder, plan.engine.model)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder, plan.server.chat_template)
        tls = await self._certificate()
        self._remote = RemoteEngines(tls, quiet_s=replicas.engine_timeout, lost_s=plan.server.stall_timeout)
        inflight = InflightLimit(plan.engine.scheduler.max_inflight_requests)
        starting = start_from_directory(
            self._engine_directory,
            self._connector,
            LiveRequests(tokenizer, None, inflight, f"{self._process}-"),
            RouterSetup(name=plan.router, processes=plan.deploy.api_processes),
            replicas.drain_timeout,
        )
        self._engine = await attach_engine(self._parts.service, tokenizer, starting)
        settle_garbage_collector()

    def _connector(self, entry: EngineEntry, number: int) -> Connector:
        return self._remote.connector(number, HostPort.parse(entry.address, "directory"), entry.incarnation)

    async def _certificate(self) -> TlsFolder:
        """Fetch a certificate; retry until the directory answers."""
        while True:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    return await fetch_certificate(f"api-{self._process}", self._folder)
            except Exception as error:
                log.warning("cannot fetch a certificate from the directory: %s; retrying in %g s", error, RETRY_PAUSE_S)
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _report(self) -> None:
        """Report metrics and counts of requests to the directory, until cancelled."""
        while True:
            await asyncio.sleep(REGISTER_INTERVAL_S)
            with contextlib.suppress(Exception):  # logged by `follow_directory`
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    actor = await directory()
                    counts = request_counts(self._parts.observation.registry.numbers())
                    await actor.report.remote(self._process, tuple(counts))
                    await self._store_metrics(actor)

    async def _store_metrics(self, actor: Any) -> None:
        own = with_engines(self._parts.observation.snapshot(), self._engine)
        await actor.store_metrics.remote(self._process, without_clock(own))

    async def _gather(self, own: Snapshot) -> Snapshot:
        return await gather_metrics(self._process, with_engines(own, self._engine))

    # --- shutdown -----------------------------------------------------------------------------------------------
    async def __del__(self) -> None:
        """Stop. Serve has waited for requests; the remaining ones end with an error."""
        for task in self._tasks:
            task.cancel()
        await self._parts.service.wind_down(LAST_WORDS_S)
        with contextlib.suppress(Exception):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._store_metrics(await directory())
        if self._engine is not None:
            await self._engine.close()
            self._remote.close()
        remove_folder(self._folder)


async def follow_directory(engines: DynamicDirectory) -> None:
    """Copy the engines of the deployment's directory into `engines`, until cancelled.

    After a failure, the directory may be a restarted one. Report to it which engine numbers are taken.
    """
    seen = highest = -1
    while True:
        try:
            async with asyncio.timeout(CHANGE_TIMEOUT_S + ASK_TIMEOUT_S):
                actor = await directory()
                if seen < 0 <= highest:
                    await actor.reserve.remote(highest)
                seen, registered = await actor.engines.remote(seen, CHANGE_TIMEOUT_S)
            highest = max([highest, *(engine.number for engine in registered)])
            engines.set_entries(_entry(engine) for engine in registered)
        except Exception as error:
            log.warning("cannot ask the directory for engines, continuing with the known ones: %s", error)
            seen = -1
            await asyncio.sleep(RETRY_PAUSE_S)


async def gather_metrics(process: str, own: Snapshot) -> Snapshot:
    """Return the metrics of all API processes. Raise `ApiError` 503 if the directory cannot give them."""
    parts: list[Snapshot] | None = None
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            parts = await (await directory()).exchange_metrics.remote(process, without_clock(own))
    except Exception as error:
        log.warning("cannot ask the directory for metrics: %s", error)
    if parts is None:
        # Not this process's alone: counters that go back would look like a restart.
        message = "The directory of the deployment does not have all metrics yet, or does not answer"
        raise unavailable("metrics_unavailable", message, RETRY_AFTER_S)
    return deployment_snapshot(own, parts)


class HaproxyOnly:
    """Pass on requests of `limited_protocol`, which come from HAProxy; answer all others with 503.

    `deployment`: value of the header by which `deploy` recognises its own processes, "" for none.
    """

    def __init__(self, app: ASGIApp, deployment: str = "") -> None:
        self._app = app
        self._added = [(DEPLOYMENT_HEADER.encode(), deployment.encode())] if deployment else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif EXTENSION in scope.get("extensions", {}):
            await self._app(scope, receive, self._with_own_headers(send))
        else:
            error = unavailable("loading", "No API process is up. Retry the request", RETRY_AFTER_S)
            await ErrorResponse(error)(scope, receive, send)

    def _with_own_headers(self, send: Send) -> Send:
        """Drop the header `x-request-id`, which Serve adds itself, and add the one that names the deployment."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
                message["headers"] = kept + self._added
            await send(message)

        return sending


def request_counts(numbers: Numbers) -> RequestCounts:
    """Return the counts of requests from the metrics of a process."""
    outcomes = {values[-1]: 0.0 for values in numbers.get(REQUESTS_METRIC, {})}
    for values, (count,) in numbers.get(REQUESTS_METRIC, {}).items():
        outcomes[values[-1]] += count
    rejections = numbers.get(REJECTIONS_METRIC, {}).items()
    rejected = sum(count for (*_, cause, _), (count,) in rejections if cause != Cause.IDLE)
    return RequestCounts(sum(outcomes.values()), rejected, outcomes.get("met", 0.0))


def _entry(engine: RegisteredEngine) -> EngineEntry:
    return EngineEntry(engine.address, engine.name, engine.number, engine.retiring)
