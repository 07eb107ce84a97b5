"""Timers of steps: how long a step took where it ran, and when its results are on the host."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

import torch


class StepTimer(Protocol):
    """Runs between `start` and `stop`, which may be repeated; then `downloads` once; `wait` ends the step."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def downloads(self) -> AbstractContextManager[None]:
        """Copies to the host that are queued within are waited for by `wait`."""
        ...

    def wait(self) -> float:
        """Block until the device is done with the step and its downloads. Seconds the step took."""
        ...


class HostTimer:
    """The device is the host: what was spent inside is the time, pauses between stop and start do not count."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def start(self) -> None:
        self._seconds -= perf_counter()

    def stop(self) -> None:
        self._seconds += perf_counter()

    def downloads(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wait(self) -> float:
        return self._seconds


class CudaTimer:
    """From the first `start` to the last `stop` on the stream.

    Downloads go over a stream of their own: the next step's work need not wait behind them. Whoever queues them keeps
    what they read alive until `wait` returns.

    Streams are given wherever torch would look for the current one, which takes it longer than the call.
    """

    def __init__(self, steps: torch.cuda.Stream, copies: torch.cuda.Stream) -> None:
        self._steps = steps
        self._copies = copies
        self._first: torch.cuda.Event | None = None
        self._last = torch.cuda.Event(enable_timing=True)
        self._done = torch.cuda.Event()

    def start(self) -> None:
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
        assert self._first is not None, "the step was never started"
        self._done.synchronize()
        return self._first.elapsed_time(self._last) / 1000


class StepTimers:
    """Makes the timers of one device, for steps on the stream that is current now."""

    def __init__(self, device: torch.device) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if device.type == "cuda":
            self._streams = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def new(self) -> StepTimer:
        """Of a step whose work is given to that stream from now on, whichever one the caller is at."""
        if self._streams is None:
            return HostTimer()
        torch.cuda.set_stream(self._streams[0])
        return CudaTimer(*self._streams)


def device_seconds(work: Callable[[], object]) -> float:
    """Of what a GPU is given by `work`: the host's part in launching and waiting would make it look slower."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000
