"""Gate between a part of a layer and its output projection."""

import torch


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) [T, N], which may overwrite x. Rows of the gate may be apart."""
    return x.mul_(gate.sigmoid())
