"""Timeouts of ranks that wait for each other."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from roseinfer.core.errors import EngineDeadError
from roseinfer.parallel.process_group import ProcessGroup, wait_for
from roseinfer.parallel.rendezvous import Rendezvous

TIMEOUT_S = 3
RANK = """
import sys
import torch
from roseinfer.parallel.process_group import ProcessGroup
from roseinfer.parallel.rendezvous import Rendezvous
from roseinfer.parallel.shared_store import SharedStore

store, rank, timeout_s = map(int, sys.argv[1:])
group = ProcessGroup(Rendezvous(SharedStore(store), "two", rank, 2), timeout_s)
print("here", flush=True)
sys.stdin.readline()
print(group.all_reduce(torch.ones(1)).item())
"""


def test_time_while_all_ranks_are_stopped_does_not_count() -> None:
    with tempfile.TemporaryFile() as store:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": [store.fileno()]}
        command = [sys.executable, "-m", "tests.helpers.run_code", RANK, str(store.fileno())]
        ranks = [subprocess.Popen([*command, str(rank), str(TIMEOUT_S)], **pipes) for rank in range(2)]  # type: ignore[call-overload]
    try:
        assert [rank.stdout.readline() for rank in ranks] == ["here\n"] * 2
        ranks[0].stdin.write("\n")
        ranks[0].stdin.flush()
        time.sleep(0.2)  # so that it waits for the other
        for number, pause_s in ((signal.SIGSTOP, TIMEOUT_S + 0.5), (signal.SIGCONT, 0)):
            for rank in ranks:
                os.kill(rank.pid, number)
            time.sleep(pause_s)
        assert ranks[1].communicate("\n", 60)[0] == "2.0\n" == ranks[0].communicate(timeout=60)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


class EndlessWork:
    def __init__(self) -> None:
        self.polls = 0

    def wait(self, poll: timedelta) -> None:
        self.polls += 1
        raise RuntimeError("timed out")

    def is_completed(self) -> bool:
        return False


def test_a_wait_ends_after_its_timeout_or_when_aborted() -> None:
    work, aborted = EndlessWork(), threading.Event()
    with pytest.raises(EngineDeadError, match="rank 0 timed out after waiting 2 s for another rank"):
        wait_for(work, 0, 2.0, aborted)
    assert work.polls == 4
    aborted.set()
    with pytest.raises(EngineDeadError, match="rank 0: the wait for other ranks was aborted"):
        wait_for(work, 0, 2.0, aborted)
    assert work.polls == 5


def test_a_group_of_one_rank() -> None:
    group = ProcessGroup(Rendezvous(dist.HashStore(), "one", 0, 1))
    assert group.all_reduce(torch.ones(1)).item() == 1
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


@pytest.mark.exhaustive  # `test_forked` has a fork of an engine of two ranks
def test_a_fork_exits_without_destroying_the_group() -> None:
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", FORK], process_group=0)
    try:
        assert process.wait(60) == 7
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
