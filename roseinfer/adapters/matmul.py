"""Products of linear layers that also add what the adapters of their rows change."""

import torch
import torch.nn.functional as F

from roseinfer.adapters.slots import LayerSlots
from roseinfer.adapters.step import RowGroup, StepAdapters
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Matmul, Norm, Pair, Pairable
from roseinfer.quant.cpu_matmul import activate


class AdaptedMatmul:
    """`Matmul` of epilogue(x @ weight.T + bias + (x @ A.T) @ B.T) + residual, with A and B of each row's adapter.

    Rows without an adapter get the same bits as from `base`. Steps without any adapter only call that.
    """

    slots: LayerSlots

    def __init__(self, base: Matmul, bare: Matmul, epilogue: Epilogue, step: StepAdapters) -> None:
        """bare: `base` without its epilogue."""
        self._base = base
        self._bare = bare
        self._epilogue = epilogue
        self._step = step

    def bare(self) -> "AdaptedMatmul":
        made = AdaptedMatmul(self._bare, self._bare, NO_EPILOGUE, self._step)
        made.slots = self.slots
        return made

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        groups = self._changing() if self._step.rows is not None else None
        if not groups:
            return self._base(x, residual, out)
        if self._epilogue == NO_EPILOGUE:
            result = self._base(x, residual)
            self._add(groups, x, result)
        else:
            result = (self._gated if self._epilogue.gated else self._activated)(groups, x)
            result = result if residual is None else result + residual
        return result if out is None else out.copy_(result)

    def after(self, norm: Norm, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self(norm(x), None, out) if self._changing() else self._base.after(norm, x, out)

    def paired(self, second: Matmul) -> Pair | None:
        if not isinstance(second, AdaptedMatmul) or not isinstance(self._base, Pairable):
            return None
        pair = self._base.paired(second._base)
        return None if pair is None else _AdaptedPair(self, second, pair)

    def _changing(self) -> list[RowGroup]:
        """Return the step's tokens by those of its adapters that change this layer."""
        return [group for group in self._step.groups if self.slots.module_ranks[group.slot]]

    def _gated(self, groups: list[RowGroup], x: torch.Tensor) -> torch.Tensor:
        """Gate all rows in one pass: `base` also does it after its product, so the others' bits stay."""
        result = self._bare(x)
        self._add(groups, x, result)
        return activate(result, self._epilogue).to(x.dtype)

    def _activated(self, groups: list[RowGroup], x: torch.Tensor) -> torch.Tensor:
        """Compute rows with adapters again: products may fuse an activation, which rounds in another way."""
        result = self._base(x)
        for group in groups:
            rows = x if group.index is None else x.index_select(0, group.index)
            changed = self._bare(rows)
            changed += self._change(group.slot, rows).to(changed.dtype)
            changed = activate(changed, self._epilogue).to(x.dtype)
            result = changed if group.index is None else result.index_copy_(0, group.index, changed)
        return result

    def _add(self, groups: list[RowGroup], x: torch.Tensor, result: torch.Tensor) -> None:
        for group in groups:
            if group.index is None:
                result += self._change(group.slot, x).to(result.dtype)
            else:
                change = self._change(group.slot, x.index_select(0, group.index))
                result.index_add_(0, group.index, change.to(result.dtype))

    def _change(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Return (x @ A.T) @ B.T [n, out] of all modules."""
        slots = self.slots
        a, b = slots.content(slot)
        bounds = slots.bounds
        change = x.new_zeros((len(x), bounds[-1]))
        for module, rank in enumerate(slots.module_ranks[slot]):
            if rank:
                shrunk = F.linear(x, a[module, :rank])
                outs = slice(bounds[module], bounds[module + 1])
                change[:, outs] = F.linear(shrunk, b[outs, :rank])
        return change


class _AdaptedPair:
    """`Pair` for steps without adapters; others make the two products one after the other."""

    def __init__(self, first: AdaptedMatmul, second: AdaptedMatmul, pair: Pair) -> None:
        self._first = first
        self._second = second
        self._pair = pair

    def __call__(self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if self._first._step.rows is None:
            return self._pair(norm, x, residual)
        return self._second(self._first.after(norm, x), residual)
