"""Store of the cluster's state (`gcs_server`), and a Redis in which it keeps that state."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port
from benchmarks.ray_faults.cluster import RayCluster

GCS, PASSWORD = "gcs/gcs_server", "secret"


@contextlib.contextmanager
def redis(folder: Path, program: str = "redis-server") -> Iterator[tuple[str, str]]:
    """Run a Redis; yield its address and password."""
    port = free_port()
    command = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    with subprocess.Popen([*command, "--requirepass", PASSWORD], stdout=subprocess.DEVNULL) as server:
        try:
            if not until(lambda: _listens(port)):
                raise RuntimeError(f"{program} did not start")
            yield f"127.0.0.1:{port}", PASSWORD
        finally:
            server.kill()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


class Store:
    """GCS of a cluster. `replace` kills it and starts it again, as a new head does with the same Redis."""

    def __init__(self, cluster: RayCluster) -> None:
        [self.pid] = cluster.processes(GCS)
        self._command = _words(f"/proc/{self.pid}/cmdline")
        self._environment = dict(word.split("=", 1) for word in _words(f"/proc/{self.pid}/environ") if "=" in word)
        self.started: subprocess.Popen[bytes] | None = None
        os.kill(cluster.head.pid, signal.SIGSTOP)  # it would end the other processes of its node too

    def replace(self, after_s: float) -> None:
        os.kill(self.pid, signal.SIGKILL)
        time.sleep(after_s)
        self.started = subprocess.Popen(self._command, env=self._environment, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self.started is not None:
            self.started.kill()
            self.started.wait()


def _words(path: str) -> list[str]:
    return Path(path).read_text().split("\0")[:-1]
