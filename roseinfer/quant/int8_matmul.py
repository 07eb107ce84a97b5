"""Linear layer in int8 on a CPU: the product in integers, the operations around it in the model's dtype."""

import torch

from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm
from roseinfer.quant.cpu_matmul import activate
from roseinfer.quant.int8_product import Int8Product
from roseinfer.quant.rotation import Rotation


class Int8Matmul:
    """`Matmul` in int8. A row's result, bias and activation included, does not depend on the other rows.

    Bias, activation and residual follow separately, since each row is multiplied by its scale first.
    """

    def __init__(
        self,
        product: Int8Product,
        bias: torch.Tensor | None,
        epilogue: Epilogue = NO_EPILOGUE,
        rotation: Rotation | None = None,
    ) -> None:
        """rotation: the rotation that was applied to the weight's columns."""
        self.product = product
        self._bias = bias
        self._epilogue = epilogue
        self._rotation = rotation
        self._narrows = True  # the result to the dtype of x

    def bare(self) -> "Int8Matmul":
        other = Int8Matmul(self.product, self._bias, rotation=self._rotation)
        other._narrows = False
        return other

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        dtype = x.dtype
        if dtype is not torch.float32:
            x = x.to(torch.float32)
        if self._rotation is not None:
            x = self._rotation(x)
        result = self.product(x)
        if self._bias is not None:
            result.add_(self._bias)
        if self._epilogue is not NO_EPILOGUE:
            result = activate(result, self._epilogue)
        if residual is not None:
            result.add_(residual)
        if out is not None:
            return out.copy_(result)
        return result.to(dtype) if self._narrows else result

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self(norm(x), None, out)
