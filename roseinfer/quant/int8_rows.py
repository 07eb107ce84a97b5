"""Linear layer in int8 on a CPU by compiled functions, which do what is around the product as well, but for gates."""

from collections.abc import Callable
from copy import copy
from functools import cache

import torch

from roseinfer.kernels.cpu import native
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm
from roseinfer.quant.cpu_matmul import activate
from roseinfer.quant.int8_product import OnednnProduct, activation_codes, is_exact
from roseinfer.quant.int8_weight import Int8Weight
from roseinfer.quant.rotation import Rotation


def runs_natively(weight: Int8Weight) -> bool:
    """Return True if the compiled functions are there, and take a weight of this shape."""
    return _is_exact_here() and weight.codes.shape[1] % native.MULTIPLE_COLUMNS == 0


@cache
def _is_exact_here() -> bool:
    """Return True if the compiled products are there and exact on this CPU, by whatever instructions."""
    return native.instructions() is not None and is_exact(_Product, activation_codes())


class _Product:
    """`Int8Product` by compiled functions."""

    def __init__(self, weight: Int8Weight) -> None:
        self._rows = native.Int8Rows(weight.codes, weight.scales, None, block=1, max_code=activation_codes(), threads=1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.empty(x.shape[0], self._rows.out_width)
        self._rows(x, None, result, None)
        return result


class Int8RowsMatmul:
    """`Matmul` in int8, by compiled functions. A row's result does not depend on the other rows.

    Norm, rotation, rounding, bias and activation are the same functions for any number of rows. Only the product of
    many rows may be oneDNN's, whose sums are exact as well.
    """

    def __init__(
        self,
        weight: Int8Weight,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        rotation: Rotation,
        many: OnednnProduct | None = None,
        many_rows: int = 0,
    ) -> None:
        """weight: rotated by `rotation`; the caller may drop it. many: the product of `many_rows` and more; None for
        the compiled one.
        """
        self._many, self._many_rows = many, many_rows
        self._left: Callable[[torch.Tensor], torch.Tensor] | None = None
        if epilogue.gated or not native.has_activation(epilogue.activation):
            left, epilogue = epilogue, NO_EPILOGUE
            self._left = lambda result: activate(result, left)
        self._rows = native.Int8Rows(
            weight.codes,
            weight.scales,
            None if bias is None else bias.float(),
            block=rotation.block,
            max_code=activation_codes(),
            activation=epilogue.activation,
            threads=torch.get_num_threads(),
        )
        self._narrows = True  # the result to the dtype of x

    def bare(self) -> "Int8RowsMatmul":
        other = copy(self)
        other._rows, other._left, other._narrows = self._rows.bare(), None, False
        return other

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if x.dtype is torch.float32 and self._left is None:
            return self._run(x, None, residual, out)
        result = self._run(x.to(torch.float32), None, None, None)
        if self._left is not None:
            result = self._left(result)
        if residual is not None:
            result.add_(residual)
        if out is not None:
            return out.copy_(result)
        return result.to(x.dtype) if self._narrows else result

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if x.dtype is norm.weight.dtype is torch.float32 and self._left is None:
            return self._run(x, (norm.weight, norm.bias, norm.eps), None, out)
        return self(norm(x), None, out)

    def _run(
        self,
        x: torch.Tensor,
        norm: native.NormArguments | None,
        residual: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = self._rows
        result = torch.empty(x.shape[0], rows.out_width) if out is None or not out.is_contiguous() else out
        x = x.contiguous()
        residual = None if residual is None else residual.contiguous()
        if self._many is None or x.shape[0] < self._many_rows:
            rows(x, residual, result, norm)
        else:
            codes, largest = rows.codes_of(x, norm)
            rows.finish(self._many.of_codes(codes), largest, residual, result)
        return result if out is None or out is result else out.copy_(result)
