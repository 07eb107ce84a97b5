"""Loss of Ray's store of the cluster's state (GCS), with Redis behind it. Needs the extra `ray` and `redis-server`."""

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.server import until
from benchmarks.gpu_server import free_port
from tests.integrations.ray.ray_cluster import RayCluster
from tests.integrations.ray.ray_load import finished, run, stream_bodies

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="the ray extra is not installed"),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed"),
    pytest.mark.long,
    pytest.mark.exhaustive,
]
GCS, PASSWORD, DOWN_S = "gcs/gcs_server", "secret", 1.0


@contextlib.contextmanager
def redis(folder: Path) -> Iterator[tuple[str, str]]:
    """Run a Redis; yield its address and password."""
    port = free_port()
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    with subprocess.Popen([*command, "--requirepass", PASSWORD], stdout=subprocess.DEVNULL) as server:
        try:
            assert until(lambda: _listens(port)), "Redis did not start"
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
        [self._pid] = cluster.processes(GCS)
        self._command = _words(f"/proc/{self._pid}/cmdline")
        self._environment = dict(word.split("=", 1) for word in _words(f"/proc/{self._pid}/environ") if "=" in word)
        self.started: subprocess.Popen[bytes] | None = None
        os.kill(cluster.head.pid, signal.SIGSTOP)  # it would end the other processes of its node too

    def replace(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        time.sleep(DOWN_S)
        self.started = subprocess.Popen(self._command, env=self._environment, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self.started is not None:
            self.started.kill()
            self.started.wait()


def _words(path: str) -> list[str]:
    return Path(path).read_text().split("\0")[:-1]


def test_streams_continue_without_the_store_and_parts_are_replaced_with_the_next(tmp_path: Path) -> None:
    bodies = stream_bodies(rate=6.0, seconds=2.0, output=60)
    with redis(tmp_path) as address, RayCluster(address) as cluster:
        done = cluster.deploy("--engines", "2")
        assert done.returncode == 0, done.stderr
        assert until(lambda: cluster.ready(2)), cluster.get("/ready")
        base = run(cluster, bodies, (), 0.0)
        store = Store(cluster)
        try:
            timer = threading.Timer(0.7, store.replace)
            timer.start()
            seen = run(cluster, bodies, (), 0.0)
            timer.join()
            assert all(map(finished, seen)), [each.error for each in seen]
            assert [each.text for each in seen] == [each.text for each in base]
            seen = run(cluster, bodies, ("actor",), 0.7)  # waits for its successor
            assert all(map(finished, seen)), [each.error for each in seen]
        finally:
            store.stop()
