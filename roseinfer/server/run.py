"""Server with a single API process: startup, serving and shutdown."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from roseinfer.cluster.models import ModelSupervisors
from roseinfer.cluster.start import Supervisor, routed_engine, router_record
from roseinfer.core.config.models import ServedModelConfig, all_names
from roseinfer.engine.api import Engine
from roseinfer.engine.live import InflightLimit
from roseinfer.integrations.otel.start import traces_to
from roseinfer.integrations.systemd import SystemdNotifier
from roseinfer.server.app import ModelParts, parts_of
from roseinfer.server.asgi import LAST_WORDS_S, Server, attach_engine, uvicorn_config
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
    unless_stopped,
)
from roseinfer.server.request.models import ServedModels
from roseinfer.server.request.service import Service
from roseinfer.server.request.slo_classes import SloClasses, configured_classes
from roseinfer.server.response_store.start import response_file
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostedModel:
    """One model of a server, and how it starts. `load_tokenizer` runs in a thread; `start_engine` gets its result.

    `owner`: of its engines; None if their steps come from the engine itself.
    """

    parts: ModelParts
    load_tokenizer: Callable[[], Tokenizer]
    start_engine: Callable[[Tokenizer], Coroutine[Any, Any, Engine]]
    owner: Supervisor | None = None


async def serve_models(models: Sequence[ServedModelConfig]) -> None:
    """Serve with supervised engine processes, or with engines that a directory lists. SIGHUP restarts them in turn.

    The options of the server are those of the first model. Raises what `serve` and `engine_supervisor` raise, and
    `EngineDeadError` if no engine stays alive.
    """
    configure_logging(models[0].server)
    classes = configured_classes(models[0].server, all_names(models))
    supervisors = ModelSupervisors.of(models)
    hosted = [_hosted(model, supervisors, index, classes) for index, model in enumerate(models)]
    try:
        await serve(hosted, supervisors)
    finally:
        await supervisors.close()
    if supervisors.failure.done():
        supervisors.failure.result()


def _hosted(model: ServedModelConfig, supervisors: ModelSupervisors, index: int, classes: SloClasses) -> HostedModel:
    supervisor = supervisors.supervisors[index]
    inflight = InflightLimit(model.engine.scheduler.max_inflight_requests)

    async def start(tokenizer: Tokenizer) -> Engine:
        await supervisors.launch(index)
        await supervisors.connect(index)
        record = router_record(model.engine)
        return await routed_engine(supervisor.engine_addresses, tokenizer, model.replicas, inflight, record=record)

    parts = ModelParts(model.server, model.model_name, {"slo_classes": classes}, model.first_engine)
    load = partial(Tokenizer.from_folder, Path(model.tokenizer), model.server.chat_template)
    return HostedModel(parts, load, start, supervisor)


async def serve(models: Sequence[HostedModel], owner: ModelSupervisors | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once. Call in the main thread.

    The address answers 503 `loading` while the engines start. `owner`: owner of all engines; its failure ends the
    server. Raises `ConfigError` for an unusable address, and what `start_engine` raises.
    """
    config = models[0].parts.config
    configure_logging(config)
    parts = parts_of(
        [model.parts for model in models],
        response_file=response_file(config, None if owner is None else owner.folder),
        tracing=traces_to(config.otlp_endpoint),
    )
    listener = listen(config)
    systemd = SystemdNotifier()
    signals = Signals(None if owner is None else Reload(owner.rolling_restart, systemd))
    signals.install()
    server = Server(uvicorn_config(parts))
    serving = asyncio.create_task(server.serve([listener]))
    for model, observation in zip(models, parts.observation.models, strict=True):
        if model.owner is not None:
            observation.set_owner(model.owner)
    ends: list[asyncio.Future[None]] = [serving] if owner is None else [serving, owner.failure]
    engines: list[Engine] = []
    try:
        engines = await unless_stopped(_start(parts.models, models), signals.first.wait()) or []
        if engines:
            settle_garbage_collector()
            names = [model.parts.name for model in models]
            words = greeting(config, names, listener, engines[0].info, chats=parts.service.chats)
            say(words)
            systemd.ready(words.partition(";")[0])
            await first_of(signals.first.wait(), *map(end_of, ends))
            systemd.stopping()
            await _drain(parts.models, signals)
    finally:
        systemd.close()
        remove_socket(listener)
        server.should_exit = True
        await serving
        for engine in engines:
            await engine.close()


async def _start(served: ServedModels, models: Sequence[HostedModel]) -> list[Engine]:
    """Start all engines at once, each of which serves as soon as it is up. If one fails, close the others."""
    starts = [
        asyncio.create_task(_start_one(service, model)) for service, model in zip(served.services, models, strict=True)
    ]
    try:
        return await asyncio.gather(*starts)
    except BaseException:
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        for start in starts:
            if not start.cancelled() and start.exception() is None:
                await start.result().close()
        raise


async def _start_one(service: Service, model: HostedModel) -> Engine:
    tokenizer = await asyncio.to_thread(model.load_tokenizer)
    return await attach_engine(service, tokenizer, model.start_engine(tokenizer))


async def _drain(models: ServedModels, signals: Signals) -> None:
    """Reject new requests, let running ones finish for `shutdown_timeout` seconds, then end the rest."""
    models.begin_drain()
    requests = models.requests()
    if requests:
        wait_s = models.first.config.shutdown_timeout
        log.info("shutting down: waiting up to %g s for %d requests", wait_s, requests)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await first_of(models.idle(), signals.second.wait())
    ended = await models.wind_down(LAST_WORDS_S)
    if ended:
        log.warning("shutting down: ended %d running requests", ended)
