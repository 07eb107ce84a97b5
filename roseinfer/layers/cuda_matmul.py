"""Products on a GPU: cuBLAS, with the residual added inside the product and one kernel for what else follows."""

import torch
import torch.nn.functional as F

from roseinfer.kernels.activation import gated, gelu_
from roseinfer.layers.matmul import NOTHING_MORE, Epilogue, activate


class CudaMatmul:
    """See `Matmul`. A residual is overwritten by the result: it is the accumulator that the product starts from."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._epilogue = epilogue

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if out is not None:
            assert residual is None and self._bias is None and self._epilogue == NOTHING_MORE
            return torch.mm(x, self._transposed, out=out)
        if residual is not None:
            if self._bias is None:
                return residual.addmm_(x, self._transposed)
            return residual.add_(F.linear(x, self._weight, self._bias))
        return self._finish(F.linear(x, self._weight, self._bias))

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        activation = self._epilogue.activation
        if self._epilogue.gated:
            return gated(y, activation)
        if activation in ("gelu", "gelu_tanh"):
            return gelu_(y, activation)
        return activate(y, self._epilogue)
