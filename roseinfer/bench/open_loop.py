"""Open-loop load on an OpenAI-compatible server, shared by several client processes.

Every request goes out when it is due, whatever has become of those before it, and the time of each chunk of its stream
is kept. Needs aiohttp (the `bench` extra).
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

from roseinfer.bench.arrivals import Planned, classes_of, draw
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.bench.exchange import Clock, Exchange, exchange
from roseinfer.bench.requests import RequestShape, authorization, fixed_work
from roseinfer.core.errors import ConfigError, RoseinferError
from roseinfer.core.interrupts import sigint_blocked

START_DELAY_S = 0.1
LIST_PATIENCE_S = 30.0
READ_BUFFER_BYTES = 2**20


class ClientFailedError(RoseinferError):
    """A client process ended without a result."""


@dataclass(slots=True)
class Outcome(Exchange):
    """What became of one request of a load. `class_name`: of its objectives. `constrained`: it has a schema."""

    number: int
    prompt_tokens: int
    wanted_tokens: int
    class_name: str = ""
    constrained: bool = False


class StreamClient:
    """Sends requests in one session. The load begins when `clock` says `began_s`."""

    def __init__(
        self,
        session: Any,
        config: OpenLoopConfig,
        model: str,
        clock: Clock = time.monotonic,
        shape: RequestShape | None = None,
    ) -> None:
        self.began_s = clock()
        self._session = session
        self._config = config
        self._model = model
        self._clock = clock
        self._shape = shape or fixed_work(config.temperature)
        self._url = f"{config.url.rstrip('/')}{self._shape.endpoint}"
        limit = self._shape.max_concurrency
        self._gate = asyncio.Semaphore(limit) if limit else None

    def body(self, planned: Planned) -> bytes:
        """The request as it is sent: encoded before it is due."""
        return self._shape.body(self._model, planned, self._config.send_objectives)

    async def send(self, planned: Planned, body: bytes) -> Outcome:
        """Never raises for what the server does: that is a result. Nothing is tried twice."""
        outcome = Outcome(
            planned.number,
            len(planned.prompt_ids),
            planned.output_len,
            class_name=planned.slo.name if planned.slo else "",
            constrained=planned.schema is not None,
            due_s=planned.at_s,
        )
        headers = self._shape.headers(self._config.api_key, planned, self._config.send_objectives)
        await exchange(
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


def run(config: OpenLoopConfig) -> list[Outcome]:
    """All requests, in order of arrival. Raises `ConfigError` without aiohttp, or if no server answers."""
    check_client()
    return run_planned(config, config.model or first_model(config), draw(config, classes_of(config)))


def run_planned(
    config: OpenLoopConfig, model: str, planned: Sequence[Planned], shape: RequestShape | None = None
) -> list[Outcome]:
    """These requests, by number."""
    shape = shape or fixed_work(config.temperature)
    if config.procs == 1:
        outcomes = asyncio.run(send_all(config, model, planned, shape))
    else:
        shares = [list(planned[i :: config.procs]) for i in range(min(config.procs, len(planned)))]
        outcomes = _run_processes(config, model, shares, shape)
    return sorted(outcomes, key=lambda outcome: outcome.number)


def check_client() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("the client needs aiohttp: pip install 'roseinfer[bench]'") from error


def first_model(config: OpenLoopConfig, headers: Mapping[str, str] | None = None) -> str:
    """The first model that the server lists. Raises `ConfigError`."""
    every = {**authorization(config.api_key), **(headers or {})}
    try:
        request = urllib.request.Request(f"{config.url.rstrip('/')}/v1/models", headers=every)
        with urllib.request.urlopen(request, timeout=LIST_PATIENCE_S) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError, urllib.error.URLError) as error:
        raise ConfigError(f"url: {config.url} lists no model ({error}); is it the address of a server?") from error


def soon() -> float:
    return time.monotonic() + START_DELAY_S


def client_session(config: OpenLoopConfig) -> Any:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=config.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES, auto_decompress=False
    )


async def send_all(
    config: OpenLoopConfig, model: str, planned: Sequence[Planned], shape: RequestShape, begin: Clock = soon
) -> list[Outcome]:
    """`begin` is called once everything is ready, and says when the load begins."""
    async with client_session(config) as session:
        client = StreamClient(session, config, model, shape=shape)
        bodies = [client.body(request) for request in planned]
        # What is there stays: a collection among thousands of chunks would be measured with them.
        gc.collect()
        gc.freeze()
        client.began_s = begin()
        try:
            return list(await asyncio.gather(*map(client.send, planned, bodies)))
        finally:
            gc.unfreeze()


def _run_processes(
    config: OpenLoopConfig, model: str, shares: Sequence[list[Planned]], shape: RequestShape
) -> list[Outcome]:
    """A process for each share. The load begins once all of them are ready.

    They are started afresh, not forked, so that the caller may have threads.
    """
    with _processes(config, model, shares, shape) as connections:
        outcomes: list[Outcome] = []
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
    config: OpenLoopConfig, model: str, shares: Sequence[list[Planned]], shape: RequestShape
) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    resource_tracker.ensure_running()  # its start would let signals in again
    processes, connections = [], []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, config, model, share, shape))
            with sigint_blocked():
                process.start()
            theirs.close()  # or nobody would notice its end
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
    connection: Connection, config: OpenLoopConfig, model: str, share: list[Planned], shape: RequestShape
) -> None:
    """One client process: says that it is ready, is told when to begin, returns its outcomes."""

    def begin() -> float:
        connection.send(None)
        return float(connection.recv())  # one clock for all processes of a machine

    connection.send(asyncio.run(send_all(config, model, share, shape, begin)))
