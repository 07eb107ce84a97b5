"""Processes that end are known before they are gone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from roseinfer.core import process_stat
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


def test_a_system_that_hides_processes_does_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look where /proc is that of another namespace, and where it hides a process that is there."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    monkeypatch.setattr(os, "readlink", lambda path: "1")
    assert not is_ending(gone.pid)
    monkeypatch.undo()
    monkeypatch.setattr(process_stat, "Path", lambda path: Path("/nowhere"))
    assert is_ending(gone.pid) and not is_ending(os.getpid()) and not is_ending(1)
