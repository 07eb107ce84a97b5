"""Child processes as their parent sees them: launch one, wait for its end, stop it.

The child's side is `processes.child`. A parent in an event loop::

    child = launch("roseinfer.engine.process", EngineBoot(...), pass_fds=[listener.fileno()])  # raises OSError
    code = await child.wait()

To stop a child, ask it to end in its own protocol, then insist, then let go of its pipes::

    channel.send(Shutdown())
    await finish(child.stop(STOP_TIMEOUT_S))  # from `supervise`: also if the caller is cancelled
    child.close()

A parent in a thread uses `wait_in_thread` and `stop_in_thread`. A parent that has the child import its libraries before
there is a boot struct launches without one and calls `send_boot` later.

The boot struct is one line of JSON on standard input. Above 64 KiB, `launch` blocks until the child reads it.
That pipe stays open until `close`: its end tells the child that its parent has ended, even by `kill -9`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import IO

import msgspec

from roseinfer.processes.frames import write_all

POLL_S = 0.02  # on systems without pidfd_open


class ChildProcess:
    """One child from its launch to its end; made by `launch`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code, or minus the number of the signal that ended the child; None while it runs."""
        return self._process.poll()

    @property
    def stdin(self) -> IO[bytes]:
        """Return the unbuffered pipe to the child. It tells the child that its parent lives."""
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """Return the unbuffered pipe from the child, which must have been launched with `read_stdout`."""
        assert self._process.stdout is not None
        return self._process.stdout

    @property
    def stderr(self) -> IO[bytes]:
        """Return the unbuffered pipe from the child's log, which must have been launched with `read_stderr`."""
        assert self._process.stderr is not None
        return self._process.stderr

    def send_boot(self, boot: msgspec.Struct) -> None:
        """Send the boot struct to a child that was launched without one.

        A child that has ended gets none: whoever waits for the child learns its exit code.
        """
        with contextlib.suppress(OSError, ValueError):  # another thread may have closed the pipe
            write_all(self.stdin, msgspec.json.encode(boot) + b"\n")

    async def wait(self) -> int:
        """Return the exit code, once the child has ended. Any number of tasks may wait."""
        while (code := self._process.poll()) is None:
            await self._until_exit()
        return code

    async def _until_exit(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):
            await asyncio.sleep(POLL_S)
            return
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)

    def wait_in_thread(self, timeout_s: float | None = None) -> int | None:
        """Block until the child has ended and return its exit code. Return None after `timeout_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def kill(self) -> None:
        self._process.kill()

    async def stop(self, timeout_s: float) -> int:
        """Wait `timeout_s` seconds for a child that was asked to end, then kill it. Return its exit code.

        A caller that may be cancelled wraps this in `supervise.finish`, so that no zombie is left.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        self.kill()
        return await self.wait()

    def stop_in_thread(self, timeout_s: float) -> int:
        """Do what `stop` does, blocking."""
        code = self.wait_in_thread(timeout_s)
        if code is None:
            self.kill()
            code = self._process.wait()
        return code

    def close(self) -> None:
        """Close the pipes of a child that has ended; one that runs learns that its parent has gone."""
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def launch(
    module: str,
    boot: msgspec.Struct | None = None,
    *,
    arguments: Sequence[str] = (),
    pass_fds: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
    new_session: bool = False,
    read_stdout: bool = False,
    read_stderr: bool = False,
) -> ChildProcess:
    """Start `python -m module` and send it `boot`, if given.

    `environment` is added to ours. `new_session`: terminals do not send it Ctrl+C. Raises `OSError` if the system has
    no process, memory or descriptor for it.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if read_stdout else None,
        stderr=subprocess.PIPE if read_stderr else None,
        bufsize=0,
        pass_fds=pass_fds,
        env={**os.environ, **(environment or {})},
        start_new_session=new_session,
    )
    child = ChildProcess(process)
    if boot is not None:
        child.send_boot(boot)
    return child


def run_python(
    arguments: Sequence[str], timeout_s: float, stdin: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a short-lived Python with these arguments and return its output, for libraries that may crash or hang.

    `stdin`: its input; None = it shares ours. Raises `TimeoutError` after `timeout_s` seconds, and `OSError`.
    """
    try:
        command = [sys.executable, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error


def describe_exit(code: int, *, by_us: bool = False) -> str:
    """Return `code` for an error message, with the likely cause of a kill unless we sent it (`by_us`)."""
    likely = " (killed; the system does this when memory runs out)" if code == -signal.SIGKILL and not by_us else ""
    return f"ended with code {code}{likely}"
