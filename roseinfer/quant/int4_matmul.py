"""Products by weights in four bits on a GPU (W4A16): inputs are not rounded.

Few rows read the weight and widen it in registers, with the operations around the product fused in (`int4_linear`).
More rows take tiles that widen it, too, and prompts the library, by a copy in 16 bits.
"""

from copy import copy

import torch

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.linear.int4_codes import PackedInt4, pack
from roseinfer.kernels.linear.int4_product import Int4Factor, Int4Workspace
from roseinfer.kernels.linear.nvfp4_codes import pack_nvfp4
from roseinfer.quant.base import NO_EPILOGUE, Epilogue
from roseinfer.quant.cuda_rows import FewOrMany, SkinnyMatmul
from roseinfer.quant.int4_weight import DEFAULT_ZERO, MAX_CODE, Int4Weight
from roseinfer.quant.nvfp4_weight import Nvfp4Weight

# Columns of inputs that kernels load at a time: 16 bytes.
_MULTIPLE_COLUMNS = 8


class Int4Matmul(FewOrMany):
    """`Matmul` with inputs and results in bfloat16 or float16. The result overwrites a residual."""

    def __init__(
        self,
        weight: Int4Weight | Nvfp4Weight,
        bias: torch.Tensor | None,
        epilogue: Epilogue,
        inputs: torch.Tensor | None,
        workspace: Int4Workspace,
    ) -> None:
        """inputs: [K], the column of the input that each column of the weight multiplies; None: in their order.
        workspace: memory that all products of a model share.

        Raises `UnsupportedModelError` for a weight that the kernels do not support.
        """
        self._weight = packed(weight)
        self._factor = Int4Factor(self._weight, workspace)
        self._bias = bias
        self._inputs = inputs
        self._set_epilogue(epilogue)

    def _set_epilogue(self, epilogue: Epilogue) -> None:
        self._epilogue = epilogue
        self.few = SkinnyMatmul(self._weight, None, self._bias, epilogue, self._inputs)

    def bare(self) -> "Int4Matmul":
        other = copy(self)
        other._set_epilogue(NO_EPILOGUE)
        return other

    def product(self, inputs: torch.Tensor, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        ordered = inputs if self._inputs is None else inputs.index_select(1, self._inputs)
        return self._factor(ordered, self._bias, residual)


def packed(weight: Int4Weight | Nvfp4Weight) -> PackedInt4:
    """Return the weight as kernels read it: exactly, or with scales and offsets of int4 rounded to float16.

    Raises `UnsupportedModelError` for a weight that they do not support.
    """
    rows, columns = weight.shape
    if columns % _MULTIPLE_COLUMNS:
        raise UnsupportedModelError(
            f"a matrix of {rows} x {columns} in four bits is not supported: "
            f"{_MULTIPLE_COLUMNS} does not divide {columns}"
        )
    if isinstance(weight, Nvfp4Weight):
        return pack_nvfp4(weight.codes, weight.scales, weight.factors)
    return pack(weight.codes, *half_scales(weight))


def half_scales(weight: Int4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and shifts in float16: the matrix is scale * (code - 8) + shift.

    Raises `UnsupportedModelError` for numbers beyond float16.
    """
    wide = weight.scales.to(torch.float32)
    shifts = torch.zeros_like(wide) if weight.offsets is None else DEFAULT_ZERO * wide - weight.offsets
    least, most = ((shifts + step * wide).to(torch.float16) for step in (-DEFAULT_ZERO, MAX_CODE - DEFAULT_ZERO))
    scales, shifts = wide.to(torch.float16), shifts.to(torch.float16)
    finite = scales.isfinite() & shifts.isfinite() & least.isfinite() & most.isfinite()
    if not (finite & (scales != 0).logical_or(wide == 0)).all():
        raise UnsupportedModelError("weights in four bits and their scales have to be within the range of float16")
    return scales, shifts
