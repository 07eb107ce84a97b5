"""The script that changes HAProxy's configuration before it starts HAProxy."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import roseinfer.integrations.ray
from benchmarks.faults.server import until
from roseinfer.integrations.ray.stand_in import stand_in_lines

SCRIPT = Path(roseinfer.integrations.ray.__file__).with_name("haproxy")
CONFIG = """global
    stats socket /tmp/x/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
    acl a path /
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path \'%[path]\' not found. Ping /-/routes."
listen stats
  bind *:8404
  stats enable
"""


def changed(config: str, folder: Path) -> str:
    """Return the configuration as the script changes it."""
    file = folder / "haproxy.cfg"
    file.write_text(config)
    environment = {"ROSEINFER_HAPROXY": "/bin/echo", "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
    command = [str(SCRIPT), "-db", "-f", str(file), "-dR", "-sf", "17"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == command[1:], "HAProxy gets the arguments of the script"
    return file.read_text()


def test_only_the_port_for_requests_is_bound_to_all_addresses(tmp_path: Path) -> None:
    expected = CONFIG.replace(" :9101", " 127.0.0.1:9101").replace("*:8404", "127.0.0.1:8404").replace("666", "600")
    before, after = expected.splitlines(), changed(CONFIG, tmp_path).splitlines()
    assert [line for line in after if "return status" not in line] == [
        line for line in before if "return status" not in line
    ]


def test_a_proxy_without_applications_asks_clients_to_retry(tmp_path: Path) -> None:
    """A new HAProxy answers before Serve has sent it the API processes."""
    [line] = [line for line in changed(CONFIG, tmp_path).splitlines() if "return status" in line]
    words, _, body = line.partition(" string ")
    assert "status 503 content-type application/json hdr Retry-After 1" in words
    assert json.loads(body.strip("'"))["error"]["code"] == "loading"


def test_folders_of_killed_nodes_are_removed() -> None:
    """A node that lives has a socket in its folder."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as metrics:
        base = Path(parent, "haproxy-serve")
        killed, alive, starting, own = (base / name for name in ("killed", "alive", "starting", "own"))
        for folder in (killed, alive, starting):
            folder.mkdir(parents=True)
            (folder / "haproxy.cfg").touch()
        own.mkdir()
        for folder in (killed, alive):
            os.utime(folder / "haproxy.cfg", (0, 0))
        metrics.bind(str(alive / "metrics.sock"))
        changed(CONFIG, own)
        assert sorted(base.iterdir()) == sorted([alive, starting, own])


STARTING = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(600)"
# Instead of HAProxy: writes its arguments to a file of its process number, and ends with any signal. SIGUSR1 lets it
# finish its streams, which last until another one has started.
PROGRAM = """#!{python}
import glob, os, signal, sys, time
def finish(*_):
    until_s = time.monotonic() + 10
    while len(glob.glob("{folder}/started-*")) < 2 and time.monotonic() < until_s:
        time.sleep(0.01)
signal.signal(signal.SIGUSR1, finish)
open(f"{folder}/started-{{os.getpid()}}", "w").write(" ".join(sys.argv[1:]))
signal.pause()
"""
needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")


