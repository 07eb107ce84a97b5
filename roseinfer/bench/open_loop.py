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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from roseinfer.bench.arrivals import Planned, classes_of, draw
from roseinfer.bench.config import OpenLoopConfig
from roseinfer.core.errors import ConfigError, RoseinferError

Clock = Callable[[], float]

START_DELAY_S = 0.1
LIST_PATIENCE_S = 30.0
READ_BUFFER_BYTES = 2**20
ERROR_CHARACTERS = 300
DONE = b"[DONE]"


class ClientFailedError(RoseinferError):
    """A client process ended without a result."""


@dataclass(slots=True)
class Outcome:
    """What became of one request.

    `due_s`, `start_s`, `end_s`: seconds after the load began. `chunk_s`: when each chunk was read, seconds after the
    request was sent. `output_tokens`: as the server's usage says, else the number of chunks. `ok`: its stream had a
    proper end. `code`: of the error it was refused with. `class_name`: of its objectives. `constrained`: it has a
    schema.
    """

    number: int
    prompt_tokens: int
    wanted_tokens: int
    class_name: str = ""
    constrained: bool = False
    due_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    status: int | None = None
    error: str | None = None
    code: str | None = None
    ok: bool = False
    output_tokens: int = 0
    chunk_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.chunk_s[0]

    @property
    def latency_s(self) -> float:
        return self.chunk_s[-1]

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 if there is no second."""
        return (self.chunk_s[-1] - self.chunk_s[0]) / max(1, self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between chunks."""
        return [later - earlier for earlier, later in pairwise(self.chunk_s)]


class EventReader:
    """Server-sent events out of pieces of a body, cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The contents of the `data:` lines that are complete by now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class StreamClient:
    """Sends requests in one session. The load begins when `clock` says `began_s`."""

    def __init__(self, session: Any, config: OpenLoopConfig, model: str, clock: Clock = time.monotonic) -> None:
        self.began_s = clock()
        self._session = session
        self._config = config
        self._model = model
        self._clock = clock
        self._url = f"{config.url.rstrip('/')}/v1/completions"
        self._headers = {"Content-Type": "application/json", **authorization(config.api_key)}

    def body(self, planned: Planned) -> bytes:
        """The request as it is sent: encoded before it is due."""
        told = planned.slo if self._config.send_objectives else None
        return json.dumps(
            {
                "model": self._model,
                "prompt": planned.prompt_ids,
                "max_tokens": planned.output_len,
                "temperature": self._config.temperature,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **_response_format(planned.schema),
                **(told.body if told else {}),
            }
        ).encode()

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
        headers = self._headers
        if planned.slo and self._config.send_objectives:
            headers = {**headers, **planned.slo.headers}
        await asyncio.sleep(max(0.0, self.began_s + planned.at_s - self._clock()))
        sent_s = self._clock()
        outcome.start_s = sent_s - self.began_s
        try:
            async with self._session.post(self._url, data=body, headers=headers) as response:
                outcome.status = response.status
                if response.status == 200:
                    await self._read(response, outcome, sent_s)
                else:
                    text = await response.text()
                    outcome.error, outcome.code = text[:ERROR_CHARACTERS], error_code(text)
        except Exception as error:
            outcome.error = repr(error)[:ERROR_CHARACTERS]
        outcome.end_s = self._clock() - self.began_s
        return outcome

    async def _read(self, response: Any, outcome: Outcome, sent_s: float) -> None:
        reader = EventReader()
        usage: int | None = None
        async for data in response.content.iter_any():
            now_s = self._clock() - sent_s
            for event in reader.feed(data):
                if event == DONE:
                    outcome.ok = True
                    break
                if b'"error"' in event[:12]:
                    outcome.error = event[:ERROR_CHARACTERS].decode(errors="replace")
                    break
                tokens, chunk = read_event(event)
                usage = usage if tokens is None else tokens
                if chunk:
                    outcome.chunk_s.append(now_s)
            if outcome.ok or outcome.error is not None:
                break
        outcome.output_tokens = len(outcome.chunk_s) if usage is None else usage


def _response_format(schema: dict[str, Any] | None) -> dict[str, Any]:
    if schema is None:
        return {}
    named = {"name": "load", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def error_code(text: str) -> str | None:
    """The code that an error's body gives as its reason, if it does."""
    try:
        code = json.loads(text)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
    return None if code is None else str(code)[:ERROR_CHARACTERS]


def read_event(event: bytes) -> tuple[int | None, bool]:
    """(completion tokens if the event has a usage, whether it has a choice). Most events are not even parsed."""
    if b'"usage":{' not in event and b'"usage": {' not in event:
        return None, True
    content = json.loads(event)
    usage = content.get("usage")
    return usage["completion_tokens"] if usage else None, bool(content.get("choices"))


def run(config: OpenLoopConfig) -> list[Outcome]:
    """All requests, in order of arrival. Raises `ConfigError` without aiohttp, or if no server answers."""
    check_client()
    model = config.model or first_model(config)
    planned = draw(config, classes_of(config))
    if config.procs == 1:
        outcomes = asyncio.run(_send_all(config, model, planned, lambda: time.monotonic() + START_DELAY_S))
    else:
        shares = [planned[i :: config.procs] for i in range(min(config.procs, len(planned)))]
        outcomes = _run_processes(config, model, shares)
    return sorted(outcomes, key=lambda outcome: outcome.number)


def check_client() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ConfigError("the client needs aiohttp: pip install 'roseinfer[bench]'") from error


def first_model(config: OpenLoopConfig) -> str:
    """The first model that the server lists. Raises `ConfigError`."""
    request = urllib.request.Request(f"{config.url.rstrip('/')}/v1/models", headers=authorization(config.api_key))
    try:
        with urllib.request.urlopen(request, timeout=LIST_PATIENCE_S) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError, urllib.error.URLError) as error:
        raise ConfigError(f"url: {config.url} lists no model ({error}); is it the address of a server?") from error


def authorization(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _send_all(config: OpenLoopConfig, model: str, planned: Sequence[Planned], begin: Clock) -> list[Outcome]:
    """`begin` is called once everything is ready, and says when the load begins."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=config.timeout)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=READ_BUFFER_BYTES, auto_decompress=False
    ) as session:
        client = StreamClient(session, config, model)
        bodies = [client.body(request) for request in planned]
        # What is there stays: a collection among thousands of chunks would be measured with them.
        gc.collect()
        gc.freeze()
        client.began_s = begin()
        try:
            return list(await asyncio.gather(*map(client.send, planned, bodies)))
        finally:
            gc.unfreeze()


def _run_processes(config: OpenLoopConfig, model: str, shares: Sequence[list[Planned]]) -> list[Outcome]:
    """A process for each share. The load begins once all of them are ready.

    They are started afresh, not forked, so that the caller may have threads.
    """
    with _processes(config, model, shares) as connections:
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
def _processes(config: OpenLoopConfig, model: str, shares: Sequence[list[Planned]]) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    processes, connections = [], []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, config, model, share))
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


def _worker(connection: Connection, config: OpenLoopConfig, model: str, share: list[Planned]) -> None:
    """One client process: says that it is ready, is told when to begin, returns its outcomes."""

    def begin() -> float:
        connection.send(None)
        return float(connection.recv())  # one clock for all processes of a machine

    connection.send(asyncio.run(_send_all(config, model, share, begin)))
