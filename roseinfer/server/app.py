"""ASGI application: routes, middleware and error handlers around one `Service`."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client.core import Metric
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from roseinfer import __version__
from roseinfer.core.clock import MonotonicClock
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, RoseinferError
from roseinfer.integrations.orca import LoadHeader
from roseinfer.server import documents
from roseinfer.server.console import routes as console
from roseinfer.server.console.steps import MAX_STEPS
from roseinfer.server.documents import inference_docs
from roseinfer.server.formats.chat import ChatFormat
from roseinfer.server.formats.completions import CompletionFormat
from roseinfer.server.formats.messages.format import MessagesFormat
from roseinfer.server.formats.pooling.cohere import CohereEmbedFormat
from roseinfer.server.formats.pooling.embeddings import EmbeddingFormat
from roseinfer.server.formats.pooling.scoring import RERANK_PATHS, SCORE_PATHS, RerankFormat, ScoreFormat
from roseinfer.server.formats.responses.format import ResponsesFormat
from roseinfer.server.formats.responses.history import History
from roseinfer.server.http.auth import AuthMiddleware
from roseinfer.server.http.body import ErrorResponse
from roseinfer.server.http.errors import CLIENT_CLOSED_REQUEST, DROPPED_REASON, OPENAI, ApiError, as_api_error
from roseinfer.server.http.hosts import HostMiddleware
from roseinfer.server.http.middleware import CrashMiddleware, EdgeMiddleware, InferenceRoutes
from roseinfer.server.http.root_path import RootPathMiddleware
from roseinfer.server.observe.metrics import HttpMetrics
from roseinfer.server.observe.peer_queries import PeerQueries
from roseinfer.server.observe.report import Gather, Observation
from roseinfer.server.observe.store_metrics import StoreMetrics
from roseinfer.server.observe.throttle import ThrottledLog
from roseinfer.server.observe.tracing import Tracing
from roseinfer.server.observe.watchdog import watch_descriptors, watch_engine
from roseinfer.server.request.inference import AnswerFormat, Inference
from roseinfer.server.request.models import ServedModels
from roseinfer.server.request.service import Service
from roseinfer.server.response_store.records import StoreFailedError
from roseinfer.server.response_store.shared import SharedResponses
from roseinfer.server.response_store.start import open_store
from roseinfer.server.routes import adapters, count_tokens, loads, models, requests, responses, status, tokenize

log = logging.getLogger(__name__)

# Paths of Ollama's API -> paths that do the same here (docs/from-ollama.md).
OLLAMA_PATHS = {
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/chat/completions",
    "/api/tags": "/v1/models",
    "/api/show": "/v1/models",
    "/api/ps": "/v1/requests",
    "/api/version": "/version",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
}


class Application(FastAPI):
    """FastAPI application. Requests enter at `front`: our middleware, then inference routes, then FastAPI."""

    front: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


@dataclass(frozen=True, slots=True)
class ServerParts:
    """Objects that an application is built around."""

    models: ServedModels
    observation: Observation
    peer_queries: PeerQueries
    tracing: Tracing | None = None
    responses: SharedResponses | None = None

    @property
    def service(self) -> Service:
        """Service of the first model, often the only one."""
        return self.models.first


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Parts of one model that exist before its engine is up.

    `config`: options of the server, with this model's own; `model_name`: its name unless `config` has others. `shared`:
    state that several API processes share, see `Service`. `first_engine`: number of its first engine.
    """

    config: ServerConfig
    model_name: str
    shared: Mapping[str, Any] = field(default_factory=dict)
    first_engine: int = 0

    @property
    def name(self) -> str:
        return (self.config.served_model_name or (self.model_name,))[0]


def parts_of(
    models: Sequence[ModelParts],
    gather: Gather | None = None,
    peer_queries: PeerQueries | None = None,
    response_file: Path | None = None,
    tracing: Tracing | None = None,
) -> ServerParts:
    """Make the parts of one API process. The options of the server are those of the first model.

    `response_file`: database of stored responses, None = not stored. `tracing`: made by the caller, as `config` says.
    `gather`: see `Observation`.
    """
    first, config = models[0], models[0].config
    keep_steps = MAX_STEPS if config.console else 0
    observation = Observation(first.name, gather, keep_steps, tracing, config.enable_log_requests)
    for further in models[1:]:
        observation.add_model(further.name, further.first_engine)
    several = len(models) > 1
    services = [
        Service(
            each.config, each.model_name, observed, title=f"model {each.name[:100]!r}" if several else "", **each.shared
        )
        for each, observed in zip(models, observation.models, strict=True)
    ]
    peer_queries = peer_queries or PeerQueries()
    responses = (
        None if response_file is None else _responses(config, response_file, first.name, observation, peer_queries)
    )
    return ServerParts(ServedModels(services), observation, peer_queries, tracing, responses)


def _responses(
    config: ServerConfig, path: Path, model_name: str, observation: Observation, peer_queries: PeerQueries
) -> SharedResponses | None:
    metrics = StoreMetrics(observation.registry, model_name)
    try:
        store = open_store(config, path, metrics)
    except ConfigError as error:
        if config.response_store is not None:
            raise
        log.warning("responses are not stored: %s", error)  # the file is a default
        return None

    async def gauges() -> Iterable[Metric]:
        try:
            return metrics.gauges(*await store.totals())
        except StoreFailedError:
            return ()

    observation.add_gauges(gauges)
    return SharedResponses(store, peer_queries)


