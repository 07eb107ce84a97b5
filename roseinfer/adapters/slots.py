"""Slots for LoRA adapters on the device, and the adapters in host memory that are copied to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

# Kernels multiply tiles of so many ranks.
RANK_MULTIPLE_COUNT = 16


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of an adapted layer: inputs, and outputs of each module (matrix with an adapter of its own)."""

    ins: int
    outs: tuple[int, ...]

    def elements(self, rank: int) -> int:
        """Return the elements of A and B of so many ranks."""
        return rank * (len(self.outs) * self.ins + sum(self.outs))


@dataclass(frozen=True, slots=True)
class HostLayer:
    """Change of one layer in the model's dtype: a [modules, rank, in], b [out, rank], with zeros beyond a module's own
    rank. ranks: of each module; 0 = unchanged.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """Part of an adapter that one process holds, in host memory.

    layers: in the order of the model's adapted layers; None for an unchanged one. flat: memory of all of them, in their
    order, a before b.
    """

    flat: torch.Tensor
    layers: tuple[HostLayer | None, ...]

    @classmethod
    def empty(
        cls, shapes: Sequence[LayerShape], ranks: Sequence[tuple[int, ...]], dtype: torch.dtype, *, pinned: bool
    ) -> "HostAdapter":
        """Return an adapter of zeros. ranks: of each layer's modules."""
        sizes = [shape.elements(max(of_layer)) for shape, of_layer in zip(shapes, ranks, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned)
        layers: list[HostLayer | None] = []
        for shape, of_layer, part in zip(shapes, ranks, flat.split(sizes), strict=True):
            rank, modules = max(of_layer), len(shape.outs)
            a, b = part.split([modules * rank * shape.ins, rank * sum(shape.outs)])
            layer = HostLayer(a.view(modules, rank, shape.ins), b.view(sum(shape.outs), rank), of_layer)
            layers.append(layer if rank else None)
        return cls(flat, tuple(layers))


class LayerSlots:
    """Slots of one layer: a [S, modules * R, in], b [S, out, R], in the model's dtype.

    Module m has rows m * R .. (m + 1) * R of A, and outputs bounds[m] .. bounds[m + 1]. Rows and columns beyond its
    rank are zero. ranks: [S] int32 on the device, the largest of each slot's modules; 0 if it leaves the layer as it
    is. module_ranks: those of all modules of each slot, on the host.
    """

    def __init__(self, shape: LayerShape, count: int, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.bounds = (0, *accumulate(shape.outs))
        self.rank = rank
        self.a = torch.zeros((count, len(shape.outs) * rank, shape.ins), dtype=dtype, device=device)
        self.b = torch.zeros((count, sum(shape.outs), rank), dtype=dtype, device=device)
        self.ranks = torch.zeros(count, dtype=torch.int32, device=device)
        self.module_ranks: list[tuple[int, ...]] = [()] * count

    def write(self, slot: int, layer: HostLayer | None) -> None:
        """Replace the content of a slot."""
        a, b = self.a[slot].view(-1, self.rank, self.a.shape[2]), self.b[slot]
        used = 0
        if layer is not None:
            used = layer.b.shape[1]
            a[:, :used].copy_(layer.a)
            b[:, :used].copy_(layer.b)
        a[:, used:] = 0
        b[:, used:] = 0
        self.ranks[slot] = used
        self.module_ranks[slot] = () if layer is None else layer.ranks


class DeviceSlots:
    """All slots of a model. `rank`: the largest, rounded up for kernels."""

    def __init__(
        self, shapes: Sequence[LayerShape], count: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = count
        self.rank = padded_rank(max_rank)
        self.shapes = tuple(shapes)
        self.dtype, self.device = dtype, device
        self.layers = [LayerSlots(shape, count, self.rank, dtype, device) for shape in shapes]

    @property
    def slot_bytes(self) -> int:
        return sum(shape.elements(self.rank) for shape in self.shapes) * self.dtype.itemsize


def padded_rank(rank: int) -> int:
    return -(-rank // RANK_MULTIPLE_COUNT) * RANK_MULTIPLE_COUNT


class SlotLoader(Protocol):
    """Copies adapters to slots, beside steps where the device can."""

    def start(self, slot: int, adapter: HostAdapter) -> None:
        """Begin to replace the content of a slot that no step uses."""
        ...

    def finish(self) -> None:
        """Wait for all copies that were started."""
        ...


class CpuSlotLoader:
    """`SlotLoader` within host memory, which copies at once."""

    def __init__(self, slots: DeviceSlots) -> None:
        self._slots = slots

    def start(self, slot: int, adapter: HostAdapter) -> None:
        for layer, content in zip(self._slots.layers, adapter.layers, strict=True):
            layer.write(slot, content)

    def finish(self) -> None:
        """Do nothing: no copy runs between calls."""
