"""One API process of a deployment: the whole server in a replica of Ray Serve, with connections to all engines.

HAProxy sends it requests on a port that Serve gives it. The connections are roseinfer's own class, as in `serve`, with
its limits; a request that comes another way, through Serve's Python proxy, is one that found no API process: it is told
to come again.
"""

import asyncio
import contextlib
import logging
from pathlib import Path
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
from roseinfer.cluster.routed import RoutedEngine
from roseinfer.config.hub import tokenizer_folder
from roseinfer.core.slo import Cause
from roseinfer.engine.live import InflightLimit
from roseinfer.integrations.ray.directory import directory, fetch_certificate
from roseinfer.integrations.ray.plan import Plan
from roseinfer.integrations.ray.register import TELL_S, Fared, RegisteredEngine
from roseinfer.processes.private_folder import private_folder, remove_folder
from roseinfer.server.app import build_app, server_parts
from roseinfer.server.hosting import LAST_WORDS_S, configure_logging, settle_garbage_collector, with_texts
from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.connection import EXTENSION, limited_protocol
from roseinfer.server.http.errors import unavailable
from roseinfer.server.observe.metric_registry import Numbers
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

# The directory may hold a question this long until there is a change, and take this long for other answers. After a
# failure, it is asked again after the pause.
CHANGE_TIMEOUT_S, ASK_TIMEOUT_S, PAUSE_S = 10.0, 5.0, 0.5
RETRY_S = 5.0  # what clients are told to wait when no API process is up
REQUESTS, REJECTIONS = "roseinfer:slo_requests", "roseinfer:slo_rejections"


class ApiReplica:
    """A replica of Ray Serve, wrapped by `serve.ingress`. It answers from the start, 503 until an engine is up."""

    async def __init__(self, plan: Plan, engines: Any = None) -> None:  # type: ignore[misc]  # Serve awaits it
        plan.set_variables()
        configure_logging(plan.server)
        self._plan = plan
        self._process = uuid4().hex[:12]
        self._parts = server_parts(plan.server, plan.engine.model.model)
        # Serve makes uvicorn's server itself, and uvicorn looks its connections' class up here when that starts.
        uvicorn.protocols.http.auto.AutoHTTPProtocol = limited_protocol(self._parts.service.limits)
        self._engine_directory = DynamicDirectory()
        self._engine: RoutedEngine | None = None
        self._remote: RemoteEngines
        self._folder = private_folder()
        self._tasks = [asyncio.create_task(work) for work in (self._follow(), self._attach(), self._report())]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return FromHaproxy(build_app(self._parts).front)

    async def check_health(self) -> None:
        """Raise what has ended one of the tasks."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    # --- the engines --------------------------------------------------------------------------------------------
    async def _attach(self) -> None:
        """Serve requests once an engine is up."""
        plan, replicas = self._plan, self._plan.replicas
        chat_template = None if plan.server.chat_template is None else Path(plan.server.chat_template)
        folder = await asyncio.to_thread(tokenizer_folder, plan.engine.model)
        tokenizer = await asyncio.to_thread(Tokenizer.from_folder, folder, chat_template)
        tls = await self._certificate()
        self._remote = RemoteEngines(tls, quiet_s=replicas.engine_timeout, lost_s=plan.server.stall_timeout)
        starting = start_from_directory(
            self._engine_directory,
            self._way,
            tokenizer,
            router=plan.router,
            inflight=InflightLimit(plan.engine.scheduler.max_inflight_requests),
            prefix=f"{self._process}-",
            processes=plan.deploy.api_replicas,
            drain_s=replicas.drain_timeout,
        )
        self._engine = engine = await with_texts(self._parts.service, tokenizer, starting)
        self._parts.service.attach(engine, tokenizer)
        self._parts.service.warm_up()
        settle_garbage_collector()

    def _way(self, entry: EngineEntry, number: int) -> Connector:
        return self._remote.connector(number, HostPort.parse(entry.address, "directory"), entry.incarnation)

    async def _certificate(self) -> TlsFolder:
        """Wait for the directory, however long it takes."""
        while True:
            try:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    return await fetch_certificate(f"api-{self._process}", self._folder)
            except Exception as error:
                log.warning("the directory cannot issue a certificate: %s; asking again", error)
                await asyncio.sleep(PAUSE_S)

    async def _follow(self) -> None:
        """Pass the engines of the directory on to the server, until cancelled.

        Tell a directory that was restarted which engine numbers are taken.
        """
        seen = highest = -1
        while True:
            try:
                async with asyncio.timeout(CHANGE_TIMEOUT_S + ASK_TIMEOUT_S):
                    told = await directory()
                    if seen < 0 <= highest:
                        with contextlib.suppress(AttributeError):  # an earlier version's, which runs on over updates
                            await told.known.remote(highest)
                    seen, engines = await told.engines.remote(seen, CHANGE_TIMEOUT_S)
                highest = max([highest, *(engine.number for engine in engines)])
                self._engine_directory.tell(_entry(engine) for engine in engines)
            except Exception as error:
                log.warning("the directory of engines cannot be asked, those that are known serve on: %s", error)
                seen = -1
                await asyncio.sleep(PAUSE_S)

    async def _report(self) -> None:
        """Report to the directory how requests fared, until cancelled."""
        while True:
            await asyncio.sleep(TELL_S)
            with contextlib.suppress(Exception):  # said by `_follow`
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    fared = fared_of(self._parts.observation.registry.numbers())
                    await (await directory()).report.remote(self._process, tuple(fared))

    # --- the end ------------------------------------------------------------------------------------------------
    async def __del__(self) -> None:
        """Stop. Serve has waited for the requests; those that are left end with an error."""
        for task in self._tasks:
            task.cancel()
        await self._parts.service.wind_down(LAST_WORDS_S)
        if self._engine is not None:
            await self._engine.close()
            self._remote.close()
        remove_folder(self._folder)


class FromHaproxy:
    """Pass on requests over connections of `limited_protocol`, and answer others with 503."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif EXTENSION in scope.get("extensions", {}):
            await self._app(scope, receive, _without_id(send))
        else:
            error = unavailable("loading", "No API process was up for this request", RETRY_S)
            await ErrorResponse(error)(scope, receive, send)


def _without_id(send: Send) -> Send:
    """Serve gives each request an id, as which it comes to the server, and adds it to the answer once more."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [header for header in message["headers"] if header[0].lower() != b"x-request-id"]
        await send(message)

    return sending


def fared_of(numbers: Numbers) -> Fared:
    """Return how requests fared, from the counters of a process."""
    outcomes = {values[-1]: 0.0 for values in numbers.get(REQUESTS, {})}
    for values, (count,) in numbers.get(REQUESTS, {}).items():
        outcomes[values[-1]] += count
    refused = sum(count for (*_, cause, _), (count,) in numbers.get(REJECTIONS, {}).items() if cause != Cause.IDLE)
    return Fared(sum(outcomes.values()), refused, outcomes.get("met", 0.0))


def _entry(engine: RegisteredEngine) -> EngineEntry:
    return EngineEntry(engine.address, engine.name, engine.number, engine.retiring)
