"""Small integers on their way to the GPU, through pinned memory that is kept and reused."""

import numpy as np
import torch

# Host buffers in turn, so that filling one need not wait for the copy out of the last.
_TURNS = 4
# Sections begin at multiples of this many integers. Kernels are compiled for aligned pointers, and a section at an odd
# address would be a new compilation while serving.
ALIGN = 32


def aligned(count: int) -> int:
    """`count` rounded up to a whole number of `ALIGN`."""
    return -(-count // ALIGN) * ALIGN


class Staging:
    """One device buffer of `size` int32 and the pinned buffers that feed it.

    `fill` hands out the next host buffer, `send` queues the copy of its first integers and returns the device's. Work
    on the same stream, the one that was current at first, that reads the device buffer comes before the next copy into
    it.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(_TURNS)]
        self._arrays = [buffer.numpy() for buffer in self._pinned]
        self._copied = [torch.cuda.Event() for _ in range(_TURNS)]
        self._stream = torch.cuda.current_stream(device)  # to look for it takes longer than to record an event
        self._turn = 0

    def fill(self) -> np.ndarray:
        """The host buffer to fill, once the device has read what was in it."""
        self._turn = (self._turn + 1) % _TURNS
        self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self, count: int) -> torch.Tensor:
        """Queue the copy of the first `count` integers of what `fill` gave."""
        target = self.device[:count]
        target.copy_(self._pinned[self._turn][:count], non_blocking=True)
        self._copied[self._turn].record(self._stream)
        return target
