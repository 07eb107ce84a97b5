"""How long ranks wait for each other."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from roseinfer.core.errors import EngineDeadError
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous

PATIENCE_S = 3
RANK = """
import sys
import torch
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.shared_store import SharedStore

store, rank, patience_s = map(int, sys.argv[1:])
group = ProcessGroup(Rendezvous(SharedStore(store), "two", rank, 2), patience_s)
print("here", flush=True)
sys.stdin.readline()
print(group.all_reduce(torch.ones(1)).item())
"""


def test_while_all_are_stopped_nobody_waits_in_vain() -> None:
    with tempfile.TemporaryFile() as store:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": [store.fileno()]}
        command = [sys.executable, "-c", RANK, str(store.fileno())]
        ranks = [subprocess.Popen([*command, str(rank), str(PATIENCE_S)], **pipes) for rank in range(2)]  # type: ignore[call-overload]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["here\n"] * 2
        ranks[0].stdin.write("\n")
        ranks[0].stdin.flush()
        time.sleep(0.2)  # so that it waits for the other
        for number, pause_s in ((signal.SIGSTOP, PATIENCE_S + 0.5), (signal.SIGCONT, 0)):
            for rank in ranks:
                os.kill(rank.pid, number)
            time.sleep(pause_s)
        assert ranks[1].communicate("\n", 60)[0] == "2.0\n" == ranks[0].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class Endless:
    """What never completes."""

    def __init__(self) -> None:
        self.looks = 0

    def wait(self, look: timedelta) -> None:
        self.looks += 1
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_who_hangs_is_waited_for_so_long() -> None:
    group, work = ProcessGroup(Rendezvous(dist.HashStore(), "one", 0, 1)), Endless()
    with pytest.raises(EngineDeadError, match="rank 0 has waited 2 s in vain for another rank"):
        group._wait(work, 2.0)
    assert work.looks == 4
    assert group.all_reduce(torch.ones(1)).item() == 1
    group.abort()
    with pytest.raises(EngineDeadError, match="rank 0 gives up waiting for the others"):
        group._wait(work, 2.0)
    group.close()


FORK = """
import os, sys
import torch.distributed as dist
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous

group = ProcessGroup(Rendezvous(dist.HashStore(), "one", 0, 1))
child = os.fork()
if not child:
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_ends_without_what_it_does_not_have() -> None:
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORK], process_group=0)
    try:
        assert process.wait(60) == 7
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
