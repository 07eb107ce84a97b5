"""Large and small projections of the same input, in as few launches as their weights allow."""

from collections.abc import Sequence

import torch

from roseinfer.kernels.common.availability import has_triton
from roseinfer.layers.linear import Linear, Split, StackedOutput, normed
from roseinfer.quant.base import FLOATS, Joinable, JointProduct, Norm, WeightSource


class JointLinear:
    """norm(x) -> its products by large matrices, and by small ones, which are never quantised.

    On a GPU all are one product if the large ones are floats, too. Otherwise the launch for few rows may compute both.
    Adapters change only the large ones.
    """

    def __init__(self, in_features: int, large: Sequence[StackedOutput], small: Sequence[StackedOutput]) -> None:
        self._in, self._outs, self._small_outs = in_features, large, small
        self._large: Linear
        self._small: Linear | None = None
        self._joint: JointProduct | None = None
        self._width = 0  # of the small results

    def load(self, source: WeightSource, names: Sequence[str], small_names: Sequence[str]) -> None:
        """Load all weights. Both lists have a name for each output. Raise like `Linear.load`."""
        build = source.build
        forms = {build.weight_format.form(source, name) for name in (*names, *small_names)}
        if forms == {FLOATS} and build.adapting is None and has_triton(build.device):
            self._large = Linear(self._in, *self._outs, *self._small_outs, split=Split.OUTPUTS)
            self._large.load(source, *names, *small_names)
            self._width = sum(out.width for out in self._small_outs) // build.group.size
            return
        self._large = Linear(self._in, *self._outs, split=Split.OUTPUTS)
        self._large.load(source, *names)
        self._small = Linear(self._in, *self._small_outs, split=Split.OUTPUTS, quantised=False)
        self._small.load(source, *small_names)
        if isinstance(self._large.matmul, Joinable):
            self._joint = self._large.matmul.joined(self._small.matmul)

    def __call__(self, norm: Norm | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both results for x [T, in]; rows may be apart."""
        if self._joint is not None and norm is not None:
            return self._joint(norm, x)
        result = normed(self._large, norm, x)
        if self._small is not None:
            return result, normed(self._small, norm, x)
        return result[:, : -self._width], result[:, -self._width :]
