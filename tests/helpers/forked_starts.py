"""Starts of our programs as forks of a process that has imported the libraries, on Linux.

A start of `python -m roseinfer.cli serve` spends seconds of processor time on imports, a fork hundredths. The tests'
process and each process forked so have a library process of their own. A request to it is a `subprocess.Popen` of
`python -m MODULE`: the library process forks, and the kernel makes the fork a child of the process that asks. So
parents, exit codes, process groups and inherited descriptors are those of a real start. Fixture `executed` of
tests/conftest.py leaves real starts to a few tests, and tests/test_programs.py imports other programs afresh. A start
with other variables of the environment is always real, because libraries read these when they are imported.
"""

import atexit
import ctypes
import errno
import fcntl
import gc
import importlib
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODULES = (
    *("benchmarks.api_cost", "benchmarks.request_files", "roseinfer", "tests.engine", "tests.server"),
    *("tests.helpers.acting_rank", "tests.helpers.fragile_engine", "tests.helpers.hanging_engine"),
    "tests.helpers.run_code",
)
# The programs themselves, too, and what these and FastAPI import only once they have started.
IMPORTED = (
    "torch",
    "pydantic.v1",
    "uvicorn.lifespan.on",
    "uvloop",
    "roseinfer.cli.main",
    "roseinfer.cluster.remote.engine_process",
    "roseinfer.engine.process",
    "roseinfer.ranks.process",
    "roseinfer.runner.build",
    "roseinfer.server.run",
    "roseinfer.server.workers.manager",
    "roseinfer.server.workers.worker",
)
# Variables that no library reads when it is imported: a fork may have other values than the library process.
LATE_VARIABLES = frozenset(
    {"GOMP_SPINCOUNT", "LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    | {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "NOTIFY_SOCKET", "WATCHDOG_USEC"}
    | {"OPENBLAS_NUM_THREADS", "PYTEST_CURRENT_TEST", "ROSEINFER_API_KEY", "TMPDIR"}
    # What our code sets once PyTorch is imported.
    | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST"}
)
CLONE_CALLS = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x8000
PR_SET_PDEATHSIG = 1
MIN_OWN_DESCRIPTOR = 500  # lower ones are for programs, which may inherit any
MAX_MESSAGE_BYTES = 1 << 20
MAX_COMMAND_BYTES = 1 << 14
INHERITED_IGNORES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXECUTABLE = sys.executable  # tests put others in its place
executed: type["subprocess.Popen[Any]"] = subprocess.Popen


class LibraryProcess:
    """Client of the library process of this process, which is started when it is first needed."""

    def __init__(self, channel: socket.socket | None = None) -> None:
        self._channel = channel
        self._environment = dict(os.environ)
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def can_start(self, args: list[str], environment: Mapping[str, str]) -> bool:
        """True if a fork would be what `args` start. Processes forked by others have no library process."""
        if os.getpid() != self._owner or args[:2] != [EXECUTABLE, "-m"] or not args[2].startswith(MODULES):
            return False
        with self._lock:
            if self._channel is None:
                self._channel = self._launch()
        return {name for name, _ in environment.items() ^ self._environment.items()} <= LATE_VARIABLES

    def start(self, program: dict[str, Any], descriptors: list[int]) -> int:
        """Return the id of the new process, a child of this one."""
        assert self._channel is not None
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(program).encode()], descriptors)
            pid = int(self._channel.recv(MAX_MESSAGE_BYTES))
        if not pid:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return pid

    def _launch(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), " " * MAX_COMMAND_BYTES]
        self._environment = dict(os.environ)
        environment = {**self._environment, "OPENBLAS_NUM_THREADS": "1"}  # a thread would be missing in forks
        self._process = executed(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        return ours


def install(channel: socket.socket | None = None) -> None:
    """Fork what this process starts from now on with `subprocess`, if it is one of our programs."""
    if sys.platform != "linux" or platform.machine() not in CLONE_CALLS:
        return
    library = LibraryProcess(channel)
    names = list(inspect.signature(executed._execute_child).parameters)[1:]  # type: ignore[attr-defined]

    class ForkedPopen(executed):  # type: ignore[misc, valid-type]
        def _execute_child(self, *values: Any) -> None:
            given = dict(zip(names, values, strict=True))
            args, environment = given["args"], dict(os.environ if given["env"] is None else given["env"])
            if not isinstance(args, list) or given["preexec_fn"] or not library.can_start(args, environment):
                super()._execute_child(*values)
                return
            streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            streams = [own if end == -1 else end for own, end in enumerate(streams)]
            passed = [int(descriptor) for descriptor in given["pass_fds"]]
            program = {
                "args": args,
                "environment": environment,
                "folder": os.getcwd() if given["cwd"] is None else os.fspath(given["cwd"]),
                "group": os.getpgrp() if given["process_group"] == -1 else given["process_group"],
                "new_session": given["start_new_session"],
                "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
                "ignored": [each for each in INHERITED_IGNORES if signal.getsignal(each) is signal.SIG_IGN],
                "descriptors": [0, 1, 2, *passed],
            }
            self.pid = library.start(program, [*streams, *passed])
            self._child_created = True
            self._close_pipe_fds(*(given[name] for name in names if name.startswith(("p2c", "c2p", "err"))))

    subprocess.Popen = ForkedPopen  # type: ignore[misc]


# --- the library process --------------------------------------------------------------------------------------------
def main() -> None:
    """Fork for the owner of a socket until it ends. A fork forks its own library process, then runs its program."""
    owner = socket.socket(fileno=_moved(int(sys.argv[1])))
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are for the programs of the group
    for module in IMPORTED:
        importlib.import_module(module)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # each fork would free the operators of PyTorch when it ends
    gc.collect()
    gc.freeze()
    while True:
        program, descriptors = _forked(owner)
        if program["new_session"]:
            os.setsid()
        else:
            os.setpgid(0, program["group"])
        asker = owner
        owner, channel = (_socket(each) for each in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        if os.fork():
            break
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        asker.close()
        channel.close()
        for descriptor in descriptors:
            os.close(descriptor)
    _become(program, descriptors)
    asker.send(str(os.getpid()).encode())
    asker.close()
    install(channel)
    _run(program["args"][2])


def _forked(owner: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork at each message. Return in a fork only, with its message and descriptors."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None)
    while True:
        message, descriptors, _, _ = socket.recv_fds(owner, MAX_MESSAGE_BYTES, 250)
        if not message:
            os._exit(0)
        python.PyOS_BeforeFork()
        pid = libc.syscall(CLONE_CALLS[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            python.PyOS_AfterFork_Child()
            return json.loads(message), [_moved(descriptor) for descriptor in descriptors]
        python.PyOS_AfterFork_Parent()
        for descriptor in descriptors:
            os.close(descriptor)
        if pid < 0:
            owner.send(b"0")


def _become(program: dict[str, Any], descriptors: list[int]) -> None:
    """Make this fork what `python -m` would be at its first line."""
    for descriptor, number in zip(descriptors, program["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    tempfile.tempdir = None
    sys.path[0] = program["folder"]
    sys.argv = program["args"][2:]
    sys.orig_argv[:] = program["args"]
    sys.modules.pop(program["args"][2], None)  # it runs as __main__
    _show(program["args"])
    for number in program["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, program["blocked"])


def _run(module: str) -> None:
    """Run the program and end as Python does, except for freeing what all forks share, a quarter of a second each."""
    code: Any = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            raise
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _show(args: list[str]) -> None:
    """Show `args` as this process's command line."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])
    ctypes.memmove(first, "\0".join(args).encode().ljust(end - first, b"\0"), end - first)


def _moved(descriptor: int) -> int:
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, MIN_OWN_DESCRIPTOR)
    os.close(descriptor)
    return moved


def _socket(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=_moved(end.detach()))


if __name__ == "__main__":
    main()
