"""`serve` as a process: loading, readiness, draining, signals."""

import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.server.hosting import listen
from tests.server.live import PATIENCE_S, events

BODY = {"prompt": "x", "max_tokens": 3}


class Process:
    def __init__(self, shutdown_timeout: float = 60.0, port: int = 0, stdout: Any = subprocess.PIPE) -> None:
        # Bound until the end of the process, which listens there after its imports: nobody gets the port meanwhile.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port = port or self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "tests.server.serve_process", str(self.port), str(shutdown_timeout)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._reserved.close()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ready(self) -> str:
        """Lets the engine load; returns the announcement."""
        assert self.process.stdout is not None
        self.say("load")
        return self.process.stdout.readline() + self.process.stdout.readline()

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str, str]:
        """(exit code, what was left on stdout, stderr)."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def status(self, path: str) -> tuple[int, str | None]:
        """(status, code of the error)."""
        answer = httpx.get(self.url + path, timeout=PATIENCE_S)
        return answer.status_code, None if answer.is_success else answer.json()["error"]["code"]

    def until(self, path: str, expected: tuple[int, str | None]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                if self.status(path) == expected:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"{path} never answered {expected}"
            time.sleep(0.02)


class Background:
    """A POST in a thread; `text` and `status` once `join` has returned."""

    def __init__(self, process: Process, stream: bool) -> None:
        self.began = threading.Event()
        self.text = ""
        self.status = 0
        self.cut = False
        self._thread = threading.Thread(target=self._run, args=(process.url, BODY | {"stream": stream}))
        self._thread.start()

    def _run(self, url: str, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=PATIENCE_S) as answer:
                self.status = answer.status_code
                for part in answer.iter_text():
                    self.text += part
                    self.began.set()
        except httpx.RemoteProtocolError:
            self.cut = True

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    made: list[Process] = []

    def begin(**options: Any) -> Process:
        made.append(Process(**options))
        return made[-1]

    yield begin
    for process in made:
        process.close()


def running(process: Process) -> tuple[Background, Background]:
    """A stream that has begun and a plain request, both held by the engine."""
    stream, plain = Background(process, stream=True), Background(process, stream=False)
    assert stream.began.wait(PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while httpx.get(process.url + "/load", timeout=PATIENCE_S).json() != {"server_load": 2}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return stream, plain


def test_a_greeting_that_cannot_be_written_does_not_end_the_server(start: Callable[..., Process]) -> None:
    with open("/dev/full", "w") as full:
        process = start(stdout=full)
    process.say("load")
    process.until("/ready", (200, None))
    process.signal()
    code, _, errors = process.end()
    assert code == 0 and "cannot write to standard output: No space left on device" in errors


def test_loading_then_ready_then_the_command_to_try(start: Callable[..., Process]) -> None:
    process = start()
    process.until("/health", (503, "loading"))
    for path in ("/ready", "/v1/models", "/v1/requests", "/ping"):
        assert process.status(path) == (503, "loading")
    refused = httpx.post(process.url + "/v1/completions", json=BODY, timeout=PATIENCE_S)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    assert httpx.get(process.url + "/metrics", timeout=PATIENCE_S).status_code == 200
    announced, command = process.ready().splitlines()
    assert process.url in announced
    assert process.status("/health") == process.status("/ready") == (200, None)
    process.say("release")
    if shutil.which("curl"):
        done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=PATIENCE_S)
        assert '"chat.completion"' in done.stdout
    process.signal()
    code, out, err = process.end()
    assert (code, out) == (0, "engine closed\n")
    assert [line for line in err.splitlines() if "request=" not in line] == [], "a clean run says nothing else"


def test_sigterm_drains(start: Callable[..., Process]) -> None:
    process = start()
    process.ready()
    stream, plain = running(process)
    process.signal()
    process.until("/ready", (503, "draining"))
    assert process.status("/health") == (200, None)
    refused = httpx.post(process.url + "/v1/completions", json=BODY, timeout=PATIENCE_S)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    process.say("release")
    stream.join()
    plain.join()
    assert events(stream.text)[-1] == "[DONE]" and not stream.cut
    assert plain.status == 200 and '"finish_reason":"length"' in plain.text
    code, out, _ = process.end()
    assert (code, out) == (0, "engine closed\n")


def cut_short(stream: Background, plain: Background) -> None:
    stream.join()
    plain.join()
    assert stream.cut and events(stream.text)[-1]["error"]["code"] == "draining"
    assert plain.status == 503 and '"draining"' in plain.text


def test_what_outlasts_the_drain_is_cut(start: Callable[..., Process]) -> None:
    process = start(shutdown_timeout=0.2)
    process.ready()
    requests = running(process)
    process.signal()
    cut_short(*requests)
    code, out, err = process.end()
    assert (code, out) == (0, "engine closed\n")
    assert err.count("finish=abort") == 2 and "without completing response" not in err


def test_a_second_signal_stops_at_once(start: Callable[..., Process]) -> None:
    process = start(shutdown_timeout=1000.0)
    process.ready()
    requests = running(process)
    process.signal()
    process.until("/ready", (503, "draining"))
    process.signal()
    cut_short(*requests)
    assert process.end()[:2] == (0, "engine closed\n")


def test_a_signal_while_loading(start: Callable[..., Process]) -> None:
    process = start()
    process.until("/health", (503, "loading"))
    process.signal()
    assert process.end() == (0, "", "")


def test_an_engine_that_does_not_start(start: Callable[..., Process]) -> None:
    process = start()
    process.until("/health", (503, "loading"))
    process.say("fail")
    code, out, err = process.end()
    assert (code, out, err) == (1, "", "ModelNotFoundError: no such model\n")


def test_an_address_in_use(start: Callable[..., Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = start(port=taken.getsockname()[1]).end()
    assert code == 1 and err.startswith("ConfigError: cannot listen on 127.0.0.1 port") and "--port" in err


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "é" * 70])
def test_an_address_of_no_machine_or_another_one(host: str) -> None:
    with pytest.raises(ConfigError) as raised:
        listen(ServerConfig(host=host, port=0))
    message = str(raised.value)
    assert message.startswith(f"cannot listen on {host} port 0: ") and "Errno" not in message
    assert message.endswith("; --host must be an address of this machine, such as 127.0.0.1")
