"""What a service manager hears: from real processes, on a socket as systemd has one."""

import asyncio
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from roseinfer.server.hosting import Reload
from roseinfer.server.service_manager import ServiceManager
from tests.server.real_server import PATIENCE_S, RealServer

REQUESTS = 6
COST = {"cost": {"step_s": 0.002, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}}


class Ear:
    """Who is told. Reads at once, as a manager does: few datagrams find room in a socket."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()  # a short path
        self.address = f"{self._folder.name}/notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._heard: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while said := self._socket.recv(4096):
            self._heard.put(said.decode())

    def next(self, skip: str = "") -> list[str]:
        """The lines of the next datagram, of those that do not begin with `skip`."""
        while True:
            lines = self._heard.get(timeout=PATIENCE_S).split("\n")
            if not skip or not lines[0].startswith(skip):
                return lines

    def silent(self) -> bool:
        """Nothing has been said that nobody asked for."""
        self._send(b"end")
        return self._heard.get(timeout=PATIENCE_S) == "end"

    def close(self) -> None:
        self._send(b"")
        self._thread.join()
        self._socket.close()
        self._folder.cleanup()

    def _send(self, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(data, self.address)


@pytest.fixture
def ear() -> Iterator[Ear]:
    made = Ear()
    yield made
    made.close()


def test_a_process_that_does_all_says_when_it_serves_and_stops(ear: Ear):
    command = [sys.executable, "-m", "tests.server.serve_process", "0", "5"]
    environment = {**os.environ, "NOTIFY_SOCKET": ear.address}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("load\n")
        process.stdin.flush()
        status = process.stdout.readline().partition(";")[0]
        assert ear.next() == ["READY=1", f"STATUS={status}"]
        process.send_signal(signal.SIGTERM)
        assert ear.next()[0] == "STOPPING=1"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert ear.silent(), "nothing asked for signs of life"


def test_a_server_of_several_processes_says_when_it_serves_reloads_and_stops(
    ear: Ear, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """One start for two of an operator's wishes: traces of all of its processes are with the collector at its end."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces need the extra 'otel'")
    from tests.server.collector import Collector

    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST))
    monkeypatch.setenv("NOTIFY_SOCKET", ear.address)
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.removesuffix("/v1/traces"))
        with RealServer("--device", "priced", "--cost", str(cost), "--api-workers", "2") as server:
            assert ear.next() == ["READY=1", f"STATUS=tiny is served on {server.url}"]
            assert ear.next() == ear.next() == ["WATCHDOG=1"], "and again"
            server.process.send_signal(signal.SIGHUP)
            reloading, at = ear.next(skip="WATCHDOG")
            assert reloading == "RELOADING=1" and int(at.removeprefix("MONOTONIC_USEC=")) > 0
            assert ear.next(skip="WATCHDOG") == ["READY=1"]
            assert server.metrics("roseinfer:engine_restarts_total") == [1.0], "the engine has been restarted by then"
            clients = [server.client() for _ in range(REQUESTS)]  # connections that stay go to now one, now the other
            for client in clients:
                client.completions.create(model="tiny", prompt="x", max_tokens=2)
            for client in clients:
                client.close()
            server.process.send_signal(signal.SIGTERM)
            assert ear.next(skip="WATCHDOG")[0] == "STOPPING=1"
            assert server.exit_code() == 0
    names = [span.name for span in collector.spans]
    assert names.count("text_completion tiny") == names.count("queue") == names.count("decode") == REQUESTS
    assert len({resource["service.instance.id"] for resource in collector.resources}) == 2, "of each process"


class Crew:
    """Rolls until it is told that it has."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def roll(self) -> None:
        await self.done.wait()


def test_words_out_of_turn(ear: Ear):
    async def run() -> None:
        manager = ServiceManager({"NOTIFY_SOCKET": ear.address})
        crew = Crew()
        reload = Reload(crew, manager)
        manager.reloading()
        assert ear.silent(), "it does not serve yet"
        manager.ready("two\nlines")
        assert ear.next() == ["READY=1", "STATUS=two lines"]
        reload()
        reload()
        await asyncio.sleep(0)
        assert [ear.next()[0], ear.next()[0]] == ["RELOADING=1"] * 2
        crew.done.set()
        await asyncio.sleep(0.01)
        assert ear.next() == ["READY=1"] and ear.silent(), "once, when the last has ended"
        crew.done.clear()
        reload()
        await asyncio.sleep(0)
        assert ear.next(skip="READY")[0] == "RELOADING=1"
        manager.stopping()
        crew.done.set()
        await asyncio.sleep(0.01)
        assert ear.next()[0] == "STOPPING=1" and ear.silent(), "it is not ready any more"
        manager.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nowhere/notify"}],
)
def test_without_somebody_who_listens_all_goes_on(environment: dict[str, str]):
    async def run() -> None:
        manager = ServiceManager({**environment, "WATCHDOG_USEC": "0"})
        manager.ready("x")
        manager.stopping()
        manager.close()

    asyncio.run(run())


def test_an_abstract_address_and_another_ones_watchdog():
    async def run() -> None:
        name = f"roseinfer-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            try:
                heard.bind(f"\0{name}")
            except OSError:
                pytest.skip("only Linux has abstract addresses")
            heard.setblocking(False)
            given = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid() + 1)}
            manager = ServiceManager(given)
            manager.ready("x")
            await asyncio.sleep(0.01)
            assert heard.recv(100) == b"READY=1\nSTATUS=x"
            with pytest.raises(BlockingIOError):
                heard.recv(100)

    asyncio.run(run())
