"""Server under test: the command as an operator runs it, its processes, and their resources."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PATIENCE_S = 120.0
_RANK = "roseinfer.ranks.process"
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True, slots=True)
class Held:
    """Resources of a server and its processes at a moment.

    places: open requests. kv: share of the blocks in use. Memory is resident, in MB.
    """

    processes: int
    descriptors: int
    memory_mb: float
    places: int
    kv: float

    def beyond(self, before: "Held") -> str:
        """Return what exceeds `before`."""
        processes, descriptors = self.processes - before.processes, self.descriptors - before.descriptors
        return (
            f"processes {processes:+d}, descriptors {descriptors:+d}, places {self.places - before.places:+d}, "
            f"KV {self.kv - before.kv:+.0%}, memory {self.memory_mb - before.memory_mb:+.0f} MB"
        )


class ServerUnderTest:
    """Context manager of a running server. On exit, all that it started is gone, whatever happened to it."""

    def __init__(self, *options: str, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: additional variables."""
        self._temporary = tempfile.TemporaryDirectory(prefix="faults-")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed on exit
        # Priced engines compute nothing and refuse a number of threads; so do engines of others.
        threads = [] if {"priced", "--engines"} & set(options) else ["--threads", "1"]
        command = [sys.executable, "-m", "roseinfer.cli", "serve", "--port", "0", *threads, *options]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
            env={**os.environ, **(environment or {}), "TMPDIR": self._temporary.name},
        )
        self.port = 0
        self._known: set[int] = set()

    def __enter__(self) -> "ServerUnderTest":
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if " is served on http://127.0.0.1:" not in line:
            log = self.log()
            self.close()
            raise RuntimeError(f"the server does not start: {line}{log}")
        self.port = int(line.split("127.0.0.1:")[1].split(";")[0])
        self._known.update(self.processes())
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._known.update(self.processes())
        for pid in self._known:
            if _is_ours(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        self._log.close()
        self._temporary.cleanup()

    # --- processes ----------------------------------------------------------------------------------------------
    def processes(self) -> list[int]:
        """Return the server's own process, then engines and workers, then the engines' other ranks."""
        mine, parents = self.process.pid, _parents()
        children = [pid for pid, parent in parents.items() if parent == mine]
        ranks = [pid for pid, parent in parents.items() if parent in children and _RANK in _command_line(pid)]
        return [*([mine] if self.process.poll() is None else []), *children, *ranks]

    def ranks(self) -> list[int]:
        return self._running(_RANK)

    def without(self, pids: Sequence[int]) -> bool:
        """Return True if these processes are gone."""
        return not any(map(_is_ours, pids))

    def engine(self) -> int:
        return self.engines()[0]

    def engines(self) -> list[int]:
        """Return the engines in the order in which they were started."""
        return self._running("roseinfer.engine.process")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self) -> list[int]:
        return self._running("roseinfer.server.workers.worker")

    def _running(self, module: str) -> list[int]:
        return [pid for pid in self.processes() if f"-m {module}" in _command_line(pid)]

    def left(self) -> str:
        """Return processes and files that remain after its end."""
        self._known.update(self.processes())
        until(lambda: not any(map(_is_ours, self._known)), 20.0)
        alive = sum(map(_is_ours, self._known))
        return f"processes {alive}, files {len(os.listdir(self._temporary.name))}"

    def remember(self) -> None:
        """Record its present processes for `left`: once it is dead, their parents are unknown."""
        self._known.update(self.processes())

    def end(self) -> int:
        """Send SIGTERM and return the exit code."""
        self._known.update(self.processes())
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def log(self) -> str:
        # Not by `seek`: the server, which writes at the same position, would overwrite its log.
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    # --- what it says and holds ---------------------------------------------------------------------------------
    def get(self, path: str) -> tuple[int, str]:
        """Return status and text on a separate connection; status 0 without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()

    def gauges(self) -> list[float]:
        """Return running, waiting, and the share of KV blocks in use."""
        lines = self.get("/metrics")[1].splitlines()
        return [sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")) for name in GAUGES]

    def idle(self) -> bool:
        return self.load() == 0 and self.gauges() == [0, 0, 0]

    def load(self) -> int:
        """Return the open requests; -1 if the server does not report them."""
        text = self.get("/load")[1]
        return int(json.loads(text)["server_load"]) if text else -1

    def held(self) -> Held:
        """Return its resources once it is idle, or should be."""
        until(self.idle, 60.0)
        pids = self.processes()
        return Held(
            processes=len(pids),
            descriptors=sum(_descriptors(pid) for pid in pids),
            memory_mb=sum(_resident_mb(pid) for pid in pids),
            places=self.load(),
            kv=self.gauges()[2],
        )


def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Return True if the condition came true in time."""
    end_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.05)
    return True


# --- /proc --------------------------------------------------------------------------------------------------------
def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    """Return state, parent and the fields after them."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def _parents() -> dict[int, int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    return {pid: int(stat[1]) for pid in pids if (stat := _stat(pid)) and stat[0] != "Z"}


def _command_line(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ")


def _is_ours(pid: int) -> bool:
    """Return True if a process of this server still runs, and its number has not been reused."""
    stat = _stat(pid)
    return bool(stat) and stat[0] != "Z" and "roseinfer" in _command_line(pid)


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def _resident_mb(pid: int) -> float:
    fields = _read(Path(f"/proc/{pid}/statm")).split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if fields else 0.0
