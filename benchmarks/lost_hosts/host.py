"""A host as far as a server can tell: processes in a network of their own, behind a cable that can be cut.

Each is a network namespace with one pair of virtual Ethernet devices to ours, and, if its clock is to differ, a time
namespace. Linux only; `isolate` needs no root where users may have namespaces.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.server import until

PORT = 7070
ISOLATED = "LOST_HOSTS_ISOLATED"
# No machine has it: what is sent there is lost, and nobody is told.
NOBODY = "02:00:00:00:00:99"
# In the host: wait for the cable, then become the engine's keeper.
BECOME = 'read go && ip link set lo up && ip addr add "$1" dev "$2" && ip link set "$2" up && shift 2 && exec "$@"'


def isolate(module: str) -> None:
    """Run this program again in a network of its own, so that nothing is changed in the machine's. Raises `OSError`."""
    if os.environ.get(ISOLATED):
        run("ip", "link", "set", "lo", "up")
        return
    flags = "-n" if os.geteuid() == 0 else "-Urn"
    environment = {**os.environ, ISOLATED: "1"}
    os.execvpe("unshare", ["unshare", flags, sys.executable, "-m", module, *sys.argv[1:]], environment)


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class DistantHost:
    """`start`, and again after `kill`; `close` leaves nothing. `ahead_s`: of its monotonic clock before ours."""

    def __init__(self, number: int, options: Sequence[str], log: Path, ahead_s: int = 0) -> None:
        """`options`: of `roseinfer engine`, but for its address."""
        self.address = f"10.77.{number}.2:{PORT}"
        self._number = number
        self._options = options
        self._log = log
        self._ahead_s = ahead_s
        self._device, self._far_device = f"lost{number}", f"lost{number}far"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when its engine is up. Raises `RuntimeError` if it does not come up."""
        keeper = [sys.executable, "-m", "roseinfer.cli", "engine", *self._options, "--bind", self.address]
        apart = ["unshare", "-n", *(["-T", "--monotonic", str(self._ahead_s)] if self._ahead_s else []), "-f"]
        inside = ["sh", "-c", BECOME, "sh", f"10.77.{self._number}.2/30", self._far_device, *keeper]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen([*apart, "--", *inside], stdin=subprocess.PIPE, stdout=log, stderr=log)
        until(lambda: bool(self._inside()), 10.0)
        self._plug_in(self._inside()[0])
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()
        if not until(lambda: "waits for servers on" in self.log(), 60.0):
            raise RuntimeError(f"the engine at {self.address} does not come up: {self.log()[-2000:]}")

    def _plug_in(self, pid: int) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            run("ip", "link", "del", self._device)  # connections whose other side does not answer keep the old one
        run("ip", "link", "add", self._device, "type", "veth", "peer", "name", self._far_device)
        run("ip", "link", "set", self._far_device, "netns", str(pid))
        run("ip", "addr", "add", f"10.77.{self._number}.1/30", "dev", self._device)
        run("ip", "link", "set", self._device, "up")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    # --- what happens to it -------------------------------------------------------------------------------------
    def cut(self, *, there: bool = True, back: bool = True) -> None:
        """What is sent there, or from there, is lost without a word."""
        near, far = f"10.77.{self._number}.2", f"10.77.{self._number}.1"
        if there:
            run("ip", "neigh", "replace", near, "lladdr", NOBODY, "dev", self._device, "nud", "permanent")
        if back:
            neighbour = ["ip", "neigh", "replace", far, "lladdr", NOBODY, "dev", self._far_device, "nud", "permanent"]
            run("nsenter", "-t", str(self._inside()[0]), "-n", *neighbour)

    def mend(self) -> None:
        near, far = f"10.77.{self._number}.2", f"10.77.{self._number}.1"
        with contextlib.suppress(subprocess.CalledProcessError):
            run("ip", "neigh", "del", near, "dev", self._device)
        for pid in self._inside()[:1]:
            with contextlib.suppress(subprocess.CalledProcessError):
                run("nsenter", "-t", str(pid), "-n", "ip", "neigh", "del", far, "dev", self._far_device)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """All its processes at once."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def renew(self) -> None:
        """Its engine is drained and started anew."""
        os.kill(self._inside()[0], signal.SIGHUP)

    def close(self) -> None:
        """As an operator ends it: its requests may end for a while."""
        if self._process is None or self._process.poll() is not None:
            return
        self.wake()
        for keeper in self._inside()[:1]:
            os.kill(keeper, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15.0)
        self.kill()

    # --- its processes ------------------------------------------------------------------------------------------
    def _inside(self) -> list[int]:
        """All of them, those that were started first in front."""
        assert self._process is not None
        found, left = [], _children(self._process.pid)
        while left:
            found += left
            left = [child for pid in left for child in _children(pid)]
        return found

    def _signal(self, number: int) -> None:
        for pid in reversed(self._inside()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
