"""The application in uvicorn, and its start beside an engine's."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import uvicorn

from roseinfer.engine.api import Engine
from roseinfer.server.app import ServerParts, build_app
from roseinfer.server.http.connection import limited_protocol
from roseinfer.server.http.tls import server_tls
from roseinfer.server.request.service import Service
from roseinfer.text.tokenizer import Tokenizer

# Time for the last events of requests that a shutdown ends.
LAST_WORDS_S = 2
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """uvicorn without its signal handling, which would cut the drain short."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def uvicorn_config(parts: ServerParts, on_closed: Callable[[], None] | None = None) -> uvicorn.Config:
    """Return uvicorn's configuration. `on_closed`: called after the end of each connection."""
    tls = server_tls(parts.service.config)
    return uvicorn.Config(
        build_app(parts).front,
        http=limited_protocol(parts.service.limits, on_closed),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="debug" if parts.service.config.log_level == "debug" else "warning",
        access_log=False,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


Started = TypeVar("Started", bound=Engine)


async def attach_engine(service: Service, tokenizer: Tokenizer, start_engine: Coroutine[Any, Any, Started]) -> Started:
    """Start the engine while the service tests the chat template, then let the service accept requests.

    After a failure the engine is closed. Raises what `Service.load_texts`, `start_engine` and `Service.attach` raise.
    """
    loading = asyncio.create_task(service.load_texts(tokenizer))
    starting = asyncio.create_task(start_engine)
    try:
        await loading
        engine = await starting
        service.attach(engine, tokenizer)
        service.warm_up()
        return engine
    except BaseException:
        for task in (loading, starting):
            task.cancel()
        await asyncio.wait({loading, starting})
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().close()
        raise
