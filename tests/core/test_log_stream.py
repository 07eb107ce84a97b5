"""Log lines for a reader of standard error that is slow or has stopped."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from roseinfer.core import logs

LINES = 3000
DROPPED = "lines of the log were dropped, as nothing read standard error: "
PROGRAM = f"""if True:
    import logging, sys, time
    from roseinfer.core import logs

    logs.configure(as_json=True, level="INFO")
    for number in range({LINES}):
        logging.getLogger("roseinfer.x").info("%d %s", number, "x" * int(sys.argv[1]))
    print("written", flush=True)
    sys.stdin.read(1)
    time.sleep(0.1)  # the warning is written by another thread
    logging.getLogger("roseinfer.x").info("last")
"""
TIMEOUT_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


class Program:
    """Process that logs 3,000 lines, then another one. `kind`: of its standard error. `chars`: of each line."""

    def __init__(self, kind: str, chars: int = 200) -> None:
        if kind == "socket":
            ours, theirs = (each.detach() for each in socket.socketpair())
        elif kind == "terminal":
            ours, theirs = pty.openpty()
        else:
            ours, theirs = os.pipe()
        self._ours = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(chars)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs
        )
        os.close(theirs)

    def await_written(self) -> None:
        assert self._process.stdout is not None and self._process.stdout.readline() == b"written\n"

    def read_some(self, size: int) -> bytes:
        return os.read(self._ours, size)

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while end not in data:
            data += os.read(self._ours, 65536)
        return data

    def end(self) -> bytes:
        """Let it log its last line. Return that and what is before it."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"x")
        self._process.stdin.flush()
        return self.read_until(b'"last"')

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        os.close(self._ours)


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(*request.param) if isinstance(request.param, tuple) else Program(request.param)
    yield program
    program.close()


def messages(data: bytes) -> list[str]:
    """Return messages, also of a line that follows a part of another one, which a terminal may take."""
    return re.findall(r'"message": "([^"]*)"\}', data.decode())


@pytest.mark.parametrize("program", ["pipe", "terminal", "socket"], indirect=True)
def test_a_reader_that_stops_does_not_stop_the_program(program: Program) -> None:
    program.await_written()
    found = messages(program.read_until(DROPPED.encode()) + program.end())
    counts = [int(message.removeprefix(DROPPED)) for message in found if message.startswith(DROPPED)]
    numbers = [int(message.split()[0]) for message in found if message.endswith("x")]
    assert found[-1] == "last" and 0 < len(numbers) < LINES and numbers == list(range(len(numbers)))
    assert sum(counts) + len(numbers) in (LINES, LINES + 1)  # a terminal may take all of a line but its end


@pytest.mark.parametrize("program", ["pipe", "socket"], indirect=True)
def test_a_slow_reader_gets_all_lines(program: Program) -> None:
    time.sleep(0.3)
    data = program.read_until(f'"{LINES - 1} '.encode())
    program.await_written()
    assert len(messages(data + program.end())) == LINES + 1


@pytest.mark.parametrize("program", ["pipe"], indirect=True)
def test_a_reader_that_stays_too_slow_loses_lines(program: Program) -> None:
    """Each line would have room within a second, but all waits together would take ten."""
    data = b""
    while DROPPED.encode() not in data and f'"{LINES - 1} '.encode() not in data:
        data += program.read_some(4096)
        time.sleep(0.05)
    assert DROPPED.encode() in data


@pytest.mark.parametrize("program", [("pipe", 9000)], indirect=True)
def test_a_line_that_was_cut_does_not_spoil_the_next(program: Program) -> None:
    """Lines of 9,000 bytes, which a pipe takes in parts."""
    program.await_written()
    lines = (program.read_until(DROPPED.encode()) + program.end()).split(b"\n")
    whole = [json.loads(line)["message"] for line in lines if line.endswith(b"}")]
    assert any(message.startswith(DROPPED) for message in whole)


def test_without_a_standard_error_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    logs.configure(as_json=False)
