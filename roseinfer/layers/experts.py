"""Feed-forward layers of experts, with a router that chooses some of them for each token."""

import torch

from roseinfer.parallel.group import RankGroup, partial_residual, share_of, sum_partials
from roseinfer.quant.base import ExpertNames, Experts, ExpertShape, Norm, WeightSource


class RoutedExperts:
    """x + the weighted sum of the chosen experts of norm(x). `x`, the residual stream, may be overwritten.

    Each process has the whole router and a slice of every expert's width. All processes choose the same experts.
    """

    def __init__(self, norm: Norm, shape: ExpertShape, names: ExpertNames) -> None:
        """names: without the name of the layer before them."""
        self._norm = norm
        self._shape = shape
        self._names = names
        self._experts: Experts
        self._group: RankGroup | None = None  # that sums partial results

    def load(self, source: WeightSource, norm: str, prefix: str) -> None:
        """Load router and experts.

        Raises `ConfigError` for a group that cannot share the experts, and otherwise like `WeightFormat.load`.
        """
        build = source.build
        self._norm.load(source, norm)
        share = share_of(build.group, self._shape.width)
        self._experts = build.weight_format.experts(source, self._shape, share, self._names.under(prefix))
        self._group = build.group if build.group.size > 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        group = self._group
        if group is None:
            return self._experts(self._norm, x, x)
        return sum_partials(group, self._experts(self._norm, x, partial_residual(group, x)), x)
