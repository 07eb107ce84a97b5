"""Thread stacks of an engine's processes: requested from all of them, and read from all files."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roseinfer.core import stacks

CHILD = """
import os, sys
from pathlib import Path
from roseinfer.core.stacks import rank_stacks_path, enable_stack_dumps
enable_stack_dumps(rank_stacks_path(Path(sys.argv[1]), 3, 1, os.getpid()))
def waits_there():
    print(flush=True)
    sys.stdin.read()
waits_there()
"""


@pytest.mark.skipif(stacks.SIGNAL is None or sys.platform != "linux", reason="no signal for it, or nobody's parent")
def test_ranks_are_asked_too_but_no_others_that_have_their_numbers(tmp_path: Path) -> None:
    stacks.rank_stacks_path(tmp_path, 3, 2, 1).write_text("left")  # process 1 is no child of ours
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        stacks._ask_ranks(tmp_path, 3, os.getpid())
        until_s = time.monotonic() + 30
        while "waits_there" not in stacks.read_stacks(tmp_path, 3):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        assert child.poll() is None
        child.communicate()
    told = stacks.read_stacks(tmp_path, 3)
    assert told.startswith("rank 1:\n") and "rank 2:\nleft" in told
    stacks.forget_ranks(tmp_path, 3)
    assert stacks.read_stacks(tmp_path, 3) == ""
