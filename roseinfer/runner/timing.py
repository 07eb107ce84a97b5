"""Timers of steps: how long a step took on its device, and when its results are on the host."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

import torch


class StepTimer(Protocol):
    """Timer that runs until `stop`, and again from `start` to `stop`. Then call `downloads` once, and `wait`."""

    def staged(self) -> None:
        """Let the device's time begin. What the host does before is part of a step only if the device is the host."""
        ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def downloads(self) -> AbstractContextManager[None]:
        """Queue copies to the host within this context; `wait` waits for them."""
        ...

    def wait(self) -> float:
        """Block until the device is done with the step and its downloads. Return the seconds that the step took."""
        ...


class HostTimer:
    """Timer for a device that is the host. Pauses between `stop` and `start` do not count."""

    def __init__(self) -> None:
        self._seconds = -perf_counter()

    def staged(self) -> None: ...

    def start(self) -> None:
        self._seconds -= perf_counter()

    def stop(self) -> None:
        self._seconds += perf_counter()

    def downloads(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> float:
        return self._seconds


class CudaTimer:
    """Timer from the first `staged` to the last `stop` on the stream.

    Downloads use a separate stream, so the next step's work need not wait for them. The caller keeps their sources
    alive until `wait` returns. Streams are passed explicitly: torch takes longer to look up the current one than for
    the call.
    """

    def __init__(self, steps: torch.cuda.Stream, copies: torch.cuda.Stream) -> None:
        self._steps = steps
        self._copies = copies
        self._first: torch.cuda.Event | None = None
        self._last = torch.cuda.Event(enable_timing=True)
        self._done = torch.cuda.Event()

    def start(self) -> None:
        """Do nothing: pauses of the host count as far as the device waits."""

    def staged(self) -> None:
        if self._first is None:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record(self._steps)

    def stop(self) -> None:
        self._last.record(self._steps)

    @contextmanager
    def downloads(self) -> Iterator[None]:
        self._copies.wait_event(self._last)
        torch.cuda.set_stream(self._copies)
        try:
            yield
            self._done.record(self._copies)
        finally:
            torch.cuda.set_stream(self._steps)

    def wait(self) -> float:
        assert self._first is not None, "the step was never staged"
        self._done.synchronize()
        return self._first.elapsed_time(self._last) / 1000


class StepTimers:
    """Factory of the timers of one device, for steps on the stream that is current at construction."""

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def new(self) -> StepTimer:
        """Return the timer of a step, and make the steps' stream the current one."""
        if self._streams is None:
            return HostTimer()
        torch.cuda.set_stream(self._streams[0])
        return CudaTimer(*self._streams)


def device_seconds(work: Callable[[], object]) -> float:
    """Return the time that a GPU takes for `work`, without the host's time to launch and wait."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000
