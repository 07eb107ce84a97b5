"""The script that changes HAProxy's configuration before it starts HAProxy."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import roseinfer.integrations.ray
from benchmarks.faults.server import until

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


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux is not installed")
def test_the_proxy_ends_with_its_parent() -> None:
    """The signal lets it finish its streams."""
    environment = {"ROSEINFER_HAPROXY": "/bin/sleep", "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
    starting = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(600)"
    command = [sys.executable, "-c", starting, str(SCRIPT), "600"]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        proxy = Path("/proc", parent.stdout.readline().strip())
        assert until(lambda: (proxy / "comm").read_text().strip() == "sleep")
        parent.kill()
    assert until(lambda: not proxy.exists() or ") Z " in (proxy / "stat").read_text())


def test_a_call_without_a_configuration_is_passed_on() -> None:
    environment = {"ROSEINFER_HAPROXY": "/bin/echo", "ROSEINFER_HAPROXY_STATS_HOST": "127.0.0.1"}
    done = subprocess.run([str(SCRIPT), "-v"], env=os.environ | environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["-v"]
