"""`roseinfer serve --engines` in front of two `roseinfer engine`, as clients, operators and strangers see them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.process_table import children, command_line
from tests.helpers.remote import write_certificate
from tests.server.real_server import PATIENCE_S, RealServer, priced, until

STREAMS, TOKENS = 6, 80


class Front(RealServer):
    """A server without engines of its own."""

    fixed = ("--port", "0", "--api-workers", "1")


class RemoteEngine:
    """A `roseinfer engine` on a free port."""

    def __init__(self, *options: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close
        command = [sys.executable, "-m", "roseinfer.cli", "engine", "--bind", "127.0.0.1:0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True)
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert " waits for servers on 127.0.0.1:" in said, self.log()
        self.address = said.split()[-1]

    @property
    def engine(self) -> int:
        """Return the engine's process."""
        [found] = [pid for pid in children(self.process.pid) if "remote.engine_process" in command_line(pid)]
        return found

    def log(self) -> str:
        # Not by `seek`: the server, which writes at the same position, would overwrite its log.
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.communicate()
            self._log.close()


@dataclass
class Hosts:
    engines: list[RemoteEngine]
    tls: Path
    server: Front


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    certificates = write_certificate(folder / "tls")
    tls = ("--tls-dir", str(certificates))
    engines = [RemoteEngine(*tls, *priced(folder, 0.004)) for _ in range(2)]
    try:
        with Front("--engines", ",".join(each.address for each in engines), *tls) as server:
            yield Hosts(engines, certificates, server)
    finally:
        for each in engines:
            each.close()


def asked(i: int) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": f"def f{i}(x):\n", "max_tokens": TOKENS, "seed": i, "temperature": i % 2,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses that a process listens on, according to the kernel."""
    found = set()
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_nothing_listens_but_on_the_address_that_was_given(hosts: Hosts) -> None:
    for each in hosts.engines:
        host, _, port = each.address.rpartition(":")
        assert listening(each.process.pid) == {(host, int(port))}
        assert listening(each.engine) == set(), "connections are passed on to it"


def test_clients_are_served_and_an_engine_that_is_killed_is_not_noticed(hosts: Hosts) -> None:
    server = hosts.server
    with server.client() as client:
        expected = [client.completions.create(**asked(i)).choices[0].text for i in range(STREAMS)]
        streams = [client.completions.create(**asked(i), stream=True) for i in range(STREAMS)]
        texts = [next(stream).choices[0].text for stream in streams]
        os.kill(hosts.engines[0].engine, signal.SIGKILL)
        for i, stream in enumerate(streams):
            texts[i] += "".join(chunk.choices[0].text for chunk in stream)
        assert texts == expected
    until(lambda: server.metrics("roseinfer:engine_up") == [2.0])
    assert server.metrics("roseinfer:engine_deaths_total", engine="0") == [1.0]
    assert server.metrics("roseinfer:slo_requests_total") == [2.0 * STREAMS], "none is counted twice"
    for engine in ("0", "1"):
        assert server.metrics("roseinfer:step_time_seconds_count", engine=engine)[0] > 0
        # Who sends requests, and who tells of the engines; each of them connects again by itself.
        until(lambda engine=engine: server.metrics("roseinfer:engine_clients", engine=engine) == [2.0])
    body = server.fresh("/health").json()
    assert [engine["state"] for engine in body["engines"]] == ["ready", "ready"]


def test_sighup_restarts_all_engines_under_requests(hosts: Hosts) -> None:
    server = hosts.server
    before = [each.engine for each in hosts.engines]
    with server.client(max_retries=0) as client:
        expected = [client.completions.create(**asked(i)).choices[0].text for i in range(STREAMS)]
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "rolling restart: the engine at" in server.log())
        server.process.send_signal(signal.SIGHUP)
        rounds = 0
        while "rolling restart: done" not in server.log():
            streams = [client.completions.create(**asked(i), stream=True) for i in range(STREAMS)]
            assert ["".join(chunk.choices[0].text for chunk in stream) for stream in streams] == expected
            rounds += 1
        assert rounds > 0 and server.log().count("a rolling restart is in progress already") == 1
    assert not {*before} & {each.engine for each in hosts.engines}
    for each in hosts.engines:
        assert each.log().count("a server at 127.0.0.1 asks for a restart of the engine") == 1
        until(lambda each=each: each.log().count("rolling restart: done") == 1)


def test_a_stranger_is_rejected_counted_and_logged_once(hosts: Hosts) -> None:
    server, engine = hosts.server, hosts.engines[1]
    host, _, port = engine.address.rpartition(":")

    def refused() -> float:
        return sum(server.metrics("roseinfer:engine_refused_peers_total", engine="1"))

    before = refused()  # on a busy machine, one of the server's own connections may have been too slow
    for _ in range(5):
        with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" + bytes(80))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    until(lambda: refused() >= before + 5)
    assert engine.log().count("a connection from 127.0.0.1 was rejected: it uses another protocol") == 1


def test_the_private_key_is_nowhere(hosts: Hosts) -> None:
    shown = [hosts.server.fresh(path).text for path in ("/health", "/metrics", "/v1/models")]
    shown += [hosts.server.log(), *(each.log() for each in hosts.engines)]
    pids = [hosts.server.process.pid, *(pid for each in hosts.engines for pid in (each.process.pid, each.engine))]
    shown += [command_line(pid) + Path(f"/proc/{pid}/environ").read_text() for pid in pids]
    secret = (hosts.tls / "tls.key").read_text().splitlines()[1:-1]
    assert secret and not [text for text in shown for line in secret if line in text]


def test_a_certificate_of_another_ca_ends_the_start_with_one_line(hosts: Hosts, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "roseinfer.cli", "serve", *Front.fixed]
    command += ["--engines", hosts.engines[0].address, "--tls-dir", str(write_certificate(tmp_path, "foreign"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    line = f"roseinfer: error: cannot reach the engine at {hosts.engines[0].address}: its certificate is not signed by"
    assert done.stderr.splitlines()[-1].startswith(line)


def test_an_engine_that_is_to_end_lets_its_requests_finish(hosts: Hosts) -> None:
    server, engine = hosts.server, hosts.engines[0]
    with server.client() as client:
        streams = [client.completions.create(**asked(i), stream=True) for i in range(STREAMS)]
        begun = [next(stream) for stream in streams]
        engine.process.terminate()
        ends = [[first, *stream][-1].choices[0].finish_reason for first, stream in zip(begun, streams, strict=True)]
        assert ends == ["length"] * STREAMS
        assert engine.process.wait(PATIENCE_S) == 0
        until(lambda: server.metrics("roseinfer:engine_up", engine="0") == [0.0])
        assert client.completions.create(**asked(0)).choices[0].finish_reason == "length"
    hosts.engines[1].process.kill()
    with server.client(max_retries=0) as client, pytest.raises(openai.APIStatusError) as refused:
        until(lambda: server.fresh("/ready").status_code == 503)
        client.completions.create(**asked(0))
    assert refused.value.status_code == 503
