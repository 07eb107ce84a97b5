"""Choice of a process's device, and copies of small values to and from it that make neither side wait."""

from collections.abc import Sequence

import numpy as np
import torch

from roseinfer.core.config.engine import EngineConfig
from roseinfer.core.errors import ConfigError

# Work over rows of a vocabulary is split into slices of at most this many elements. A CPU then stays within its caches
# and within mapped memory: fresh pages cost more than the arithmetic. A GPU needs few launches.
MAX_CPU_SLICE_ELEMENTS = 2**19
MAX_GPU_SLICE_ELEMENTS = 2**25
# With several host buffers, filling one need not wait for the copy from the last.
_BUFFER_COUNT = 4
# Up to so many values of ranges, their places are listed on the host: one copy and two launches, which steps with new
# blocks or drafts wait for.
MAX_LISTED_COUNT = 128
# Sections begin at multiples of this many integers. Kernels are compiled for aligned pointers; an unaligned section
# would trigger compilation while serving.
ALIGN_COUNT = 32


def resolve_device(name: str) -> torch.device:
    """Resolve the option `device` of `ModelConfig`. Raise `ConfigError` for a GPU that is missing."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but PyTorch finds no CUDA GPU")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def rank_device(config: EngineConfig, rank: int, size: int) -> torch.device:
    """Return the device of a rank, which becomes the current one: the visible GPU with the rank's number, or the one
    that all ranks use.

    Raise `ConfigError` if there are too few GPUs.
    """
    device = resolve_device(config.model.device)
    if device.type != "cuda" or size == 1:
        return device
    if config.ranks_on_one_gpu:
        rank, size = 0, 1
    found = torch.cuda.device_count()
    if found < size:
        there = "there is 1 GPU" if found == 1 else f"there are {found} GPUs"
        raise ConfigError(f"tensor_parallel_size is {size}, but {there}")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def rows_at_once(rows: torch.Tensor) -> int:
    """Return how many rows of [n, V] to process at a time."""
    elements = MAX_GPU_SLICE_ELEMENTS if rows.device.type == "cuda" else MAX_CPU_SLICE_ELEMENTS
    return max(1, elements // rows.shape[1])


def upload(values: Sequence, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy (nested) host numbers to a tensor on the device.

    Copies to a GPU go through pinned memory and do not wait. The caching host allocator keeps the pinned memory until
    the stream has read it.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def start_download(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the host. A copy from a GPU is only queued: record an event after it and wait for that."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def write_ranges(
    target: torch.Tensor, rows: Sequence[int], columns: Sequence[int], values: Sequence[Sequence[int]]
) -> None:
    """Set target[rows[i], columns[i] : columns[i] + len(values[i])] = values[i] for all i, in one scatter.

    target: [R, C], contiguous; the ranges do not overlap.
    """
    lengths = [len(v) for v in values]
    flat = [x for v in values for x in v]
    if not flat:
        return
    width = target.shape[1]
    if len(flat) <= MAX_LISTED_COUNT:
        ranges = zip(rows, columns, lengths, strict=True)
        places = [row * width + column + i for row, column, length in ranges for i in range(length)]
        placed = upload((places, flat), torch.int64, target.device)
        target.view(-1).index_copy_(0, placed[0], placed[1].to(target.dtype))
        return
    # Element j of the flat list goes to j + shift, where shift is constant within one range.
    shifts, before = [], 0
    for row, column, length in zip(rows, columns, lengths, strict=True):
        shifts.append(row * width + column - before)
        before += length
    layout = upload([shifts, lengths], torch.int64, target.device)
    where = torch.repeat_interleave(layout[0], layout[1], output_size=before)
    where += torch.arange(before, device=target.device)
    target.view(-1).index_copy_(0, where, upload(flat, target.dtype, target.device))


def aligned(count: int) -> int:
    """Round `count` up to a multiple of `ALIGN_COUNT`."""
    return -(-count // ALIGN_COUNT) * ALIGN_COUNT


class Staging:
    """One device buffer of `size` int32 and the pinned host buffers that feed it.

    `fill` returns the next host buffer; `send` queues the copy of its first integers and returns the device's. Work on
    the stream that is current at construction reads the device buffer before the next copy overwrites it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_BUFFER_COUNT)]
        self._arrays = [buffer.numpy() for buffer in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(_BUFFER_COUNT)]
        self._stream = torch.cuda.current_stream(device)  # looking it up takes longer than recording an event
        self._turn = 0

    def fill(self) -> np.ndarray:
        """Return the host buffer to fill, once the device has read its old contents."""
        self._turn = (self._turn + 1) % _BUFFER_COUNT
        self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> torch.Tensor:
        """Queue the copy of the first `count` integers of the buffer that `fill` returned."""
        target = self.device[:count]
        target.copy_(self._pinned[self._turn][:count], non_blocking=True)
        self._copied[self._turn].record(self._stream)
        return target
