"""Experts of which one, the shared one, computes every token."""

from dataclasses import replace

import torch

from roseinfer.kernels.common.availability import has_triton
from roseinfer.layers.experts import RoutedExperts
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.gate import add_gated
from roseinfer.layers.linear import Linear, Split, StackedOutput, normed
from roseinfer.quant.base import ExpertNames, ExpertShape, Norm, WeightSource
from roseinfer.quant.expert_names import SharedExpertNames
from roseinfer.quant.stacked_experts import apart


class SharedExperts:
    """Routed experts, and sigmoid(gate(norm(x))) * shared(norm(x)) (Qwen2-MoE, Qwen3.5-MoE).

    On a GPU the shared expert is one more of the stack, if it has the size and form of the others. This saves four of
    seven launches of a small step.
    """

    def __init__(self, shape: ExpertShape, shared_width: int) -> None:
        self._shape, self._shared_width = shape, shared_width
        self._routed: RoutedExperts
        self._apart: GatedExpert | None = None

    def load(self, source: WeightSource, names: ExpertNames) -> None:
        """Load all weights. Raise like `RoutedExperts.load` and `Linear.load`."""
        assert names.shared is not None, "the family names no shared expert"
        shape = replace(self._shape, shared=self._is_alike(apart(source, self._shape, names), names, names.shared))
        self._routed = RoutedExperts(shape)
        self._routed.load(source, names)
        if not shape.shared:
            self._apart = GatedExpert(shape, self._shared_width)
            self._apart.load(source, names.shared)

    def _is_alike(self, source: WeightSource, names: ExpertNames, shared: SharedExpertNames) -> bool:
        """Return True if the shared expert can be one more of the stack. Adapters change it by itself."""
        build, shape = source.build, self._shape
        if (
            not has_triton(build.device)
            or build.adapting is not None
            or self._shared_width != shape.width
            or shape.bias
        ):
            return False
        pairs = (names.gate, shared.gate), (names.up, shared.up), (names.down, shared.down)
        form = build.weight_format.form
        return all(form(source, name.format(0)) == form(source, other) for name, other in pairs)

    def __call__(self, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the sum for x [T, hidden], plus the residual if there is one, which may be overwritten and may be x
        itself.
        """
        if self._apart is None:
            return self._routed(norm, x, residual)
        shared, gate = self._apart(norm, x)
        return add_gated(self._routed(norm, x, residual), shared, gate)


class GatedExpert:
    """Shared expert with products of its own."""

    def __init__(self, shape: ExpertShape, width: int) -> None:
        self._expert = FeedForward(shape.hidden, width, shape.activation)
        # Every process has the whole gate.
        self._gate = Linear(shape.hidden, StackedOutput(1, repeat=True), split=Split.OUTPUTS, quantised=False)

    def load(self, source: WeightSource, names: SharedExpertNames) -> None:
        self._expert.load(source, (names.gate, names.up), names.down)
        self._gate.load(source, names.factor)

    def __call__(self, norm: Norm | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the expert's result [T, hidden] and its gate [T, 1] before the sigmoid."""
        return self._expert(norm, x, None), normed(self._gate, norm, x)
