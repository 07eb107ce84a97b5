"""Products on a GPU: few rows by our own kernels, which fuse the operations around the product; more by cuBLAS."""

import torch
import torch.nn.functional as F

from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm
from roseinfer.quant.cuda_rows import FewOrMany, SkinnyMatmul


class CudaMatmul(FewOrMany):
    """`Matmul` on a GPU. The result overwrites a residual, which the product accumulates into."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._bias = bias
        self._epilogue = epilogue
        self.few = SkinnyMatmul(weight, None, bias, epilogue)

    @property
    def small_weight(self) -> torch.Tensor | None:
        """The weight for a `SmallProduct`; None if the product is more than that."""
        return None if self._bias is not None or self._epilogue != NO_EPILOGUE else self._weight

    def bare(self) -> "CudaMatmul":
        return CudaMatmul(self._weight, self._bias, NO_EPILOGUE)

    def product(self, inputs: torch.Tensor, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return F.linear(inputs, self._weight, self._bias)
        if self._bias is None:
            return residual.addmm_(inputs, self._transposed)
        return residual.add_(F.linear(inputs, self._weight, self._bias))

    def _of_many(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        if out is None:
            return super()._of_many(x, norm, residual, None)
        assert residual is None and self._bias is None and self._epilogue == NO_EPILOGUE
        return torch.mm(x if norm is None else norm(x), self._transposed, out=out)
