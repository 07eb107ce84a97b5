"""How long a step took where it ran."""

from time import perf_counter
from typing import Protocol

import torch


class StepTimer(Protocol):
    """Runs between `start` and `stop`, which may be repeated; `wait` blocks until the device is done with the step."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def wait(self) -> float:
        """Seconds the step took."""
        ...


class HostTimer:
    """The device is the host: what was spent inside is the time, pauses between stop and start do not count."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def start(self) -> None:
        self._seconds -= perf_counter()

    def stop(self) -> None:
        self._seconds += perf_counter()

    def wait(self) -> float:
        return self._seconds


class CudaTimer:
    """From the first `start` to the last `stop` on the stream. The last event also tells that downloads are there."""

    def __init__(self) -> None:
        self._first: torch.cuda.Event | None = None
        self._last = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        if self._first is None:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()

    def stop(self) -> None:
        self._last.record()

    def wait(self) -> float:
        assert self._first is not None, "the step was never started"
        self._last.synchronize()
        return self._first.elapsed_time(self._last) / 1000


def step_timer(device: torch.device) -> StepTimer:
    return CudaTimer() if device.type == "cuda" else HostTimer()
