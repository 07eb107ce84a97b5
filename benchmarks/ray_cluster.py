"""A Ray cluster of one small node, with a deployment of priced engines on it; nothing of either is left afterwards."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port

PATIENCE_S = 90.0
CPUS, OBJECT_STORE_BYTES = 4, 80 * 2**20
# What processes call themselves.
ENGINE_ACTOR, API_ACTOR = "ray::ServeReplica:roseinfer:Engine", "ray::ServeReplica:roseinfer:Api"
HAPROXY_ACTOR, HAPROXY = "ray::HAProxyManager", "bin/haproxy -db"
DIRECTORY, ENGINE = "ray::DirectoryActor", "roseinfer.engine.process"


class RayCluster:
    """Use as a context manager. `deploy` runs the command on it; `url` is then where the deployment answers.

    `step_s`: what a step takes an engine, whatever is in it.
    """

    def __init__(self, step_s: float = 0.02, cost: dict[str, Any] | None = None) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.port = free_port()
        gcs = free_port()
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": f"127.0.0.1:{gcs}",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(_root()), os.environ.get("PYTHONPATH")])),
            # Those of another cluster on this machine stay its own.
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        self._ray = Path(sys.executable).with_name("ray")
        self._start = ["start", "--head", "--block", f"--port={gcs}", f"--num-cpus={CPUS}", "--num-gpus=0"]
        self._start += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=false"]
        self._start += [f"--temp-dir={self.folder / 'ray'}", "--disable-usage-stats"]
        self._start += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
        numbers = {"step_s": step_s, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}
        self.cost = self.folder / "cost.json"
        self.cost.write_text(json.dumps({"cost": cost or numbers}))
        self._log = (self.folder / "ray.log").open("w+")
        self.head: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "RayCluster":
        command = [str(self._ray), *self._start]
        self.head = subprocess.Popen(
            command, env=self.environment, stdout=self._log, stderr=subprocess.STDOUT, text=True, process_group=0
        )
        if not until(lambda: "Ray runtime started" in self.log() or self.head.poll() is not None):
            self.__exit__()
            raise AssertionError(f"Ray did not start: {self.log()}")
        return self

    def __exit__(self, *exc: object) -> None:
        """All that has come of the head's process, those first that would start others."""
        ours = self.processes()
        starters = [pid for name in ("gcs_server", "raylet", HAPROXY_ACTOR) for pid in self.processes(name)]
        for pid in [*starters, *ours]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.head.kill()
        self.head.wait()
        self._log.close()
        self._temporary.cleanup()

    def log(self) -> str:
        return (self.folder / "ray.log").read_text(errors="replace")

    def deploy(self, *options: str, patience_s: float = PATIENCE_S) -> "subprocess.CompletedProcess[str]":
        """`roseinfer deploy` with these options."""
        command = [sys.executable, "-m", "roseinfer.cli", "deploy", *options]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=patience_s)

    def options(self, *more: str) -> tuple[str, ...]:
        """Of a deployment of priced engines on `url`."""
        return ("--device", "priced", "--cost", str(self.cost), "--port", str(self.port), *more)

    # --- what runs ----------------------------------------------------------------------------------------------
    def processes(self, name: str = "") -> list[int]:
        """Those that the head has started, and theirs, whose command line begins with or holds `name`."""
        parents = dict(_parents())
        found = []
        for pid in parents:
            above: int | None = pid
            while above is not None and above != self.head.pid:
                above = parents.get(above)
            if above is not None and pid != self.head.pid and name in _command_line(pid):
                found.append(pid)
        return sorted(found)

    # --- what it answers ----------------------------------------------------------------------------------------
    def get(self, path: str) -> tuple[int, str]:
        """Status and body; status 0: no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self, engines: int = 1) -> bool:
        """Whether so many engines take requests, as far as an API process knows."""
        status, body = self.get("/ready")
        if status != 200:
            return False
        return sum(each["state"] == "ready" for each in json.loads(body).get("engines", [])) == engines


def _root() -> Path:
    return Path(__file__).resolve().parent.parent


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(stat.parent.name), int(stat.read_text().rpartition(") ")[2].split()[1])


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
