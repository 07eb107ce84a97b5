"""Check of weights for NaN and infinity, made while they are read."""

import torch


class FiniteCheck:
    """Extremes of tensors. NaN in a tensor makes both extremes NaN; infinity makes one of them infinite.

    The check takes one pass and no memory of its own. A GPU is not waited for before `first_wrong`.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._extremes: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of floats of at least 16 bits; others are ignored."""
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