def build_app(parts: ServerParts) -> Application:
    """Return an application that answers 503 `loading` for a model until its `Service.attach` is called."""
    served = parts.models
    config = served.first.config
    app = Application(
        title="roseinfer",
        description="An OpenAI-compatible inference server",
        version=__version__,
        lifespan=_lifespan(parts),
        docs_url="/docs" if config.enable_docs else None,
        openapi_url="/openapi.json" if config.enable_docs else None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    history = History(parts.responses, keyed=bool(config.api_key))
    formats: list[AnswerFormat] = [CompletionFormat(), ChatFormat(), MessagesFormat(), EmbeddingFormat()]
    formats.append(CohereEmbedFormat())
    formats += [*map(RerankFormat, RERANK_PATHS), *map(ScoreFormat, SCORE_PATHS), ResponsesFormat(history)]
    make = Inference if parts.tracing is None else parts.tracing.inference
    inferences = [make(served, answer_format) for answer_format in formats]
    for inference in inferences:
        name = "create_" + inference.path.removeprefix("/v1").strip("/").replace("/", "_").rstrip("s")
        docs = inference_docs(inference.path, inference.request_model)
        app.add_api_route(inference.path, _document_only, name=name, methods=["POST"], response_model=None, **docs)
    models.add(app, served)
    adapters.add(app, served)
    tokenize.add(app, served)
    count_tokens.add(app, served)
    responses.add(app, served, history)
    status.add(app, served, parts.observation)
    loads.add(app, served)
    requests.add(app, served, parts.observation.records, parts.peer_queries)
    public = console.add(app, served, parts.observation, parts.peer_queries) if config.console else []
    documents.install(app, bool(config.api_key), served.parser)
    _add_error_handlers(app)
    http_metrics = HttpMetrics(parts.observation.registry, _methods_by_path(app))

    load_header = LoadHeader()

    def load(wanted: str) -> str:
        reports, first = served.reports(), served.first
        return load_header.value(wanted, reports, first.backend.info if first.loaded else None, first.clock.now())

    app.front = _in_front(super(Application, app).__call__, inferences, config, http_metrics, public, load)
    app.state.service, app.state.responses = served.first, parts.responses
    return app


def _methods_by_path(app: FastAPI) -> dict[str, set[str]]:
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, Route):
            methods.setdefault(route.path.replace(":path}", "}"), set()).update(route.methods or ())
    return methods


async def _document_only() -> None:
    """Stand for an inference route in FastAPI's document and list of methods. `InferenceRoutes` serves it."""
    raise AssertionError("InferenceRoutes comes first")


def _lifespan(parts: ServerParts) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    served, tracing = parts.models, parts.tracing

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        throttled = ThrottledLog(log, MonotonicClock())
        watches = [asyncio.create_task(watch_engine(service)) for service in served.services]
        watches.append(asyncio.create_task(watch_descriptors(throttled)))
        try:
            yield
        finally:
            for watch in watches:
                watch.cancel()
            served.close()
            if parts.responses is not None:
                await asyncio.to_thread(parts.responses.store.close)
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    return lifespan


def _add_error_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return ErrorResponse(as_api_error(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            return ErrorResponse(_wrong_method(_methods(app, request.scope)))
        if error.status_code == 404 and error.detail == HTTPStatus.NOT_FOUND.phrase:
            return ErrorResponse(_no_such_path(app, request.scope))
        response = ErrorResponse(_from_http(error))
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RoseinferError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)


def _methods(app: FastAPI, scope: Scope) -> list[str]:
    """Return all methods of a path. The router alone reports those of the first matching route."""
    routes = (route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE)
    return sorted({method for route in routes for method in route.methods or ()})


def _wrong_method(allowed: list[str]) -> ApiError:
    named = ", ".join(allowed)
    return ApiError(405, f"method not allowed; this path supports {named}", more_headers={"Allow": named})


def _no_such_path(app: FastAPI, scope: Scope) -> ApiError:
    """Return the error for an unknown path. It suggests a known one that differs in slashes or `/v1`, or replaces one
    of Ollama's.
    """
    path = scope["path"]
    plain = "/" + "/".join(filter(None, path.split("/")))
    tried = (OLLAMA_PATHS.get(plain, plain), plain.removeprefix("/v1"), f"/v1{plain}")
    near = next((near for near in tried if _methods(app, {**scope, "path": near})), None)
    meant = "" if near is None else f"; did you mean {near[:100]}?"
    return ApiError(404, f"unknown path {path[:100]}{meant}", type="not_found_error")


def _from_http(error: HTTPException) -> ApiError:
    """Convert an error that the router itself raises."""
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return ApiError(error.status_code, error.detail, type=kind)


def _in_front(
    app: ASGIApp,
    inferences: Iterable[Inference],
    config: ServerConfig,
    http_metrics: HttpMetrics,
    public: Iterable[str],
    load: Callable[[str], str],
) -> ASGIApp:
    """Wrap `app` in our middleware, from the inside out. `public`: paths without API key; `load`: see `EdgeMiddleware`.

    Our middleware is outside FastAPI because inference routes bypass FastAPI.
    """
    app = CrashMiddleware(InferenceRoutes(app, routes={inference.path: inference for inference in inferences}))
    if config.api_key:
        app = AuthMiddleware(app, keys=config.api_key, more_open=public)
    else:
        app = HostMiddleware(app, (*config.allowed_hosts, config.host), config.allowed_origins)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "X-Request-Id",
                "request-id",
                "Retry-After",
                "retry-after-ms",
                "x-should-retry",
                DROPPED_REASON,
                "endpoint-load-metrics",
            ],
        )
    dialects = {inference.path: inference.dialect for inference in inferences if inference.dialect is not OPENAI}
    app = EdgeMiddleware(app, http_metrics.observe, dialects, load)
    root_path = config.root_path.rstrip("/")
    return RootPathMiddleware(app, root_path) if root_path else app
