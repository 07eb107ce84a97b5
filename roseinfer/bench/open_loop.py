"""Open-loop load on an OpenAI-compatible server, shared by several client processes.

Each request is sent when it is due, whatever has become of earlier ones. Needs aiohttp (the `bench` extra).
"""

import asyncio
import gc
import json
import multiprocessing
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from roseinfer.bench.arrivals import PlannedRequest, draw, load_classes
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.exchange import Clock, Exchange, send_request
from roseinfer.bench.requests import RequestTemplate, authorization, fixed_work
from roseinfer.core.errors import ConfigError, RoseinferError, reason_of
from roseinfer.core.extras import install_command
from roseinfer.core.interrupts import sigint_blocked

START_DELAY_S = 0.1
LIST_TIMEOUT_S = 30.0
READY_RETRY_S = 1.0
READ_BUFFER_BYTES = 2**20


class ClientFailedError(RoseinferError):
    """A client process ended without a result."""


@dataclass(slots=True)
class LoadOutcome(Exchange):
    """Record of one request of a load. `class_name`: of its latency class. `constrained`: it has a schema."""

    number: int
    prompt_tokens: int
    wanted_tokens: int
    class_name: str = ""
    constrained: bool = False


class StreamClient:
    """Sender of requests in one session. The load begins when `clock` reaches `began_s`."""

    def __init__(
        self,
        session: Any,
        config: OpenLoopConfig,
        model: str,
        clock: Clock = time.monotonic,
        template: RequestTemplate | None = None,
    ) -> None:
        self.began_s = clock()
        self._session = session
        self._config = config
        self._model = model
        self._clock = clock
        self._shape = template or fixed_work(config.temperature)
        self._url = f"{config.url.rstrip('/')}{self._shape.endpoint}"
        limit = self._shape.max_concurrency
        self._gate = asyncio.Semaphore(limit) if limit else None

    def body(self, planned: PlannedRequest) -> bytes:
        """Return the request's body, to be encoded before it is due."""
        return self._shape.body(self._model, planned, self._config.send_objectives)

    async def send(self, planned: PlannedRequest, body: bytes) -> LoadOutcome:
        """Send a request when it is due. Server errors are results and are not raised. Nothing is retried."""
        outcome = LoadOutcome(
            planned.number,
            len(planned.prompt_ids),
            planned.output_len,
            class_name=planned.slo.name if planned.slo else "",
            constrained=planned.schema is not None,
            due_s=planned.at_s,
        )
        headers = self._shape.headers(self._config.api_key, planned, self._config.send_objectives)
        await send_request(
            self._session,
            self._url,
            body,
            headers,
            outcome,
            self.began_s,
            clock=self._clock,
            gate=self._gate,
            texts=self._shape.texts,
        )
        return outcome


def run(config: OpenLoopConfig) -> list[LoadOutcome]:
    """Send all requests; return outcomes in order of arrival. Raise `ConfigError` without aiohttp or a server."""
    check_client()
    return run_planned(config, config.model or first_model(config), draw(config, load_classes(config)))


def run_planned(
    config: OpenLoopConfig, model: str, planned: Sequence[PlannedRequest], template: RequestTemplate | None = None
) -> list[LoadOutcome]:
    """Send these requests; return their outcomes by number."""
    template = template or fixed_work(config.temperature)
    if config.procs == 1:
        outcomes = asyncio.run(send_all(config, model, planned, template))
    else:
        shares = [list(planned[i :: config.procs]) for i in range(min(config.procs, len(planned)))]
        outcomes = _run_processes(config, model, shares, template)
    return sorted(outcomes, key=lambda outcome: outcome.number)


def check_client() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the client needs aiohttp: {install_command('bench')}") from error


class _NotReadyError(ConfigError):
    """Failure that may be over when the server has started."""


def first_model(config: OpenLoopConfig, headers: Mapping[str, str] | None = None, wait_s: float = 0.0) -> str:
    """Return the first model that the server lists. Raise `ConfigError` if it is not ready for `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            return _first_model(config, headers)
        except _NotReadyError:
            if time.monotonic() + READY_RETRY_S > deadline_s:
                raise
        time.sleep(READY_RETRY_S)


def _first_model(config: OpenLoopConfig, headers: Mapping[str, str] | None) -> str:
    every = {**authorization(config.api_key), **(headers or {})}
    try:
        request = urllib.request.Request(f"{config.url.rstrip('/')}/v1/models", headers=every)
        with urllib.request.urlopen(request, timeout=LIST_TIMEOUT_S) as response:
            return str(json.load(response)["data"][0]["id"])
    except urllib.error.HTTPError as error:
        kind = _NotReadyError if error.code >= 500 else ConfigError
        raise kind(f"url: {config.url!r} answered {error.code}: {_error_message(error)}") from error
    except (OSError, ValueError, LookupError) as error:
        kind = _NotReadyError if isinstance(error, OSError) else ConfigError
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        message = f"url: cannot list the models of {config.url!r}: {reason_of(cause)}; is it the address of a server?"
        raise kind(message) from error


def _error_message(error: urllib.error.HTTPError) -> str:
    """Return the message of an error in OpenAI's form, else the reason of its status."""
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, ValueError, LookupError, TypeError):
        return error.reason


def start_time() -> float:
    return time.monotonic() + START_DELAY_S


def client_session(config: OpenLoopConfig) -> Any:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=config.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES, auto_decompress=False
    )


async def send_all(
    config: OpenLoopConfig,
    model: str,
    planned: Sequence[PlannedRequest],
    template: RequestTemplate,
    begin: Clock = start_time,
) -> list[LoadOutcome]:
    """Send requests in this process. `begin` is called once all is ready, and returns the time when the load begins."""
    async with client_session(config) as session:
        client = StreamClient(session, config, model, template=template)
        bodies = [client.body(request) for request in planned]
        # A garbage collection over thousands of chunks would be measured with them.
        gc.collect()
        gc.freeze()
        client.began_s = begin()
        try:
            return list(await asyncio.gather(*map(client.send, planned, bodies)))
        finally:
            gc.unfreeze()


def _run_processes(
    config: OpenLoopConfig, model: str, shares: Sequence[list[PlannedRequest]], template: RequestTemplate
) -> list[LoadOutcome]:
    """Share the requests between processes. The load begins once all of them are ready.

    Processes are spawned, not forked, since the caller may have threads.
    """
    with _processes(config, model, shares, template) as connections:
        outcomes: list[LoadOutcome] = []
        try:
            for connection in connections:
                connection.recv()
            began_s = time.monotonic() + START_DELAY_S
            for connection in connections:
                connection.send(began_s)
            for connection in connections:
                outcomes += connection.recv()
        except EOFError as error:
            raise ClientFailedError("a client process ended without a result") from error
    return outcomes


@contextmanager
def _processes(
    config: OpenLoopConfig, model: str, shares: Sequence[list[PlannedRequest]], template: RequestTemplate
) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # starting it later would unblock signals
    processes, connections = [], []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, config, model, share, template))
            with sigint_blocked():
                process.start()
            theirs.close()  # so that reading fails once the process has ended
            processes.append(process)
            connections.append(ours)
        yield connections
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()


def _worker(
    connection: Connection, config: OpenLoopConfig, model: str, share: list[PlannedRequest], template: RequestTemplate
) -> None:
    """Run one client process: report ready, receive the start time, return outcomes."""

    def begin() -> float:
        connection.send(None)
        return float(connection.recv())  # the monotonic clock is the same for all processes of a machine

    connection.send(asyncio.run(send_all(config, model, share, template, begin)))
