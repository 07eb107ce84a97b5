"""Server under test: started, timed until it is healthy, and stopped in any case."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.05
STOP_PATIENCE_S = 20.0
TAIL_LINES = 30
PHASE = re.compile(r'roseinfer:startup_phase_seconds\{.*?phase="([^"]+)".*?\} (\S+)')
BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


class ServerError(Exception):
    """The server did not start; the message says why."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_package(tree: Path) -> dict[str, str]:
    """Return the environment in which Python finds the packages of `tree` first."""
    path = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


class Server:
    """`roseinfer serve` in its own process group. Its output is appended to `log`.

    `tree`: a folder with another `roseinfer` package to serve; default: the one that runs this.
    """

    def __init__(self, arguments: Sequence[str], log: Path, tree: Path | None = None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "roseinfer.cli", "serve", *arguments, "--port", str(port)]
        self.started_s = time.perf_counter()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                cwd=tree,
                env=None if tree is None else with_package(tree),
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def healthy(self) -> bool:
        return self.alive and self.get("/health") is not None

    def await_health(self, patience_s: float) -> float:
        """Return seconds from the start of the process to the first 200 of /health. Raises `ServerError`."""
        while not self.healthy:
            waited_s = time.perf_counter() - self.started_s
            if not self.alive:
                raise ServerError(f"the server ended with code {self._process.poll()} after {waited_s:.0f} s")
            if waited_s > patience_s:
                raise ServerError(f"the server was not healthy after {waited_s:.0f} s")
            time.sleep(POLL_S)
        return time.perf_counter() - self.started_s

    def get(self, path: str) -> str | None:
        """Return the body of a 200, None for anything else."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as response:
                return str(response.read().decode())
        except (OSError, urllib.error.URLError):
            return None

    def facts(self) -> dict[str, object]:
        """Return start-up metrics: seconds per phase and number of KV blocks."""
        text = self.get("/metrics") or ""
        phases = {phase: float(seconds) for phase, seconds in PHASE.findall(text)}
        blocks = BLOCKS.search(text)
        return {"startup_phases_s": phases, "kv_blocks": int(blocks[1]) if blocks else None}

    def tail(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]

    def stop(self) -> None:
        """Send SIGTERM and wait; kill what remains of the group."""
        if self.alive:
            self._process.terminate()
        try:
            self._process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
