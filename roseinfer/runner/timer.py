"""How long a step took where it ran, and when its results are on the host."""

from collections.abc import Iterator
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
    """

    def __init__(self, copies: torch.cuda.Stream) -> None:
        self._copies = copies
        self._first: torch.cuda.Event | None = None
        self._last = torch.cuda.Event(enable_timing=True)
        self._done = torch.cuda.Event()

    def start(self) -> None:
        if self._first is None:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()

    def stop(self) -> None:
        self._last.record()

    @contextmanager
    def downloads(self) -> Iterator[None]:
        self._copies.wait_event(self._last)
        with torch.cuda.stream(self._copies):
            yield
            self._done.record()

    def wait(self) -> float:
        assert self._first is not None, "the step was never started"
        self._done.synchronize()
        return self._first.elapsed_time(self._last) / 1000


class StepTimers:
    """Makes the timers of one device."""

    def __init__(self, device: torch.device) -> None:
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def new(self) -> StepTimer:
        return HostTimer() if self._copies is None else CudaTimer(self._copies)
