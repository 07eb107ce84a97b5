"""Parallel compilation of kernels, each in a process of its own, before the first launch.

Triton compiles a kernel when it is first launched, which takes half a second to five on one core. Products in FP8 need
some thirty kernels, one after another. Within `compiling`, launches compile kernels and do not run them. A fork of this
process compiles each kernel and leaves it in Triton's cache on disk, from where this process loads it. Compiling needs
no GPU, and forks touch none.
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

# Time after which a fork is killed; its kernel is then compiled here when it is needed.
FORK_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.005


@contextmanager
def compiling(processes: int | None = None) -> Iterator[bool]:
    """Compile the kernels that are launched in this context, without running them: their outputs are not written.

    processes: the most at a time; default: one for each core. Yields True if it compiles, and False if kernels are
    launched as usual: with too few cores, or a Triton version without support.
    """
    processes = processes or len(os.sched_getaffinity(0))
    if not HAS_TRITON or processes < 2 or not hasattr(triton, "AsyncCompileMode"):
        yield False
        return
    from triton.runtime.jit import JITFunction

    forks, run = ForkExecutor(processes), JITFunction.run
    with triton.AsyncCompileMode(forks, ignore_errors=True):  # launching the kernel raises the error again
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
    """Executor that calls a function twice: in a fork, for its effects on disk, and here once all forks are done."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._running: dict[int, float] = {}  # forks and their deadlines
        self._calls: list[tuple[Callable[[], Any], Future[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call a function without arguments. Its future is done after `finish`."""
        assert not args and not kwargs
        while len(self._running) >= self._processes:
            self._reap()
        self._calls.append((fn, Future()))
        with warnings.catch_warnings():
            # The warning is about locks of other threads, which the fork does not take.
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
        """End all forks, and give every unfinished future an error."""
        for child in self._running:
            with suppress(ProcessLookupError, ChildProcessError):  # `_reap` was interrupted between its end and this
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        self._running.clear()
        for _, future in self._calls:
            if not future.done():
                future.set_exception(RuntimeError("compiling ahead was cancelled"))

    def _reap(self) -> None:
        """Wait for a moment, and remove forks that have ended."""
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
    """Fork this process, with the garbage collector off: collecting the parent's GPU tensors in a fork would end it."""
    collecting, child = gc.isenabled(), -1
    gc.disable()
    try:
        child = os.fork()
    finally:
        if child != 0 and collecting:
            gc.enable()
    return child


def _call_and_exit(fn: Callable[[], Any]) -> None:
    """Call `fn` in the fork, and exit without the parent's clean-up."""
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
    """Point every descriptor at /dev/null, so that peers see the parent's end at once and its ports are free then.

    They are not closed: Python's objects would close a new descriptor that gets the same number.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            os.dup2(nothing, int(name), inheritable=int(name) < 3)
