"""Between host and device: small values moved without making either wait for the other, and steps timed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Protocol

import torch

# Work over rows of a vocabulary goes by slices of this many elements. A CPU then stays within its caches, and its
# allocator within memory that is mapped already: fresh pages cost more than the arithmetic. A GPU wants few launches.
CPU_SLICE_ELEMENTS = 2**19
GPU_SLICE_ELEMENTS = 2**25


def rows_at_once(rows: torch.Tensor) -> int:
    """How many rows of [n, V] to work on at a time."""
    elements = GPU_SLICE_ELEMENTS if rows.device.type == "cuda" else CPU_SLICE_ELEMENTS
    return max(1, elements // rows.shape[1])


def upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of (nested) host numbers on the device.

    To a GPU it goes through pinned memory and does not wait; the caching host allocator keeps the pinned copy until
    the stream has read it.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def start_download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host. From a GPU the copy is only queued: record an event after it and wait for that."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def write_ranges(
    target: torch.Tensor, rows: Sequence[int], columns: Sequence[int], values: Sequence[Sequence[int]]
) -> None:
    """target[rows[i], columns[i] : columns[i] + len(values[i])] = values[i] for all i, in one scatter.

    target: [R, C], contiguous; the ranges do not overlap.
    """
    lengths = [len(v) for v in values]
    flat = [x for v in values for x in v]
    if not flat:
        return
    width = target.shape[1]
    # Element j of the flat list goes to j + shift, where shift is constant within one range.
    shifts, before = [], 0
    for row, column, length in zip(rows, columns, lengths, strict=True):
        shifts.append(row * width + column - before)
        before += length
    layout = upload([shifts, lengths], torch.int64, target.device)
    where = torch.repeat_interleave(layout[0], layout[1], output_size=before)
    where += torch.arange(before, device=target.device)
    target.view(-1).index_copy_(0, where, upload(flat, target.dtype, target.device))


# --- how long a step took where it ran, and when its results are on the host -----------------------------------------
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
