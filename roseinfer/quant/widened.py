"""Check of numbers that were widened from codes and scales."""

import torch

from roseinfer.core.errors import UnsupportedModelError


def check_range(name: str, wide: torch.Tensor) -> torch.Tensor:
    """Return `wide`, the tensor called `name` by its file. Raise `UnsupportedModelError` if float16 does not hold it.

    Scales may be larger than float16 holds. Other dtypes hold all numbers that come from finite scales.
    """
    if wide.dtype is torch.float16 and not bool(torch.stack(torch.aminmax(wide)).isfinite().all()):
        what = "holds NaN, infinity or numbers beyond float16"
        raise UnsupportedModelError(f"tensor {name} {what}; use --dtype bfloat16")
    return wide
