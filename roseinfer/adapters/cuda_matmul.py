"""Products on a GPU that also add what the adapters of their rows change.

Few rows add it within the product's kernel, before its activation. More rows add it to the product's result, together
with the activation if there is a gate. Adapters multiply what the product reads: inputs in FP8 where it does. Rows
without an adapter get the same bits as in a step without any, or another rounding where `skinny_linear` says so.
"""

from functools import cached_property

import torch

from roseinfer.adapters.cuda_sums import AdapterSums
from roseinfer.adapters.slots import LayerSlots
from roseinfer.adapters.step import StepAdapters
from roseinfer.kernels.linear.fp8_rows import Fp8Rows
from roseinfer.kernels.lora.expand_tiles import expand, gated_expanded, gated_rows_expanded
from roseinfer.kernels.lora.shrink_tiles import TileSums
from roseinfer.kernels.lora.slots import SlotMatrices, SlotRows, multiple_of, starts_of
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Matmul, Norm, Pair
from roseinfer.quant.cuda_rows import FewOrMany, finish
from roseinfer.quant.fp8_matmul import Fp8Matmul


class CudaAdaptedMatmul:
    """`Matmul` of epilogue(x @ weight.T + bias + (x @ A.T) @ B.T) + residual, with A and B of each row's adapter.

    Steps without any adapter only call `base`. The result overwrites a residual.
    """

    slots: LayerSlots

    def __init__(self, base: FewOrMany, epilogue: Epilogue, step: StepAdapters, many_sums: AdapterSums) -> None:
        self.base = base
        self.epilogue = epilogue
        self.step = step
        self.many_sums = many_sums

    @cached_property
    def matrices(self) -> SlotMatrices:
        slots = self.slots
        starts = starts_of(slots.bounds, slots.rank, slots.a.device)
        arrived = torch.zeros(1, dtype=torch.int32, device=slots.a.device)
        modules, multiple = len(slots.bounds) - 1, multiple_of(slots.bounds)
        return SlotMatrices(slots.a, slots.b, slots.ranks, starts, arrived, modules, slots.rank, multiple)

    def bare(self) -> "CudaAdaptedMatmul":
        made = CudaAdaptedMatmul(self.base.bare(), NO_EPILOGUE, self.step, self.many_sums)
        made.slots = self.slots
        return made

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = self.step.rows
        if rows is None:
            return self.base(x, residual, out)
        if self.base.few.pays(len(x)):
            return self.base.few(x, residual=residual, out=out, delta=SlotRows(rows.of_tokens, self.matrices))
        return self.many(x, None, residual, out)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.step.rows
        if rows is None:
            return self.base.after(norm, x, out)
        if self.base.few.pays(len(x)):
            return self.base.few(x, norm=norm, out=out, delta=SlotRows(rows.of_tokens, self.matrices))
        return self.many(x, norm, None, out)

    def paired(self, second: Matmul) -> Pair | None:
        if not (isinstance(second, CudaAdaptedMatmul) and isinstance(self.base, Fp8Matmul)):
            return None
        pair = self.base.paired(second.base)
        if pair is None:
            return None
        assert isinstance(second.base, Fp8Matmul)
        return _CudaAdaptedPair(self, self.base, second, second.base, pair)

    def many(
        self, x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the product of many rows of x or norm(x)."""
        inputs, y = self.base.many(x, norm, residual, self.many_sums.ready)
        sums = self.many_sums.of(inputs, self.matrices)
        if self.epilogue.gated:
            assert self.epilogue.activation is not None, "a gate without an activation"
            result = gated_expanded(y, sums, self.epilogue.activation)
        else:
            result = finish(expand(y, sums), self.epilogue)
        return result if out is None else out.copy_(result)


class _CudaAdaptedPair:
    """`Pair` of products in FP8, which pass on codes."""

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
        sums = self._first.many_sums
        inputs, y = self._first_base.many(x, norm, ready=sums.ready)
        between = self._finished(y, sums.of(inputs, self._first.matrices))
        sums.ready()
        result = self._second_base.product(between, x.dtype, residual)
        return expand(result, sums.of(between, self._second.matrices))

    def _finished(self, y: torch.Tensor, sums: TileSums) -> Fp8Rows:
        """Return what the second product reads, from the first one before its epilogue."""
        epilogue = self._first.epilogue
        if epilogue.gated and epilogue.activation is not None and self._second_base.grouped:
            return gated_rows_expanded(y, sums, epilogue.activation)
        return self._first_base.finish_for(self._second_base, expand(y, sums))


def adapted_on_gpu(matmul: Matmul, epilogue: Epilogue, step: StepAdapters, many_sums: AdapterSums) -> CudaAdaptedMatmul:
    """Return the product of a loaded layer with adapters."""
    assert isinstance(matmul, FewOrMany), "all formats on a GPU have such products"
    return CudaAdaptedMatmul(matmul, epilogue, step, many_sums)
