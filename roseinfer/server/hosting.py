"""Hosting of a server in one or more processes: socket, signals, logging, greeting. Not the application."""

import asyncio
import contextlib
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
import stat
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from roseinfer.core import logs, standard_streams
from roseinfer.core.config.engine import PRICED
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, ResourceError
from roseinfer.core.pooling import PoolingTask
from roseinfer.engine.api import EngineInfo
from roseinfer.integrations.systemd import SystemdNotifier

log = logging.getLogger("roseinfer.server")

Result = TypeVar("Result")

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BACKLOG = 2048
# New objects between two young collections: a few hundred running requests.
MAX_YOUNG_OBJECTS = 50_000
MAX_AUTO_WORKERS = 4
# Open files: minimum for a start with some clients, and the limit to set where the system has none.
MIN_DESCRIPTORS, MAX_DESCRIPTORS = 128, 2**16


class Signals:
    """Handlers of SIGINT and SIGTERM (set `first`, then `second`) and SIGHUP (call `on_reload`).

    A SIGHUP because the terminal closed counts as SIGTERM, or as nothing under nohup.
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


class Reload:
    """Callable that restarts the engines in turn, by `restart`, in the background."""

    def __init__(self, restart: Callable[[], Awaitable[None]], manager: SystemdNotifier) -> None:
        self._restart = restart
        self._manager = manager
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> None:
        task = asyncio.create_task(self._roll())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _roll(self) -> None:
        self._manager.reloading()
        try:
            await self._restart()
        finally:
            self._manager.reloaded()


def _terminal() -> bool:
    """True if the process has a controlling terminal, whatever its standard input is."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop if installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def end_of(future: "asyncio.Future[None]") -> None:
    """Wait for a future and ignore its result."""
    await asyncio.wait({future})


async def first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first and cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def unless_stopped(work: Awaitable[Result], *stops: Awaitable[object]) -> Result | None:
    """Return the result of `work`. Cancel it and return None if one of `stops` ends first.

    The work has ended when this returns or raises.
    """
    task = asyncio.ensure_future(work)
    try:
        await first_of(*stops, asyncio.shield(task))
    finally:
        task.cancel()
        await asyncio.wait({task})
    return None if task.cancelled() else task.result()


class _Quiet(logging.Filter):
    """Filter of uvicorn's error about unfinished answers: failed streams are cut on purpose."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "without completing response" not in record.getMessage()


def worker_count(asked: int | None, device: str) -> int:
    """Return the number of API processes: `asked`, else by device and cores.

    One process handles about 5,000 requests or 100,000 tokens per second, more than any engine on a CPU. A fast GPU
    with a small model needs bursts of hundreds of requests accepted within tens of milliseconds. Beyond four processes
    the engine is the bottleneck. Each takes 100 MB, so a quarter of the cores is enough.
    """
    if asked is not None:
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if device == "cpu" else min(max(1, cores // 4), MAX_AUTO_WORKERS)


def claim_descriptors(config: ServerConfig) -> None:
    """Raise the limit on open files as far as permitted. Call before the process has children.

    Raises `ResourceError` below the minimum. Log a warning if fewer clients can connect than requests are admitted.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # macOS has further, hidden limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    if soft == resource.RLIM_INFINITY:
        return
    if soft < MIN_DESCRIPTORS:
        raise ResourceError(f"the limit on open files is {soft} (ulimit -n), at least {MIN_DESCRIPTORS} are needed")
    if soft < config.max_num_queued_reqs + MIN_DESCRIPTORS:
        log.warning(
            "the limit on open files is %d (ulimit -n), too low for %d requests", soft, config.max_num_queued_reqs
        )


def configure_logging(config: ServerConfig) -> None:
    """Configure logging. Existing handlers stay."""
    logs.configure(as_json=config.log_format == "json")
    logging.getLogger("roseinfer").setLevel(config.log_level.upper())
    logging.getLogger("uvicorn.error").addFilter(_Quiet())


# errno -> what to do, if it is not about --host.
_LISTEN_HINTS = {
    errno.EADDRINUSE: "; stop the other server, or choose another --port (0 = any free one)",
    errno.EACCES: "; choose a --port of 1024 or above",
}


