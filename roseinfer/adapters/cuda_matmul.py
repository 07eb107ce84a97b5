"""Products on a GPU that also add what the adapters of their rows change.

Few rows add it within the product's kernel, before its activation. More rows add it to the product's result, which is
then finished as without adapters. Rows without an adapter get the same bits as in a step without any.
"""

from functools import cached_property

import torch

from roseinfer.adapters.slots import LayerSlots
from roseinfer.adapters.step import StepAdapters
from roseinfer.kernels.lora.expand import expand
from roseinfer.kernels.lora.shrink import shrink
from roseinfer.kernels.lora.slots import SlotMatrices, SlotSums, starts_of
from roseinfer.quant.base import NO_EPILOGUE, AdapterRows, Epilogue, Matmul, Norm, Pair
from roseinfer.quant.cuda_matmul import CudaMatmul
from roseinfer.quant.cuda_rows import finish
from roseinfer.quant.fp8_matmul import Fp8Matmul


class CudaAdaptedMatmul:
    """`Matmul` of epilogue(x @ weight.T + bias + (x @ A.T) @ B.T) + residual, with A and B of each row's adapter.

    Steps without any adapter only call `base`. The result overwrites a residual.
    """

    slots: LayerSlots

    def __init__(self, base: CudaMatmul | Fp8Matmul, epilogue: Epilogue, step: StepAdapters) -> None:
        self.base = base
        self.epilogue = epilogue
        self.step = step

    @cached_property
    def matrices(self) -> SlotMatrices:
        slots = self.slots
        starts = starts_of(slots.bounds, slots.rank, slots.a.device)
        return SlotMatrices(slots.a, slots.b, slots.ranks, starts, len(slots.bounds) - 1, slots.rank)

    def bare(self) -> "CudaAdaptedMatmul":
        made = CudaAdaptedMatmul(self.base.bare(), NO_EPILOGUE, self.step)
        made.slots = self.slots
        return made

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self.step.rows
        if rows is None:
            return self.base(x, residual, out)
        sums = self.sums(rows, x)
        if self.base.few.pays(len(x)):
            return self.base.few(x, residual=residual, out=out, delta=sums)
        result = finish(expand(self.base.unfinished(x, residual), sums), self.epilogue)
        return result if out is None else out.copy_(result)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.step.rows
        if rows is None:
            return self.base.after(norm, x, out)
        if self.base.few.pays(len(x)):
            fused = norm.bias is None
            sums = self.sums(rows, x, norm) if fused else self.sums(rows, norm(x))
            return self.base.few(x, norm=norm, out=out, delta=sums)
        result = finish(self.expanded_after(rows, norm, x), self.epilogue)
        return result if out is None else out.copy_(result)

    def paired(self, second: Matmul) -> Pair | None:
        if not (isinstance(second, CudaAdaptedMatmul) and isinstance(self.base, Fp8Matmul)):
            return None
        pair = self.base.paired(second.base)
        if pair is None:
            return None
        assert isinstance(second.base, Fp8Matmul)
        return _CudaAdaptedPair(self, self.base, second, second.base, pair)

    # Steps of a product with adapters
    def sums(self, rows: AdapterRows, x: torch.Tensor, norm: Norm | None = None) -> SlotSums:
        """Return x, or an RMSNorm of it, times A of each row's adapter."""
        if norm is None:
            return shrink(x, rows.of_tokens, self.matrices)
        return shrink(x, rows.of_tokens, self.matrices, norm=norm.weight, eps=norm.eps)

    def expanded_after(self, rows: AdapterRows, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        """Return the product of many rows of norm(x) with adapters, before `finish`."""
        normed = norm(x)
        sums = self.sums(rows, normed)
        return expand(self.base.unfinished_after(norm, x, normed), sums)


class _CudaAdaptedPair:
    """`Pair` of products in FP8, which pass on codes. Adapters of the second one read the same rows in 16 bits."""

    def __init__(
        self,
        first: CudaAdaptedMatmul,
        first_base: Fp8Matmul,
        second: CudaAdaptedMatmul,
        second_base: Fp8Matmul,
        pair: Pair,
    ) -> None:
        self._first, self._first_base = first, first_base
        self._second, self._second_base = second, second_base
        self._pair = pair

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        rows = self._first.step.rows
        if rows is None:
            return self._pair(norm, x, residual)
        if self._first_base.few.pays(len(x)) or self._second_base.few.pays(len(x)):
            return self._second(self._first.after(norm, x), residual)
        expanded = self._first.expanded_after(rows, norm, x)
        codes = self._first_base.finish_for(self._second_base, expanded)
        sums = self._second.sums(rows, finish(expanded, self._first.epilogue))  # may overwrite its input
        return expand(self._second_base.product(codes, x.dtype, residual), sums)


def adapted_on_gpu(matmul: Matmul, epilogue: Epilogue, step: StepAdapters) -> CudaAdaptedMatmul:
    """Return the product of a loaded layer with adapters."""
    assert isinstance(matmul, CudaMatmul | Fp8Matmul), "all formats on a GPU have one of these products"
    return CudaAdaptedMatmul(matmul, epilogue, step)
