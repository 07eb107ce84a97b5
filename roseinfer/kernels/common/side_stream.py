"""Second stream, for independent kernels that do not fill the GPU on their own."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """Stream for kernels launched within `launch`, beside those that the current stream gets before `join`.

    CUDA graphs can capture both. Without a GPU everything runs in the order of its launches.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self) -> None:
        """Make the kernels of the next `launch` wait for all earlier work of the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    @contextmanager
    def launch(self) -> Iterator[None]:
        """Launch kernels after the work before `follow`. Call `join` before their results are read."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Make the current stream wait for the kernels of `launch`."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