def listen(config: ServerConfig) -> socket.socket:
    """Return the listening socket. Raises `ConfigError` for an unusable address; log a warning if it is public."""
    if config.uds is not None:
        try:
            return _listen_at(config.uds, MAX_BACKLOG)
        except OSError as error:
            hint = "; stop the other server, or choose another --uds" if error.errno == errno.EADDRINUSE else ""
            raise ConfigError(f"uds: cannot listen on {config.uds!r}: {error.strerror or error}{hint}") from error
    if config.host not in LOOPBACK and not config.api_key:
        log.warning("%s is reachable from other machines, and no API key is set (--api-key)", config.host)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=MAX_BACKLOG)
    except (OSError, TypeError) as error:  # TypeError: the name cannot be encoded
        number = getattr(error, "errno", None) or 0  # negative: the name was not resolved
        reason = os.strerror(number) if number > 0 else "the name has no known address"
        hint = _LISTEN_HINTS.get(number, "; --host must be an address of this machine, such as 127.0.0.1")
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}{hint}") from error
    # Connections inherit it. Without it the body, written after the header, waits 40 ms for the client's delayed
    # acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _listen_at(path: str, backlog: int) -> socket.socket:
    """Return a listening Unix socket. Replace one at `path` that no process listens on.

    Raise `OSError`: EADDRINUSE if a process listens there, EEXIST if something else is there.
    """
    _remove_abandoned(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def remove_socket(listener: socket.socket) -> None:
    """Remove the file of a Unix socket, before it is closed: then nobody else listens there. Ignore other sockets."""
    if listener.family == getattr(socket, "AF_UNIX", None):
        with contextlib.suppress(OSError):
            os.unlink(listener.getsockname())


def _remove_abandoned(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "a file that is no socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink(missing_ok=True)
            return
        except BlockingIOError:  # its backlog is full
            pass
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def say(text: str) -> None:
    """Print a line. A server goes on without it if the disk is full or the reader of its output has left."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("cannot write to standard output: %s", error.strerror)
        standard_streams.discard_stdout()


def greeting(
    config: ServerConfig, names: Sequence[str], listener: socket.socket, info: EngineInfo, *, chats: bool
) -> str:
    """Return the startup message: address, formats of weights and K/V (unless priced), and a command to try.

    `names`: of the models, each its first; `info`, `chats`: of the first model, which may have a chat template.
    """
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is None:
        host, port = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        address = url = f"{scheme}://{shown}:{port}"
    else:
        address, url = f"unix:{config.uds}", f"--unix-socket {shlex.quote(config.uds)} {scheme}://localhost"
    key = ' -H "Authorization: Bearer $API_KEY"' if config.api_key else ""
    path, asked = _example(info, chats)
    body = shlex.quote(json.dumps({"model": names[0], **asked}))
    command = f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {body}"
    ways = "open it in a browser, or try" if config.console and config.uds is None else "try"
    kv = f"K/V in {info.kv_cache}" if info.facts.keeps_kv else "no K/V"
    kept = "" if info.facts.device == PRICED else f"weights in {info.facts.weights}, {kv}; "
    if len(names) > 1:
        return f"{', '.join(names)} are served on {address}; {ways}\n  {command}"
    return f"{names[0]} is served on {address}; {kept}{ways}\n  {command}"


def _example(info: EngineInfo, chats: bool) -> tuple[str, dict[str, Any]]:
    """Return the route below `/v1` and the body of a request that this model can answer."""
    if info.facts.pooling is not None:
        if info.facts.pooling.task is PoolingTask.SCORE:
            return "rerank", {"query": "red flowers", "documents": ["a rose", "an oak"]}
        return "embeddings", {"input": ["a rose", "an oak"]}
    brief = {"max_tokens": 64, "temperature": 0}
    if chats:
        question = {"role": "user", "content": "Write a function that reverses a string"}
        return "chat/completions", {"messages": [question]} | brief
    return "completions", {"prompt": "def fibonacci("} | brief


def settle_garbage_collector() -> None:
    """Tune garbage collection. Call after startup.

    Freezing skips permanent objects, whose scan takes 50 ms and more. Requests leave no cycles, so the other
    collections can be rare.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_YOUNG_OBJECTS, *gc.get_threshold()[1:])
