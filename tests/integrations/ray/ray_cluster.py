"""A Ray cluster of one small node with a deployment of priced engines; all its processes end with the context."""

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

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port

DEPLOY_TIMEOUT_S = 90.0
CPUS, OBJECT_STORE_BYTES = 4, 80 * 2**20
# Names of processes on their command lines.
ENGINE_ACTOR, API_ACTOR = "ray::ServeReplica:roseinfer:Engine", "ray::ServeReplica:roseinfer:Api"
HAPROXY_ACTOR, HAPROXY = "ray::HAProxyManager", "bin/haproxy -db"
DIRECTORY, ENGINE = "ray::DirectoryActor", "remote.engine_process"


class RayCluster:
    """Context manager. `deploy` runs the command on the cluster; the deployment then answers at `url`.

    Each step of an engine takes 20 ms, whatever its rows. `redis`: address and password of the store of the cluster's
    state, which is in the memory of its first node otherwise.
    """

    def __init__(self, redis: tuple[str, str] | None = None) -> None:
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
            # Free ports, so that another cluster on this machine does not collide.
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        }
        self._ray = Path(sys.executable).with_name("ray")
        self._start = ["start", "--head", "--block", f"--port={gcs}", f"--num-cpus={CPUS}", "--num-gpus=0"]
        self._start += [f"--object-store-memory={OBJECT_STORE_BYTES}", "--include-dashboard=false"]
        self._start += [f"--temp-dir={self.folder / 'ray'}", "--disable-usage-stats"]
        self._start += [f"--ray-client-server-port={free_port()}", f"--dashboard-agent-listen-port={free_port()}"]
        if redis is not None:
            self.environment["RAY_REDIS_ADDRESS"], password = redis
            self._start.append(f"--redis-password={password}")
        cost = {"step_s": 0.02, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}
        self.cost = self.folder / "cost.json"
        self.cost.write_text(json.dumps({"cost": cost}))
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
        """Kill all descendants of the head's process; processes that start others first."""
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

    def deploy(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run `roseinfer deploy` with priced engines on `url` and these options."""
        given = ("--device", "priced", "--cost", str(self.cost), "--port", str(self.port), *options)
        command = [sys.executable, "-m", "roseinfer.cli", "deploy", *given]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=DEPLOY_TIMEOUT_S)

    def processes(self, name: str = "") -> list[int]:
        """Return the head's descendants whose command line contains `name`."""
        parents = dict(_parents())
        found = []
        for pid in parents:
            above: int | None = pid
            while above is not None and above != self.head.pid:
                above = parents.get(above)
            if above is not None and pid != self.head.pid and name in _command_line(pid):
                found.append(pid)
        return sorted(found)

    def get(self, path: str) -> tuple[int, str]:
        """Return status and body; status 0 if there is no answer."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self, engines: int = 1) -> bool:
        """True if this many engines are ready, according to an API process."""
        status, body = self.get("/ready")
        if status != 200:
            return False
        return sum(each["state"] == "ready" for each in json.loads(body).get("engines", [])) == engines


def _root() -> Path:
    return Path(__file__).resolve().parents[3]


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            yield int(stat.parent.name), int(stat.read_text().rpartition(") ")[2].split()[1])


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
