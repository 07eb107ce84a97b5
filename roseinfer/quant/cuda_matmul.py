"""Products on a GPU: few rows by our own kernels, which fuse what is around the product; more by cuBLAS."""

import torch
import torch.nn.functional as F

from roseinfer.kernels.activation import gated, pointwise
from roseinfer.kernels.skinny_linear import SkinnyNorm, pays, skinny_linear
from roseinfer.quant.base import NOTHING_MORE, Epilogue, Norm


class CudaMatmul:
    """See `Matmul`. A residual is overwritten by the result: it is the accumulator that the product starts from.

    `overlap` below is right because what a product reads, but for its input and residual, never changes.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._epilogue = epilogue
        self._few: dict[int, bool] = {}

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._is_few(x.shape[0]):
            target = residual if residual is not None else out
            return self._skinny(x, residual=residual, out=target)
        if out is not None:
            assert residual is None and self._bias is None and self._epilogue == NOTHING_MORE
            return torch.mm(x, self._transposed, out=out)
        if residual is not None:
            if self._bias is None:
                return residual.addmm_(x, self._transposed)
            return residual.add_(F.linear(x, self._weight, self._bias))
        return self._finish(F.linear(x, self._weight, self._bias))

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self._is_few(x.shape[0]):
            return self._skinny(x, norm=SkinnyNorm(norm.weight, norm.eps, norm.bias), out=out)
        return self(norm(x), None, out)

    def _is_few(self, rows: int) -> bool:
        few = self._few.get(rows)
        if few is None:
            few = self._few[rows] = pays(rows, self._weight, self._epilogue.gated)
        return few

    def _skinny(
        self,
        x: torch.Tensor,
        *,
        norm: SkinnyNorm | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return skinny_linear(
            x,
            self._weight,
            bias=self._bias,
            residual=residual,
            norm=norm,
            activation=self._epilogue.activation,
            gated=self._epilogue.gated,
            out=out,
            overlap=True,
        )

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        activation = self._epilogue.activation
        if self._epilogue.gated:
            assert activation is not None, "a gate without an activation"
            return gated(y, activation)
        return y if activation is None else pointwise(y, activation)
