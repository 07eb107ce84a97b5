"""What a process needs to serve HTTP, whether it is alone or one of several: socket, uvicorn, signals, logging."""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import uvicorn

from roseinfer.core import logs
from roseinfer.core.config.engine import PRICED
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.engine.api import Engine, EngineInfo
from roseinfer.integrations.systemd import SystemdNotifier
from roseinfer.server.app import ServerParts, build_app
from roseinfer.server.http.connection import limited_protocol
from roseinfer.server.request.service import Service
from roseinfer.text.tokenizer import Tokenizer

log = logging.getLogger("roseinfer.server")

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BACKLOG = 2048
# After the requests were told to end: how long their last words may take.
LAST_WORDS_S = 2
KEEP_ALIVE_S = 75
# Objects made since the last young collection, less those freed since: a few hundred running requests.
YOUNG_OBJECTS = 50_000
MAX_AUTO_WORKERS = 4
# Open files: what a start needs, with some clients, and what is asked for if the system has no limit of its own.
MIN_DESCRIPTORS, MAX_DESCRIPTORS = 128, 2**16


class Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would cut the drain short."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Signals:
    """SIGINT and SIGTERM: the first sets `first`, the next one `second`. SIGHUP calls `on_reload`, unless it says that
    the terminal has been closed: that counts as SIGTERM, or as nothing for who was started to outlive it (nohup).
    """

    def __init__(self, on_reload: Callable[[], None] | None = None) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_reload = on_reload
        self._in_terminal = self._outlives = False

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        self._in_terminal = _terminal()
        self._outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def _on_hangup(self) -> None:
        if self._in_terminal and not _terminal():
            self._in_terminal = False
            if not self._outlives:
                self._on_signal()
        elif self._on_reload is not None and not self.first.is_set():
            self._on_reload()


class Rolling(Protocol):
    async def rolling_restart(self) -> None:
        """See `EngineSupervisor`."""
        ...


class Reload:
    """Restarts engines in turn, in the background, each time it is called."""

    def __init__(self, supervisor: Rolling, manager: SystemdNotifier) -> None:
        self._supervisor = supervisor
        self._manager = manager
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> None:
        task = asyncio.create_task(self._roll())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll(self) -> None:
        self._manager.reloading()
        try:
            await self._supervisor.rolling_restart()
        finally:
            self._manager.reloaded()


def _terminal() -> bool:
    """Whether there is one that we belong to, whatever standard input is: that of a script's job is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it exists."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def end_of(future: "asyncio.Future[None]") -> None:
    """Returns when it is done; what it came to is somebody else's."""
    await asyncio.wait({future})


async def first_of(*awaitables: Awaitable[object]) -> None:
    """Waits for one of them and drops the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


Started = TypeVar("Started", bound=Engine)


async def with_texts(service: Service, tokenizer: Tokenizer, start_engine: Coroutine[Any, Any, Started]) -> Started:
    """The engine, started while the service tries the chat template: a template that cannot be used ends the start.

    Raises `ConfigError`, and what keeps the engine from starting.
    """
    loading = asyncio.create_task(service.load_texts(tokenizer))
    starting = asyncio.create_task(start_engine)
    try:
        await loading
        return await starting
    except BaseException:
        for task in (loading, starting):
            task.cancel()
        await asyncio.wait({loading, starting})
        if not starting.cancelled() and starting.exception() is None:
            await starting.result().close()
        raise


class _Quiet(logging.Filter):
    """Drops uvicorn's complaint about answers left unfinished: cutting a failed stream short is on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def worker_count(asked: int | None, device: str) -> int:
    """How many processes answer requests, if nobody has asked for a number.

    One carries some 5,000 requests or 100,000 tokens a second, more than any engine on a CPU. A fast GPU with a small
    model wants a burst of hundreds of requests accepted in tens of milliseconds; beyond four processes it is the
    engine that takes them one by one. Each takes 100 MB, so a quarter of the cores is plenty.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if device == "cpu" else min(max(1, cores // 4), MAX_AUTO_WORKERS)


def claim_descriptors(config: ServerConfig) -> None:
    """Raise the limit on open files as far as the process may, before it has children.

    Raises `ResourceError` if that is too low to start, warns if fewer clients can connect than requests are admitted.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has limits that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return
    if soft < MIN_DESCRIPTORS:
        raise ResourceError(f"only {soft} files may be open (ulimit -n), at least {MIN_DESCRIPTORS} are needed")
    if soft < config.max_num_queued_reqs + MIN_DESCRIPTORS:
        log.warning("only %d files may be open (ulimit -n): too few for %d requests", soft, config.max_num_queued_reqs)


def configure_logging(config: ServerConfig) -> None:
    """Nothing happens to handlers that exist already."""
    logs.configure(as_json=config.log_format == "json")
    logging.getLogger("roseinfer").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn.error").addFilter(_Quiet())


def listen(config: ServerConfig) -> socket.socket:
    """The server's socket. Raises `ConfigError` if the address cannot be used, warns if it is open to strangers."""
    if config.host not in LOOPBACK and not config.api_key:
        log.warning("%s may be reached from other machines, and no api_key is set", config.host)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        hint = "; stop what listens there, or choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}{hint}") from error
    # Connections inherit it. Without it the second of two small writes, as a header and its body are, waits for the
    # client's delayed acknowledgement: 40 ms an answer.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def uvicorn_config(parts: ServerParts, on_closed: Callable[[], None] | None = None) -> uvicorn.Config:
    """`on_closed` is called when a connection has ended."""
    return uvicorn.Config(
        build_app(parts).front,
        http=limited_protocol(parts.service.limits, on_closed),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="debug" if parts.service.config.log_level == "debug" else "warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_WORDS_S,
    )


def say(text: str) -> None:
    print(text, flush=True)


def greeting(config: ServerConfig, model_name: str, listener: socket.socket, info: EngineInfo) -> str:
    """Where the model is served, what its weights and K/V are kept as (device priced has neither), a command to try."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    name = (config.served_model_name or (model_name,))[0]
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api_key else ""
    body = json.dumps({"model": name, "prompt": "def fibonacci(", "max_tokens": 64, "temperature": 0})
    command = f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'"
    ways = "open it in a browser, or try" if config.console else "try"
    kept = "" if info.facts.device == PRICED else f"weights in {info.facts.weights}, K/V in {info.kv_cache}; "
    return f"{name} is served on {url}; {kept}{ways}\n  {command}"


def settle_garbage_collector() -> None:
    """To be called once everything is up.

    What has been imported and loaded lives as long as the process, so it is not looked through again (50 ms and more
    each time). A request leaves no cycles behind, so there is little to find among the rest either.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
