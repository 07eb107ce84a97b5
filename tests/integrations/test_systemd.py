"""Notifications for systemd, from real processes on a socket like systemd's."""

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

from roseinfer.integrations.systemd import SystemdNotifier
from roseinfer.server.hosting import Reload
from tests.server.real_server import PATIENCE_S, RealServer

REQUESTS = 6
COST = {"cost": {"step_s": 0.002, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}}


class Manager:
    """Service manager. Reads at once like systemd, because a socket buffers few datagrams."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()  # a short path
        self.address = f"{self._folder.name}/notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._received: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while said := self._socket.recv(4096):
            self._received.put(said.decode())

    def next(self, skip: str = "") -> list[str]:
        """Return the lines of the next datagram that does not begin with `skip`."""
        while True:
            lines = self._received.get(timeout=PATIENCE_S).split("\n")
            if not skip or not lines[0].startswith(skip):
                return lines

    def silent(self) -> bool:
        """Return True if no further datagram has arrived."""
        self._send(b"end")
        return self._received.get(timeout=PATIENCE_S) == "end"

    def close(self) -> None:
        self._send(b"")
        self._thread.join()
        self._socket.close()
        self._folder.cleanup()

    def _send(self, data: bytes) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(data, self.address)


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    yield made
    made.close()


def test_a_single_process_reports_ready_and_stopping(manager: Manager):
    command = [sys.executable, "-m", "tests.server.serve_process", "0", "5"]
    environment = {**os.environ, "NOTIFY_SOCKET": manager.address}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("load\n")
        process.stdin.flush()
        status = process.stdout.readline().partition(";")[0]
        assert manager.next() == ["READY=1", f"STATUS={status}"]
        process.send_signal(signal.SIGTERM)
        assert manager.next()[0] == "STOPPING=1"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    assert manager.silent(), "no watchdog was requested"


def test_a_server_of_several_processes_reports_ready_reloading_and_stopping(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """One start tests two features: the traces of all processes reach the collector before the server ends, too."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="traces need the extra 'otel'")
    from tests.integrations.otel.collector import Collector

    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST))
    monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
    monkeypatch.setenv("WATCHDOG_USEC", "200000")
    with Collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url.removesuffix("/v1/traces"))
        with RealServer("--device", "priced", "--cost", str(cost), "--api-workers", "2") as server:
            assert manager.next() == ["READY=1", f"STATUS=tiny is served on {server.url}"]
            assert manager.next() == manager.next() == ["WATCHDOG=1"], "and again"
            server.process.send_signal(signal.SIGHUP)
            reloading, at = manager.next(skip="WATCHDOG")
            assert reloading == "RELOADING=1" and int(at.removeprefix("MONOTONIC_USEC=")) > 0
            assert manager.next(skip="WATCHDOG") == ["READY=1"]
            assert server.metrics("roseinfer:engine_restarts_total") == [1.0], "the engine has been restarted by then"
            clients = [server.client() for _ in range(REQUESTS)]  # connections that stay go to now one, now the other
            for client in clients:
                client.completions.create(model="tiny", prompt="x", max_tokens=2)
            for client in clients:
                client.close()
            server.process.send_signal(signal.SIGTERM)
            assert manager.next(skip="WATCHDOG")[0] == "STOPPING=1"
            assert server.exit_code() == 0
    names = [span.name for span in collector.spans]
    assert names.count("text_completion tiny") == names.count("queue") == names.count("decode") == REQUESTS
    assert len({resource["service.instance.id"] for resource in collector.resources}) == 2, "of each process"


class Restarts:
    """Restarts that last until the test ends them."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def rolling_restart(self) -> None:
        await self.done.wait()


def test_calls_out_of_order_send_nothing(manager: Manager):
    async def run() -> None:
        notifier = SystemdNotifier({"NOTIFY_SOCKET": manager.address})
        restarts = Restarts()
        reload = Reload(restarts.rolling_restart, notifier)
        notifier.reloading()
        assert manager.silent(), "not ready yet"
        notifier.ready("two\nlines")
        assert manager.next() == ["READY=1", "STATUS=two lines"]
        reload()
        reload()
        await asyncio.sleep(0)
        assert [manager.next()[0], manager.next()[0]] == ["RELOADING=1"] * 2
        restarts.done.set()
        await asyncio.sleep(0.01)
        assert manager.next() == ["READY=1"] and manager.silent(), "once, when the last has ended"
        restarts.done.clear()
        reload()
        await asyncio.sleep(0)
        assert manager.next(skip="READY")[0] == "RELOADING=1"
        notifier.stopping()
        restarts.done.set()
        await asyncio.sleep(0.01)
        assert manager.next()[0] == "STOPPING=1" and manager.silent(), "not ready any more"
        notifier.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "environment",
    [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "/nowhere/notify"}],
)
def test_without_a_listener_the_server_works(environment: dict[str, str]):
    async def run() -> None:
        notifier = SystemdNotifier({**environment, "WATCHDOG_USEC": "0"})
        notifier.ready("x")
        notifier.stopping()
        notifier.close()

    asyncio.run(run())


def test_an_abstract_address_and_the_watchdog_of_another_process():
    async def run() -> None:
        name = f"roseinfer-test-{os.getpid()}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            try:
                heard.bind(f"\0{name}")
            except OSError:
                pytest.skip("only Linux has abstract addresses")
            heard.setblocking(False)
            given = {"NOTIFY_SOCKET": f"@{name}", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid() + 1)}
            notifier = SystemdNotifier(given)
            notifier.ready("x")
            await asyncio.sleep(0.01)
            assert heard.recv(100) == b"READY=1\nSTATUS=x"
            with pytest.raises(BlockingIOError):
                heard.recv(100)

    asyncio.run(run())