class Node:
    """Processes of a Ray node: `actor` has started the script, and so HAProxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "haproxy.cfg"
        self._program = folder / "program"
        self._program.write_text(PROGRAM.format(python=sys.executable, folder=folder))
        self._program.chmod(0o700)
        self.actors: list[subprocess.Popen[str]] = []

    def start(self, routes: bool = True) -> int:
        """Start HAProxy in an actor of its own; `routes`: it knows API processes. Return its process number."""
        self.config.write_text(
            CONFIG.replace("    default_backend", "    use_backend a if a\n    default_backend", routes)
        )
        environment = {"ROSEINFER_HAPROXY": str(self._program), "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
        command = [sys.executable, "-c", STARTING, str(SCRIPT), "-db", "-f", str(self.config)]
        actor = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        self.actors.append(actor)
        assert actor.stdout is not None
        pid = int(actor.stdout.readline())
        assert until(lambda: pid in self.started() and self._is_watched(pid))
        return pid

    def _is_watched(self, pid: int) -> bool:
        """True if the process that would start another one has opened this one, its actor and the node."""
        watcher = self.watched().get(pid)
        return watcher is not None and _process_descriptors(watcher) == 3

    def started(self) -> dict[int, str]:
        """Return the arguments of all programs so far, by process number."""
        return {int(file.name.rpartition("-")[2]): file.read_text() for file in self.folder.glob("started-*")}

    def await_stand_in(self, *before: int) -> int:
        assert until(lambda: set(self.started()) - set(before) != set()), self.started()
        [pid] = set(self.started()) - set(before)
        return pid

    def watched(self) -> dict[int, int]:
        """Return the programs for which another would stand in, and the processes that would start it."""
        lines = {int(path.name): _command_line(path).split("\0") for path in Path("/proc").glob("[0-9]*")}
        return {
            int(line[4]): pid for pid, line in lines.items() if str(self.config) in line and "stand_in.py" in line[3]
        }

    def close(self) -> None:
        for pid in [*self.watched().values(), *self.started()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for actor in self.actors:
            actor.kill()
            actor.communicate()


def _process_descriptors(pid: int) -> int:
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return sum("pidfd" in link for link in links)


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    found.close()


def ended(pid: int) -> bool:
    process = Path("/proc", str(pid))
    return not process.exists() or ") Z " in (process / "stat").read_text()


@needs_setpriv
def test_the_proxy_ends_with_its_parent(node: Node) -> None:
    """The signal lets it finish its streams. Another one stands in for it, until the node ends or has the next."""
    pid = node.start()
    node.actors[0].kill()
    stand_in = node.await_stand_in(pid)
    assert "stand-in" in node.started()[stand_in]
    assert until(lambda: ended(pid))


@needs_setpriv
@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP])
def test_another_proxy_stands_in_until_the_next_one_knows_api_processes(node: Node, lost_by: signal.Signals) -> None:
    pid = node.start()
    os.kill(pid, lost_by)
    stand_in = node.await_stand_in(pid)
    assert ended(pid), "a stopped one would keep its port"
    assert node.started()[stand_in] == f"-db -f {node.config}.stand-in"
    config = Path(f"{node.config}.stand-in").read_text()
    assert "bind *:8000" in config and "use_backend" in config
    first = node.start(routes=False)
    assert "bind *:8000" not in node.config.read_text() and "-sf" not in node.started()[first]
    second = node.start()
    assert "bind *:8000" in node.config.read_text()
    assert node.started()[second].endswith(f"-sf {stand_in}"), "HAProxy then tells the stand-in to end"


@needs_setpriv
def test_none_stands_in_when_serve_shuts_down(node: Node) -> None:
    """Serve kills HAProxy and then its actor."""
    pid = node.start()
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: ended(pid))
    node.actors[0].kill()
    assert until(lambda: not node.watched())
    assert all(map(ended, node.started()))


@needs_setpriv
def test_none_stands_in_for_a_proxy_that_has_been_replaced(node: Node) -> None:
    old, new = node.start(), node.start()
    os.kill(old, signal.SIGKILL)
    assert until(lambda: set(node.watched()) == {new})
    assert set(node.started()) == {old, new}


def test_a_stand_in_has_the_public_port_alone() -> None:
    lines = CONFIG.splitlines(keepends=True)
    removed = set(lines) - set(stand_in_lines(lines))
    assert sorted(line.split()[0] for line in removed) == ["bind", "bind", "stats"]
    assert not any("8000" in line for line in removed) and "  stats enable\n" not in removed


def test_a_call_without_a_configuration_is_passed_on() -> None:
    environment = {"ROSEINFER_HAPROXY": "/bin/echo", "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
    done = subprocess.run([str(SCRIPT), "-v"], env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-v"]
