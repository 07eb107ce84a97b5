"""Products on a GPU: few rows by our own kernels, which fuse the operations around the product; more by cuBLAS."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm
from roseinfer.quant.cuda_rows import SkinnyMatmul, finish


class CudaMatmul:
    """`Matmul` on a GPU. The result overwrites a residual, which the product accumulates into."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._epilogue = epilogue
        self.few = SkinnyMatmul(weight, None, bias, epilogue)

    def bare(self) -> "CudaMatmul":
        return CudaMatmul(self._weight, self._bias, NO_EPILOGUE)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.few.pays(x.shape[0]):
            return self.few(x, residual=residual, out=out)
        if out is not None:
            assert residual is None and self._bias is None and self._epilogue == NO_EPILOGUE
            return torch.mm(x, self._transposed, out=out)
        result = self._unfinished(x, residual)
        return result if residual is not None else finish(result, self._epilogue)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.few.pays(x.shape[0]):
            return self.few(x, norm=norm, out=out)
        return self(norm(x), None, out)

    def many(
        self,
        x: torch.Tensor,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        ready: Callable[[], None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs of a product of many rows, x or norm(x), and the product with bias and residual, which
        `finish` completes. It overwrites a residual. ready: called between the launches of both.
        """
        inputs = x if norm is None else norm(x)
        if ready is not None:
            ready()
        return inputs, self._unfinished(inputs, residual)

    def _unfinished(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is None:
            return F.linear(x, self._weight, self._bias)
        if self._bias is None:
            return residual.addmm_(x, self._transposed)
        return residual.add_(F.linear(x, self._weight, self._bias))
