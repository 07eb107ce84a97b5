"""A Ray cluster of one small node with a deployment of priced engines; all its processes end with the context."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
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
        self._private = self.folder / "tmp"
        self._private.mkdir()
        self._mark = f"RAY_AUTH_TOKEN_PATH={token}"
        self.port = free_port()
        gcs = free_port()
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "TMPDIR": str(self._private),
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
        self.head: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "RayCluster":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._temporary.cleanup()

    def start(self) -> None:
        """Start the first node. Raise `RuntimeError` if Ray does not start."""
        command = [str(self._ray), *self._start]
        with (self.folder / "ray.log").open("w") as log_file:
            self.head = subprocess.Popen(
                command, env=self.environment, stdout=log_file, stderr=subprocess.STDOUT, text=True, process_group=0
            )
        if not until(lambda: "Ray runtime started" in self.log() or self.head.poll() is not None):
            log = self.log()
            self.kill()
            raise RuntimeError(f"Ray did not start: {log}")

    def kill(self) -> None:
        """Kill all processes of the cluster at once; processes that start others first."""
        self.head.kill()
        while ours := self.processes():
            starters = [pid for name in ("gcs_server", "raylet", HAPROXY_ACTOR) for pid in self.processes(name)]
            for pid in [*starters, *ours]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self.head.wait()

    def log(self) -> str:
        return (self.folder / "ray.log").read_text(errors="replace")

    def deploy(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run `roseinfer deploy` with priced engines on `url` and these options."""
        given = ("--device", "priced", "--cost", str(self.cost), "--port", str(self.port), *options)
        command = [sys.executable, "-m", "roseinfer.cli", "deploy", *given]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=DEPLOY_TIMEOUT_S)

    def processes(self, name: str = "") -> list[int]:
        """Return the processes of the cluster whose command line contains `name`.

        They are the head's descendants, and others with the cluster's token in their environment: those whose parents
        have ended.
        """
        parents = dict(_parents())

        def ours(pid: int) -> bool:
            above: int | None = pid
            while above is not None and above != self.head.pid:
                above = parents.get(above)
            return above is not None or self._mark in _read(pid, "environ")

        return sorted(pid for pid in parents if pid != self.head.pid and name in command_line(pid) and ours(pid))

    def haproxy(self) -> int:
        """Return the newest HAProxy that Ray Serve has started; older ones may still finish their streams."""
        return [pid for pid in self.processes(HAPROXY) if "stand-in" not in command_line(pid)][-1]

    def private_folders(self) -> list[Path]:
        """Return the private folders of roseinfer's processes."""
        return sorted(self._private.glob("roseinfer-*"))

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
    return Path(__file__).resolve().parents[2]


def _parents() -> Iterator[tuple[int, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
            if state != "Z":
                yield int(stat.parent.name), int(parent)


def command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")


def _read(pid: int, file: str) -> str:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    except OSError:
        return ""
