"""Server with a single API process: startup, serving and shutdown."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from roseinfer.cluster.start import Supervisor, engine_supervisor, routed_engine, router_record
from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.config.replicas import ReplicasConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.engine.api import Engine
from roseinfer.engine.live import InflightLimit
from roseinfer.integrations.otel.start import traces_to
from roseinfer.integrations.systemd import SystemdNotifier
from roseinfer.server.app import server_parts
from roseinfer.server.asgi import LAST_WORDS_S, Server, uvicorn_config, with_texts
from roseinfer.server.hosting import (
    Reload,
    Signals,
    configure_logging,
    end_of,
    first_of,
    greeting,
    listen,
    remove_socket,
    say,
    settle_garbage_collector,
)
from roseinfer.server.request.service import Service
from roseinfer.server.response_store.start import response_file
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


async def serve_model(
    engine: EngineConfig,
    replicas: ReplicasConfig,
    load_tokenizer: Callable[[], Tokenizer],
    config: ServerConfig,
    announce: Callable[[str], None] = say,
) -> None:
    """Serve with supervised engine processes, or with engines that a directory lists. SIGHUP restarts them in turn.

    Raises what `serve` and `engine_supervisor` raise, and `EngineDeadError` if no engine stays alive.
    """
    configure_logging(config)
    supervisor = engine_supervisor(engine, replicas, config.stall_timeout)
    inflight = InflightLimit(engine.scheduler.max_inflight_requests)

    async def start(tokenizer: Tokenizer) -> Engine:
        await supervisor.launch()
        await supervisor.connect()
        record = router_record(engine)
        return await routed_engine(supervisor.engine_addresses, tokenizer, replicas, inflight, record=record)

    try:
        await serve(start, load_tokenizer, config, engine.model.model, announce, supervisor)
    finally:
        await supervisor.close()
    if supervisor.failure.done():
        supervisor.failure.result()


async def serve(
    start_engine: Callable[[Tokenizer], Coroutine[Any, Any, Engine]],
    load_tokenizer: Callable[[], Tokenizer],
    config: ServerConfig,
    model_name: str,
    announce: Callable[[str], None] = say,
    supervisor: Supervisor | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once. Call in the main thread.

    The address answers 503 `loading` while the engine starts. `load_tokenizer` runs in a thread; `start_engine` gets
    its result. `announce` receives the startup message. `supervisor`: owner of the engines; its failure ends the
    server. Raises `ConfigError` for an unusable address, and what `start_engine` raises.
    """
    configure_logging(config)
    parts = server_parts(
        config,
        model_name,
        response_file=response_file(config, None if supervisor is None else supervisor.folder),
        tracing=traces_to(config.otlp_endpoint),
    )
    service = parts.service
    listener = listen(config)
    systemd = SystemdNotifier()
    signals = Signals(None if supervisor is None else Reload(supervisor, systemd))
    signals.install()
    server = Server(uvicorn_config(parts))
    serving = asyncio.create_task(server.serve([listener]))
    if supervisor is not None:
        parts.observation.set_owner(supervisor)
    ends: list[asyncio.Future[None]] = [serving] if supervisor is None else [serving, supervisor.failure]
    engine: Engine | None = None
    try:
        engine = await _unless(signals.first, _start(service, start_engine, load_tokenizer))
        if engine is not None:
            settle_garbage_collector()
            words = greeting(config, model_name, listener, engine.info, chats=service.chats)
            announce(words)
            systemd.ready(words.partition(";")[0])
            await first_of(signals.first.wait(), *map(end_of, ends))
            systemd.stopping()
            await _drain(service, signals)
    finally:
        systemd.close()
        remove_socket(listener)
        server.should_exit = True
        await serving
        if engine is not None:
            await engine.close()


async def _start(
    service: Service,
    start_engine: Callable[[Tokenizer], Coroutine[Any, Any, Engine]],
    load_tokenizer: Callable[[], Tokenizer],
) -> Engine:
    tokenizer = await asyncio.to_thread(load_tokenizer)
    engine = await with_texts(service, tokenizer, start_engine(tokenizer))
    try:
        service.attach(engine, tokenizer)
        service.warm_up()
    except BaseException:
        await engine.close()
        raise
    return engine


async def _unless(event: asyncio.Event, work: Awaitable[Engine]) -> Engine | None:
    """Return the result of `work`; cancel it and return None if `event` is set first."""
    task = asyncio.ensure_future(work)
    await first_of(event.wait(), asyncio.shield(task))
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def _drain(service: Service, signals: Signals) -> None:
    """Reject new requests, let running ones finish for `shutdown_timeout` seconds, then end the rest."""
    lifecycle = service.lifecycle
    lifecycle.begin_drain()
    if lifecycle.requests:
        wait_s = service.config.shutdown_timeout
        log.info("shutting down: waiting up to %g s for %d requests", wait_s, lifecycle.requests)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await first_of(lifecycle.idle(), signals.second.wait())
    ended = await service.wind_down(LAST_WORDS_S)
    if ended:
        log.warning("shutting down: ended %d running requests", ended)
