"""Stand-in for an HAProxy that has died, until Ray Serve has replaced it.

    python stand_in.py HAPROXY_PID ACTOR_PID CONFIGURATION PROGRAM

The script `haproxy` starts one of these for each HAProxy. Serve needs seconds to replace one, because it must first
notice the loss and then start another actor. Clients made for OpenAI give up after little more than a second. So this
process starts another HAProxy at once, with the same configuration but without the admin socket: Serve must notice the
loss. An HAProxy that has been stopped for `MAX_STOPPED_S` is killed.

It imports nothing but small parts of the standard library, because it runs for as long as HAProxy.
"""

import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator

CHECK_S, MAX_STOPPED_S = 0.25, 2.0
# If Serve shuts HAProxy down, its actor ends at most that much later: before a stand-in has started, or after that.
SHUTDOWN_S, LATE_SHUTDOWN_S = 0.1, 1.0
MAX_STAND_IN_S = 30.0
# Files with process numbers beside the configuration: the newest HAProxy that knows API processes, as the script writes
# it, and the stand-in. Serve's next HAProxy takes the port over from the stand-in.
NEWEST, STAND_IN = "newest", "stand-in"
PUBLIC = "frontend http_frontend"


class Process:
    """Process of this machine. Raise `ProcessLookupError` if there is none of this number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.descriptor = os.pidfd_open(pid)

    @property
    def parent(self) -> int:
        return int(self._stat()[1])

    def is_stopped(self) -> bool:
        return self._stat()[:1] == ["T"]

    def _stat(self) -> list[str]:
        """Return the state, the parent and the fields after them."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()
        except OSError:
            return []


def await_end(processes: Iterable[Process], timeout_s: float) -> set[int]:
    """Return the numbers of the processes that have ended once one has, none after `timeout_s`."""
    waiting = select.poll()
    numbers = {}
    for process in processes:
        waiting.register(process.descriptor, select.POLLIN)
        numbers[process.descriptor] = process.pid
    return {numbers[descriptor] for descriptor, _ in waiting.poll(timeout_s * 1000)}


def await_loss(haproxy: Process, actor: Process) -> bool:
    """Return when one of them has ended: True if Serve may have killed HAProxy. Kill an HAProxy that is stopped."""
    stopped_s = 0.0
    while not (ended := await_end((haproxy, actor), CHECK_S)):
        stopped_s = stopped_s + CHECK_S if haproxy.is_stopped() else 0.0
        if stopped_s >= MAX_STOPPED_S:
            os.kill(haproxy.pid, signal.SIGKILL)
    if haproxy.is_stopped():
        os.kill(haproxy.pid, signal.SIGKILL)
    return haproxy.pid in ended


def newest(folder: str) -> int:
    """Return the process number of the newest HAProxy, 0 if that one knows no API processes."""
    try:
        with open(os.path.join(folder, NEWEST)) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def stand_in_lines(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the stand-in's configuration: without the admin socket, and with the public port alone."""
    section = ""
    for line in lines:
        words = line.split()
        if line[:1].isalpha():
            section = line.strip()
        if words[:2] != ["stats", "socket"] and (words[:1] != ["bind"] or section == PUBLIC):
            yield line


def start_stand_in(configuration: str, program: str) -> Process:
    """Start the stand-in. When this process ends, it closes its port and ends after its streams, by SIGUSR1."""
    path = f"{configuration}.stand-in"
    with open(configuration) as original, open(path, "w") as file:
        file.writelines(stand_in_lines(original))
    command = ["setpriv", "--pdeathsig", "USR1", program, "-db", "-f", path]
    pid = os.posix_spawnp(command[0], command, os.environ)
    with open(os.path.join(os.path.dirname(configuration), STAND_IN), "w") as file:
        file.write(str(pid))
    return Process(pid)


def main(haproxy_pid: int, actor_pid: int, configuration: str, program: str) -> None:
    haproxy, actor = Process(haproxy_pid), Process(actor_pid)
    node = Process(actor.parent)
    killed = await_loss(haproxy, actor)
    if newest(os.path.dirname(configuration)) != haproxy_pid or (killed and await_end([actor], SHUTDOWN_S)):
        return
    stand_in = start_stand_in(configuration, program)
    if killed and await_end([actor], LATE_SHUTDOWN_S):
        os.kill(stand_in.pid, signal.SIGTERM)
        return
    await_end((stand_in, node), MAX_STAND_IN_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
