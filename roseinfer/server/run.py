"""Running the server: socket, uvicorn, signals, the engine's start and the way down."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn

from roseinfer.core.config import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.engine.api import Engine
from roseinfer.server.app import build_app
from roseinfer.server.errors import unavailable
from roseinfer.server.lifecycle import DRAINING_RETRY_S
from roseinfer.server.protocol import limited_protocol
from roseinfer.server.service import Service
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BACKLOG = 2048
# After the requests were told to end: how long their last words may take.
LAST_WORDS_S = 2
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would cut the drain short."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """SIGINT and SIGTERM: the first sets `first`, the next one `second`."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it exists."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def serve(
    start_engine: Callable[[Tokenizer], Awaitable[Engine]],
    load_tokenizer: Callable[[], Tokenizer],
    config: ServerConfig,
    model_name: str,
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain; a second signal stops at once. Belongs to the main thread.

    The address answers (503 `loading`) while the engine starts. `load_tokenizer` runs in a thread, `start_engine` then
    gets what it returned. `announce` is given, once ready, the address and a command to try.
    Raises `ConfigError` if the address cannot be used, and whatever keeps the engine from starting.
    """
    _configure_logging(config.log_level)
    if config.host not in LOOPBACK and not config.api_key:
        log.warning("%s may be reached from other machines, and no api_key is set", config.host)
    service = Service(config, model_name)
    listener = listen(config)
    signals = Signals()
    signals.install()
    server = Server(_uvicorn_config(service))
    serving = asyncio.create_task(server.serve([listener]))
    engine: Engine | None = None
    try:
        engine = await _unless(signals.first, _start(service, start_engine, load_tokenizer))
        if engine is not None:
            announce(_greeting(service, listener))
            await _first_of(signals.first.wait(), asyncio.shield(serving))
            await _drain(service, signals)
    finally:
        server.should_exit = True
        await serving
        if engine is not None:
            await engine.close()


async def _start(
    service: Service, start_engine: Callable[[Tokenizer], Awaitable[Engine]], load_tokenizer: Callable[[], Tokenizer]
) -> Engine:
    tokenizer = await asyncio.to_thread(load_tokenizer)
    engine = await start_engine(tokenizer)
    try:
        service.attach(engine, tokenizer)
    except BaseException:
        await engine.close()
        raise
    return engine


async def _unless(event: asyncio.Event, work: Awaitable[Engine]) -> Engine | None:
    """The result of `work`, or None if `event` was set first; `work` is then cancelled."""
    task = asyncio.ensure_future(work)
    await _first_of(event.wait(), asyncio.shield(task))
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Waits for one of them and drops the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _drain(service: Service, signals: Signals) -> None:
    """New requests are refused; running ones may finish for `shutdown_timeout` seconds, then they are ended."""
    lifecycle = service.lifecycle
    lifecycle.begin_drain()
    if lifecycle.requests:
        wait_s = service.config.shutdown_timeout
        log.info("shutting down: %d requests may finish within %g s", lifecycle.requests, wait_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await _first_of(lifecycle.idle(), signals.second.wait())
    ended = lifecycle.stop(unavailable("draining", "The server is shutting down", DRAINING_RETRY_S))
    if ended:
        log.warning("shutting down: %d requests were cut short", ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await lifecycle.idle()


class _Quiet(logging.Filter):
    """Drops uvicorn's complaint about answers left unfinished: cutting a failed stream short is on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def _configure_logging(level: str) -> None:
    """Nothing happens to handlers that exist already."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("roseinfer").setLevel(level.upper())
    logging.getLogger("uvicorn.error").addFilter(_Quiet())


def listen(config: ServerConfig) -> socket.socket:
    """The server's socket. Raises `ConfigError` if the address cannot be used."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}") from error
    # Connections inherit it. Without it the second of two small writes, as a header and its body are, waits for the
    # client's delayed acknowledgement: 40 ms an answer.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(service),
        http=limited_protocol(service.limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="debug" if service.config.log_level == "debug" else "warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def _greeting(service: Service, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    name = service.served_names[0]
    key = ' -H "Authorization: Bearer $API_KEY"' if service.config.api_key else ""
    body = json.dumps({"model": name, "prompt": "def fibonacci(", "max_tokens": 64, "temperature": 0})
    command = f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    return f"{name} is served on {url}; try\n  {command}"
