"""Adapters' matrices of one layer, as the kernels read them."""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch


class SlotMatrices(NamedTuple):
    """Matrices of a layer with M modules (such as q, k and v), whose outputs are stacked, in S slots of rank R.

    An adapter changes the outputs of module m by (x @ A[m].T) @ b.T, where b is the module's rows of B. A slot holds A
    [M, r, in] and B [out, r] of an adapter of rank r without gaps, at the beginning of its part of `a` and `b`.

    a: [S, M * R * in], b: [S, out * R], both contiguous and of one dtype. ranks: [S] int32, multiples of 8; 0 if the
    slot's adapter leaves the layer alone. starts: [out] int32, m * R for each output. arrived: [1] int32, zero at
    first, a counter of programs (`fused`). modules: M. max_rank: R. multiple: see `multiple_of`.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    starts: torch.Tensor
    arrived: torch.Tensor
    modules: int
    max_rank: int
    multiple: int = 1

    @property
    def columns(self) -> int:
        """M * R, the sums of a token."""
        return self.modules * self.max_rank

    def content(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [M, r, in] and B [out, r] of a slot."""
        rank, outs = int(self.ranks[slot]), len(self.starts)
        width = self.a.shape[1] // self.columns
        a = self.a[slot, : self.modules * rank * width].view(self.modules, rank, width)
        return a, self.b[slot, : outs * rank].view(outs, rank)


class SlotRows(NamedTuple):
    """Rows of a product with the slot of each.

    slots: [T] int32, -1 without an adapter. inputs: what A multiplies, if the product's input has other columns.
    """

    slots: torch.Tensor
    matrices: SlotMatrices
    inputs: torch.Tensor | None = None


def starts_of(bounds: Sequence[int], max_rank: int, device: torch.device) -> torch.Tensor:
    """Return `SlotMatrices.starts` for modules with the outputs bounds[m] to bounds[m + 1]."""
    widths = torch.tensor(bounds[1:]) - torch.tensor(bounds[:-1])
    return (torch.arange(len(widths)) * max_rank).repeat_interleave(widths).to(device, torch.int32)


def multiple_of(bounds: Sequence[int]) -> int:
    """Return a number that divides all bounds of modules' outputs, and half of the outputs, where `up` begins."""
    return gcd(*bounds, bounds[-1] // 2)
