"""Gates by a sigmoid: of a part of a layer before its output projection, and of a part's result."""

import torch

from roseinfer.kernels.common.availability import has_triton


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate) [T, N], which may overwrite x. Rows of the gate may be apart."""
    if has_triton(x.device):
        from roseinfer.kernels.linear.activation import multiply_by_sigmoid

        return multiply_by_sigmoid(x, gate)
    return x.mul_(gate.sigmoid())


def add_gated(total: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return total + sigmoid(gate) * x [T, N], which overwrites `total`. gate: [T, 1]."""
    if has_triton(x.device):
        from roseinfer.kernels.linear.activation import add_times_sigmoid

        return add_times_sigmoid(total, x, gate)
    return total.addcmul_(x, gate.sigmoid())
