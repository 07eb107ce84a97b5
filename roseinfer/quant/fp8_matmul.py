"""Products by weights in FP8 on a GPU of the Hopper generation.

Few rows read the weight and widen it in registers (W8A16: `skinny_linear`), so inputs are not rounded and the
operations around the product stay fused. More rows are rounded to FP8 as well, by the norm or activation before the
product (W8A8). A row of a large step and the same row in a small one therefore differ by the rounding of activations.
"""

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.linear.fp8_product import MULTIPLE_COLUMNS, Fp8Factor
from roseinfer.kernels.linear.fp8_rows import Fp8Rows, activated_rows, gated_rows, normed_rows, plain_rows
from roseinfer.kernels.linear.fp8_tiles import Parts
from roseinfer.kernels.linear.normed_product import MAX_ROWS, normed_product
from roseinfer.kernels.linear.skinny import takes_small
from roseinfer.kernels.linear.small_product import SmallProduct
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, JointProduct, Matmul, Norm, Pair
from roseinfer.quant.cuda_matmul import CudaMatmul
from roseinfer.quant.cuda_rows import FewOrMany, SkinnyMatmul
from roseinfer.quant.fp8_weight import Fp8Weight


class Fp8Matmul(FewOrMany):
    """`Matmul` with inputs and results in bfloat16 or float16. The result overwrites a residual."""

    def __init__(self, weight: Fp8Weight, bias: torch.Tensor | None, epilogue: Epilogue, parts: Parts) -> None:
        """parts: workspace that all products of a model share.

        Raises `UnsupportedModelError` for a weight of an unsupported shape.
        """
        check_shape(weight)
        self._weight = weight
        self.parts = parts
        self._factor = Fp8Factor(weight.codes, weight.scales, parts)
        self._bias = bias
        self._epilogue = epilogue
        self.few = SkinnyMatmul(weight.codes, weight.scales, bias, epilogue)

    @property
    def grouped(self) -> bool:
        """True if rows have a scale for each 128 columns."""
        return self._factor.grouped

    def bare(self) -> "Fp8Matmul":
        return Fp8Matmul(self._weight, self._bias, NO_EPILOGUE, self.parts)

    def paired(self, second: Matmul) -> Pair | None:
        if isinstance(second, Fp8Matmul) and second._epilogue == NO_EPILOGUE:
            return Fp8Pair(self, second)
        return None

    def joined(self, second: Matmul) -> JointProduct | None:
        if isinstance(second, CudaMatmul) and second.small_weight is not None:
            return Fp8Joint(self, second, second.small_weight)
        return None

    def takes_small(self, rows: int) -> bool:
        """Return True if the launch for so many rows may compute a `SmallProduct`."""
        return takes_small(rows, self._weight.codes, self._epilogue.gated, self._weight.scales)

    # Steps of a product of many rows
    def prepared(self, x: torch.Tensor, norm: Norm | None) -> Fp8Rows:
        """Return x or norm(x), rounded for this product."""
        if norm is None:
            return plain_rows(x, grouped=self.grouped)
        return normed_rows(x, norm.weight, norm.bias, norm.eps, grouped=self.grouped)

    def product(self, inputs: Fp8Rows, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._factor(inputs, dtype, self._bias, residual)

    def finish_for(self, second: "Fp8Matmul", y: torch.Tensor) -> Fp8Rows:
        """Apply the epilogue to a product and round the result for the product of `second`."""
        activation, grouped = self._epilogue.activation, second.grouped
        if activation is None:
            return plain_rows(y, grouped=grouped)
        return (gated_rows if self._epilogue.gated else activated_rows)(y, activation, grouped=grouped)


class Fp8Joint:
    """`JointProduct` with a second, small weight in 16 bits: in one launch for a row, else in one of its own."""

    def __init__(self, first: Fp8Matmul, second: Matmul, small: torch.Tensor) -> None:
        """small: the weight of `second`."""
        self._first, self._second, self._small = first, second, small

    def __call__(self, norm: Norm, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, rows = self._first, x.shape[0]
        if norm.bias is not None or rows > MAX_ROWS:
            return first.after(norm, x), self._second.after(norm, x)
        if first.takes_small(rows):
            small = SmallProduct(self._small, torch.empty(rows, len(self._small), dtype=x.dtype, device=x.device))
            return first.few(x, norm=norm, small=small), small.out
        # While it runs, the first product reads its weight.
        second = normed_product(x, self._small, norm.weight, norm.eps, first.parts)
        return first.after(norm, x), second


class Fp8Pair:
    """`Pair` that writes only the sums before the activation in 16 bits between its two products."""

    def __init__(self, first: Fp8Matmul, second: Fp8Matmul) -> None:
        self._first = first
        self._second = second

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        first, second, rows = self._first, self._second, x.shape[0]
        if first.few.pays(rows) or second.few.pays(rows):
            return second(first.after(norm, x), residual)
        between = first.finish_for(second, first.product(first.prepared(x, norm), x.dtype))
        return second.product(between, x.dtype, residual)


def check_shape(weight: Fp8Weight) -> None:
    """Raise `UnsupportedModelError` for a weight of a size that the library's products do not support."""
    rows, columns = weight.codes.shape
    least = SCALE_BLOCK if weight.is_block else MULTIPLE_COLUMNS
    if rows % MULTIPLE_COLUMNS or columns % least:
        raise UnsupportedModelError(
            f"a matrix of {rows} x {columns} in FP8 is not supported on a GPU: "
            f"{least} does not divide {columns}, or {MULTIPLE_COLUMNS} does not divide {rows}"
        )
