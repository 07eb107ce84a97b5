"""Processes that end are known before they are gone."""

import os
import signal
import subprocess
import sys

import pytest

from roseinfer.processes.ending import is_ending

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell")


def test_a_process_is_ending_once_it_has_been_killed() -> None:
    process = subprocess.Popen(["sleep", "100"])
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert not is_ending(process.pid) and not is_ending(os.getpid())
    process.kill()
    assert is_ending(process.pid), "at once, though nobody has waited for it"
    process.wait()
    assert is_ending(process.pid)
