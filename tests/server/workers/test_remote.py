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

from tests.server.real_server import PATIENCE_S, RealServer, children, command_line, priced, until

SECRET = "only those who may know it"
STREAMS, TOKENS = 6, 80


class Front(RealServer):
    """A server without engines of its own."""

    fixed = ("--port", "0", "--api-workers", "1")


class Kept:
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
        [found] = [pid for pid in children(self.process.pid) if "roseinfer.engine.process" in command_line(pid)]
        return found

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

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
    kept: list[Kept]
    server: Front


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text(SECRET)
    asked = ("--secret-file", str(secret))
    kept = [Kept(*asked, *priced(folder, 0.004)) for _ in range(2)]
    try:
        with Front("--engines", ",".join(each.address for each in kept), *asked) as server:
            yield Hosts(kept, server)
    finally:
        for each in kept:
            each.close()


def asked(i: int) -> dict[str, Any]:
    return {
        "model": "tiny", "prompt": f"def f{i}(x):\n", "max_tokens": TOKENS, "seed": i, "temperature": i % 2,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses that a process listens on, from what the kernel says of its sockets."""
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
    for kept in hosts.kept:
        host, _, port = kept.address.rpartition(":")
        assert listening(kept.process.pid) == {(host, int(port))}
        assert listening(kept.engine) == set(), "connections are given to it"


def test_clients_are_served_and_an_engine_that_is_killed_is_not_noticed(hosts: Hosts) -> None:
    server = hosts.server
    with server.client() as client:
        expected = [client.completions.create(**asked(i)).choices[0].text for i in range(STREAMS)]
        streams = [client.completions.create(**asked(i), stream=True) for i in range(STREAMS)]
        texts = [next(stream).choices[0].text for stream in streams]
        os.kill(hosts.kept[0].engine, signal.SIGKILL)
        for i, stream in enumerate(streams):
            texts[i] += "".join(chunk.choices[0].text for chunk in stream)
        assert texts == expected
    until(lambda: server.metrics("roseinfer:engine_up") == [2.0])
    assert server.metrics("roseinfer:engine_deaths_total", engine="0") == [1.0]
    assert server.metrics("roseinfer:slo_requests_total") == [2.0 * STREAMS], "none is counted twice"
    for engine in ("0", "1"):
        assert server.metrics("roseinfer:step_time_seconds_count", engine=engine)[0] > 0
        # Who sends requests, and who tells of the engines.
        assert server.metrics("roseinfer:engine_clients", engine=engine) == [2.0]
    body = server.fresh("/health").json()
    assert [engine["state"] for engine in body["engines"]] == ["ready", "ready"]


def test_a_hangup_has_all_engines_started_anew_under_requests(hosts: Hosts) -> None:
    server = hosts.server
    before = [kept.engine for kept in hosts.kept]
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
        assert rounds > 0 and server.log().count("a rolling restart is under way already") == 1
    assert not {*before} & {kept.engine for kept in hosts.kept}
    for kept in hosts.kept:
        assert kept.log().count("a server at 127.0.0.1 wants the engine to be started anew") == 1
        until(lambda kept=kept: kept.log().count("rolling restart: done") == 1)


def test_a_stranger_is_refused_counted_and_told_of_once(hosts: Hosts) -> None:
    server, kept = hosts.server, hosts.kept[1]
    host, _, port = kept.address.rpartition(":")

    def refused() -> float:
        return sum(server.metrics("roseinfer:engine_refused_peers_total", engine="1"))

    before = refused()  # on a machine that is busy, one of the server's own that came too late may be among them
    for _ in range(5):
        with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" + bytes(80))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
    until(lambda: refused() >= before + 5)
    assert kept.log().count("a connection from 127.0.0.1 was refused: it speaks another protocol") == 1


def test_the_secret_is_nowhere(hosts: Hosts) -> None:
    shown = [hosts.server.fresh(path).text for path in ("/health", "/metrics", "/v1/models")]
    shown += [hosts.server.log(), *(kept.log() for kept in hosts.kept)]
    pids = [hosts.server.process.pid, *(pid for kept in hosts.kept for pid in (kept.process.pid, kept.engine))]
    shown += [command_line(pid) + Path(f"/proc/{pid}/environ").read_text() for pid in pids]
    assert not [text for text in shown if SECRET in text]


def test_another_secret_ends_the_start_with_one_line(hosts: Hosts, tmp_path: Path) -> None:
    other = tmp_path / "secret"
    other.touch(0o600)
    other.write_text("not that one, but another")
    command = [sys.executable, "-m", "roseinfer.cli", "serve", *Front.fixed]
    command += ["--engines", hosts.kept[0].address, "--secret-file", str(other)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    line = f"roseinfer: error: the engine at {hosts.kept[0].address} cannot be reached: the engine has another secret"
    assert done.stderr.splitlines()[-1] == line


def test_a_keeper_that_is_to_end_lets_its_requests_finish(hosts: Hosts) -> None:
    server, kept = hosts.server, hosts.kept[0]
    with server.client() as client:
        streams = [client.completions.create(**asked(i), stream=True) for i in range(STREAMS)]
        begun = [next(stream) for stream in streams]
        kept.process.terminate()
        ends = [[first, *stream][-1].choices[0].finish_reason for first, stream in zip(begun, streams, strict=True)]
        assert ends == ["length"] * STREAMS
        assert kept.process.wait(PATIENCE_S) == 0
        until(lambda: server.metrics("roseinfer:engine_up", engine="0") == [0.0])
        assert client.completions.create(**asked(0)).choices[0].finish_reason == "length"
    hosts.kept[1].process.kill()
    with server.client(max_retries=0) as client, pytest.raises(openai.APIStatusError) as refused:
        until(lambda: server.fresh("/ready").status_code == 503)
        client.completions.create(**asked(0))
    assert refused.value.status_code == 503
