"""Feed-forward layers of experts, with a router that chooses some of them for each token."""

import torch

from roseinfer.parallel.group import RankGroup, partial_residual, share_of, sum_partials
from roseinfer.quant.base import ExpertNames, Experts, ExpertShape, Norm, WeightSource
from roseinfer.quant.stacked_experts import apart


class RoutedExperts:
    """Weighted sum of the chosen experts of norm(x).

    Each process has the whole router and a slice of every expert's width. All processes choose the same experts.
    """

    def __init__(self, shape: ExpertShape) -> None:
        self._shape = shape
        self._experts: Experts
        self._group: RankGroup | None = None  # that sums partial results

    def load(self, source: WeightSource, names: ExpertNames) -> None:
        """Load router and experts.

        Raises `ConfigError` for a group that cannot share the experts, and otherwise like `WeightFormat.load`.
        """
        build = source.build
        share = share_of(build.group, self._shape.width)
        source = apart(source, self._shape, names)
        self._experts = build.weight_format.experts(source, self._shape, share, names)
        self._group = build.group if build.group.size > 1 else None

    def __call__(self, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Return the sum for x [T, hidden], plus the residual if there is one, which may be overwritten and may be x
        itself.
        """
        assert norm is not None, "layers of experts have a norm before them"
        group = self._group
        if group is None:
            return self._experts(norm, x, residual)
        return sum_partials(group, self._experts(norm, x, partial_residual(group, residual)), residual)
