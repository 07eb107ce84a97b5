"""Many kernels compiled at once, each in a process of its own, before the first of them runs.

Triton compiles a kernel when it is first launched, for half a second to five on one core: with products in FP8, some
thirty one after the other. In `compiling` they are compiled where they would be launched, and nothing runs. Each is
compiled by a fork of this process, which leaves it in Triton's cache on disk; from there this process takes it. Forks
touch no GPU: to compile takes none.
"""

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any

from roseinfer.kernels.common.triton_support import HAS_TRITON, triton

# After which a fork is given up, and its kernel compiled here when it is needed.
FORK_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.005


@contextmanager
def compiling(processes: int | None = None) -> Iterator[bool]:
    """Compile the kernels that are launched within, and launch none: what they would write is not written.

    processes: at a time; default: one for each core. Yields whether it does so: where it cannot, for want of cores or
    in a Triton that does not know how, kernels are launched as ever.
    """
    processes = processes or len(os.sched_getaffinity(0))
    if not HAS_TRITON or processes < 2 or not hasattr(triton, "AsyncCompileMode"):
        yield False
        return
    from triton.runtime.jit import JITFunction

    forks, run = ForkExecutor(processes), JITFunction.run
    with triton.AsyncCompileMode(forks, ignore_errors=True):  # who launches the kernel finds the error again
        JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
        try:
            try:
                yield True
            finally:
                JITFunction.run = run
            forks.finish()
        except BaseException:
            forks.cancel()
            raise


class ForkExecutor(Executor):
    """Calls every function twice: in a fork, for what that leaves behind, and when all are done here."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._running: dict[int, float] = {}  # forks, and when each is to be over
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Of one argument: a function without any. Its future is done after `finish`."""
        assert not args and not kwargs
        while len(self._running) >= self._processes:
            self._reap()
        self._calls.append((fn, Future()))
        with warnings.catch_warnings():
            # Other threads of this process do not run in the fork, which takes no lock of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = _fork()
        if child == 0:
            _call_and_exit(fn)
        self._running[child] = time.monotonic() + FORK_TIMEOUT_S
        return self._calls[-1][1]

    def finish(self) -> None:
        while self._running:
            self._reap()
        for fn, future in self._calls:
            try:
                future.set_result(fn())
            except Exception as error:
                future.set_exception(error)

    def cancel(self) -> None:
        """End all forks; futures that are not done never will be: whoever waits for one gets an error."""
        for child in self._running:
            with suppress(ProcessLookupError, ChildProcessError):  # `_reap` was interrupted between its end and this
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self._running.clear()
        for _, future in self._calls:
            if not future.done():
                future.set_exception(RuntimeError("what was to be compiled ahead was given up"))

    def _reap(self) -> None:
        """Wait for a moment, and forget who has ended."""
        time.sleep(_POLL_INTERVAL_S)
        for child, until_s in list(self._running.items()):
            if time.monotonic() > until_s:
                os.kill(child, signal.SIGKILL)
            elif os.waitpid(child, os.WNOHANG)[0] == 0:
                continue
            else:
                del self._running[child]
                continue
            os.waitpid(child, 0)
            del self._running[child]


def _fork() -> int:
    """As os.fork, but what nobody needs any longer stays in the fork: tensors of a GPU, which are the parent's to free,
    would end it."""
    collecting, child = gc.isenabled(), -1
    gc.disable()
    try:
        child = os.fork()
    finally:
        if child != 0 and collecting:
            gc.enable()
    return child


def _call_and_exit(fn: Callable[[], Any]) -> None:
    """In the fork, which ends without any of the clearing up that is its parent's."""
    status = 1
    try:
        _detach_descriptors()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        fn()
        status = 0
    finally:
        os._exit(status)


def _detach_descriptors() -> None:
    """Point every descriptor at nothing: who talks to the parent sees its end at once, and its ports are free then.

    Not closed, for Python's objects would close what gets the same number.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            os.dup2(nothing, int(name), inheritable=int(name) < 3)
