"""A check for NaN and infinity in the weights of a model, made while they are read."""

import torch


class FiniteCheck:
    """Extremes of tensors: of one that holds NaN both are NaN, of one that holds infinity one is.

    One pass over a tensor, without memory of its own; on a GPU nothing is waited for before `first_wrong`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._extremes: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Look through a tensor of floats of 16 bits or more; any other is ignored."""
        if tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
            self._names.append(name)
            self._extremes.append(torch.stack(torch.aminmax(tensor)))

    def first_wrong(self) -> tuple[str, torch.dtype] | None:
        """Return the name and the dtype of the first tensor that holds NaN or infinity."""
        if not self._extremes:
            return None
        finite = torch.stack([extremes.float() for extremes in self._extremes]).isfinite().all(dim=1)
        for name, extremes, right in zip(self._names, self._extremes, finite.tolist(), strict=True):
            if not right:
                return name, extremes.dtype
        return None
