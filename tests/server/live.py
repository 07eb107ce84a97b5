"""A real uvicorn on a free port, in a thread, around the application and a fake engine."""

import asyncio
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn

from roseinfer.core.config.server import ServerConfig
from roseinfer.engine.api import EngineInfo
from roseinfer.server.app import Application, ModelParts, build_app, parts_of
from roseinfer.server.hosting import listen, new_event_loop
from roseinfer.server.http.connection import limited_protocol
from roseinfer.server.http.limits import Limits
from roseinfer.server.observe.tracing import Tracing
from roseinfer.server.request.service import Service
from roseinfer.server.response_store.start import response_file
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, FakeEngine

Result = TypeVar("Result")
PATIENCE_S = 60.0


class LiveServer:
    """Use as a context manager. `call` runs a function on the server's event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ServerConfig | None = None,
        limits: Limits | None = None,
        tracing: Tracing | None = None,
        info: EngineInfo = INFO,
    ) -> None:
        self.config = config or ServerConfig()
        self.limits = limits or Limits.of(self.config)
        self.tokenizer = tokenizer
        self.info = info
        self.engine: FakeEngine
        self.service: Service
        self._tracing = tracing
        self._loop: asyncio.AbstractEventLoop
        self._server: uvicorn.Server
        self.listener = listen(ServerConfig(port=0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = tempfile.TemporaryDirectory()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.engine = await self._start_engine()
        app = self._application(response_file(self.config, Path(self._folder.name)))
        self.service = app.state.service
        self.service.limits = self.limits
        protocol = limited_protocol(self.limits)
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._loop.call_later(0.01, self._notice_start)
        await self._server.serve([self.listener])
        await self.engine.close()

    async def _start_engine(self) -> Any:
        return FakeEngine(self.tokenizer, self.info)

    def _application(self, stored: Path | None) -> Application:
        parts = parts_of([ModelParts(self.config, "fake")], response_file=stored, tracing=self._tracing)
        parts.service.attach(self.engine, self.tokenizer)
        return build_app(parts)

    def _notice_start(self) -> None:
        if self._server.started:
            self._up.set()
        else:
            self._loop.call_later(0.01, self._notice_start)

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        assert self._up.wait(PATIENCE_S)
        self.http = self.client()
        return self

    def __exit__(self, *exc: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._folder.cleanup()

    def call(self, function: Callable[[], Result]) -> Result:
        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def connections(self) -> list[Any]:
        """uvicorn's objects of those that are open."""
        return list(self._server.server_state.connections)

    def client(self, **options: Any) -> httpx.Client:
        # Loading the certificates is most of the cost of a client.
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, verify=False, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def status_with(self, header: str) -> int:
        """The status of a completion sent with a header that no client library would send."""
        with self.connect() as connection:
            connection.sendall(http_post("/v1/completions", {"prompt": "x"}, header))
            return int(connection.recv(12)[9:])

    def metric(self, name: str, **labels: str) -> float:
        """The value of the first sample that has these labels; 0 if there is none."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition, evaluated on the server's loop, is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.call(condition):
            assert time.monotonic() < deadline, "never came true"
            time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The data of server-sent events; `[DONE]` stays a string, comments are left out."""
    data = [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def read_error(connection: socket.socket) -> bytes:
    """An answer up to the end of its error body, whether or not the connection stays open."""
    raw = b""
    while not raw.endswith(b"}}"):
        part = connection.recv(65536)
        assert part, f"the connection was closed behind {raw!r}"
        raw += part
    return raw


def http_post(path: str, body: Any, header: str = "x-none: 1") -> bytes:
    """`header`: lines beside those that each request has."""
    data = json.dumps(body).encode()
    always = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    head = f"POST {path} HTTP/1.1\r\n{always}\r\n{header}\r\n\r\n"
    return head.encode() + data
