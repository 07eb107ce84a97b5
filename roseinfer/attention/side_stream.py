"""A second stream, for kernels that need nothing of each other and do not fill the GPU each on its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """What is launched within `launch` may run at the same time as what the current stream gets before `join`.

    Both can be captured in a CUDA graph. Without a GPU all of it runs in the order of its launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Behind all that the current stream has been given so far. `join` before what is written within is read."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Have the current stream wait for what was launched within `launch`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
