"""Gated activation of gpt-oss's experts, in PyTorch."""

import torch

MAX_GATE = 7.0  # of gate and up
GATE_FACTOR = 1.702  # factor of the gate within the sigmoid


def clamped_swish(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return g * sigmoid(1.702 * g) * (u + 1), where g = min(gate, 7), and u is `up` between -7 and 7."""
    gate, up = gate.clamp(max=MAX_GATE), up.clamp(-MAX_GATE, MAX_GATE)
    return (up + 1) * (gate * torch.sigmoid(gate * GATE_FACTOR))
