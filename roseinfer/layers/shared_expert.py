"""Experts of which one, the shared one, computes every token."""

import torch

from roseinfer.layers.experts import RoutedExperts
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.gate import add_gated
from roseinfer.layers.linear import Linear, Split, StackedOutput, normed
from roseinfer.quant.base import ExpertNames, ExpertShape, Norm, WeightSource


class SharedExperts:
    """Routed experts, and sigmoid(gate(norm(x))) * shared(norm(x)) (Qwen2-MoE, Qwen3.5-MoE)."""

    def __init__(self, shape: ExpertShape, shared_width: int) -> None:
        self._routed = RoutedExperts(shape)
        self._shared = FeedForward(shape.hidden, shared_width, shape.activation)
        # Every process has the whole gate.
        self._gate = Linear(shape.hidden, StackedOutput(1, repeat=True), split=Split.OUTPUTS, quantised=False)

    def load(self, source: WeightSource, names: ExpertNames) -> None:
        """Load all weights. Raise like `RoutedExperts.load` and `Linear.load`."""
        assert names.shared is not None, "the family names no shared expert"
        self._routed.load(source, names)
        shared = names.shared
        self._shared.load(source, (shared.gate, shared.up), shared.down)
        self._gate.load(source, shared.factor)

    def __call__(self, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the sum for x [T, hidden], plus the residual if there is one, which may be overwritten and may be x
        itself.
        """
        shared, gate = self._shared(norm, x, None), normed(self._gate, norm, x)
        return add_gated(self._routed(norm, x, residual), shared, gate)
