"""The application: routes, middleware and error handlers around one `Service`."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from roseinfer.core.config import ServerConfig
from roseinfer.core.errors import RoseinferError
from roseinfer.engine.api import Engine
from roseinfer.server import documents
from roseinfer.server.auth import AuthMiddleware
from roseinfer.server.errors import ApiError, as_api_error
from roseinfer.server.metrics import HttpMetrics
from roseinfer.server.middleware import CrashMiddleware, HttpMetricsMiddleware, RequestIdMiddleware
from roseinfer.server.responses import ErrorResponse
from roseinfer.server.routes import chat, completions, models, status, tokenize
from roseinfer.server.service import Service
from roseinfer.server.watchdog import watch_engine
from roseinfer.text.tokenizer import Tokenizer

# Nobody is left to read it; the status is for the metrics.
CLIENT_CLOSED_REQUEST = 499


def create_app(engine: Engine, tokenizer: Tokenizer, config: ServerConfig, model_name: str) -> FastAPI:
    """An application around an engine that is up. Raises `ConfigError` if the chat template does not compile."""
    service = Service(config, model_name)
    service.attach(engine, tokenizer)
    return build_app(service)


def build_app(service: Service) -> FastAPI:
    """An application that says 503 `loading` until `service.attach` is called."""
    config = service.config
    app = FastAPI(
        title="roseinfer",
        description="An OpenAI-compatible inference server",
        version=version("roseinfer"),
        lifespan=_lifespan(service),
        docs_url="/docs" if config.enable_docs else None,
        openapi_url="/openapi.json" if config.enable_docs else None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    for family in (completions, chat, models, tokenize, status):
        family.add(app, service)
    documents.install(app, keyed=bool(config.api_key))
    _add_error_handlers(app)
    _add_middleware(app, service)
    app.state.service = service
    return app


def _lifespan(service: Service) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watchdog = asyncio.create_task(watch_engine(service))
        try:
            yield
        finally:
            watchdog.cancel()
            service.close()

    return lifespan


def _add_error_handlers(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return ErrorResponse(as_api_error(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = ErrorResponse(_from_http(error))
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RoseinferError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)


def _from_http(error: HTTPException) -> ApiError:
    """What the router raises: unknown routes and wrong methods."""
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    return ApiError(error.status_code, error.detail, type=kind)


def _add_middleware(app: FastAPI, service: Service) -> None:
    """From the inside out: what is added last sees a request first."""
    config = service.config
    app.add_middleware(CrashMiddleware)
    if config.api_key:
        app.add_middleware(AuthMiddleware, keys=config.api_key)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", "x-should-retry"],
        )
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    http_metrics = HttpMetrics(service.registry, paths)
    app.add_middleware(HttpMetricsMiddleware, observe=http_metrics.observe)
    app.add_middleware(RequestIdMiddleware)
