"""Where layers get their weights from."""

from typing import Protocol

import torch


class WeightSource(Protocol):
    """Named tensors on their way into a model on `device` in `dtype`."""

    device: torch.device
    dtype: torch.dtype

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, into: torch.Tensor, *, transposed: bool = False) -> None:
        """Fill `into` with the tensor called `name` (`transposed`: with its transpose).

        Raises `UnsupportedModelError` naming the tensor when it is missing or of another shape.
        """
        ...


def read_new(source: WeightSource, name: str, *shape: int) -> torch.Tensor:
    """A new tensor of `shape` filled with the tensor called `name`."""
    tensor = torch.empty(shape, dtype=source.dtype, device=source.device)
    source.read(name, tensor)
    return tensor
