"""Gate between a part of a layer and its output projection."""

import torch

from roseinfer.kernels.common.availability import has_triton


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) [T, N], which may overwrite x. Rows of the gate may be apart."""
    if has_triton(x.device):
        from roseinfer.kernels.linear.activation import multiply_by_sigmoid

        return multiply_by_sigmoid(x, gate)
    return x.mul_(gate.sigmoid())
