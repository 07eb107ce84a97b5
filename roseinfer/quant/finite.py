"""Check of weights for NaN and infinity, made while they are read."""

import torch

from roseinfer.core.errors import UnsupportedModelError


class FiniteCheck:
    """Extremes of tensors. NaN in a tensor makes both extremes NaN; infinity makes one of them infinite.

    The check takes one pass and no memory of its own. A GPU is not waited for before the end.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._extremes: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of floats of at least 16 bits; others are ignored."""
        if tensor.numel() and tensor.is_floating_point() and tensor.element_size() > 1:
            self._names.append(name)
            self._extremes.append(torch.stack(torch.aminmax(tensor)))

    def add_widened(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor of numbers that come from finite codes and scales. All dtypes but float16 hold these."""
        if tensor.dtype is torch.float16:
            self.add(name, tensor)

    def refuse_wrong(self, place: object) -> None:
        """Raise `UnsupportedModelError` naming a tensor that holds NaN or infinity. place: its file or folder."""
        wrong = self.first_wrong()
        if wrong is None:
            return
        name, dtype = wrong
        what = f"holds NaN, infinity or numbers beyond {str(dtype).removeprefix('torch.')}"
        advice = "; use --dtype bfloat16" if dtype is torch.float16 else ""
        raise UnsupportedModelError(f"{place}: tensor {name} {what}{advice}")

    def first_wrong(self) -> tuple[str, torch.dtype] | None:
        """Return the name and the dtype of the first tensor that holds NaN or infinity."""
        if not self._extremes:
            return None
        finite = torch.stack([extremes.float() for extremes in self._extremes]).isfinite().all(dim=1)
        for name, extremes, right in zip(self._names, self._extremes, finite.tolist(), strict=True):
            if not right:
                return name, extremes.dtype
        return None
