"""Slots for LoRA adapters on the device, and the adapters in host memory that are copied to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

# Kernels read so many ranks at once: 16 bytes of a 16-bit type.
RANK_MULTIPLE_COUNT = 8
_ALIGNED_COUNT = 4  # 32-bit numbers in 16 bytes


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
    rank. The rank is the largest of the modules', padded. ranks: of each module; 0 = unchanged.
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
        sizes = [shape.elements(padded_rank(max(of_layer))) for shape, of_layer in zip(shapes, ranks, strict=True)]
        flat = torch.zeros(sum(sizes), dtype=dtype, pin_memory=pinned)
        layers: list[HostLayer | None] = []
        for shape, of_layer, part in zip(shapes, ranks, flat.split(sizes), strict=True):
            rank, modules = padded_rank(max(of_layer)), len(shape.outs)
            a, b = part.split([modules * rank * shape.ins, rank * sum(shape.outs)])
            layer = HostLayer(a.view(modules, rank, shape.ins), b.view(sum(shape.outs), rank), of_layer)
            layers.append(layer if rank else None)
        return cls(flat, tuple(layers))


class LayerSlots:
    """Slots of one layer: a [S, modules * R * in], b [S, out * R], in the model's dtype.

    The content of a slot, whose adapter has rank r in this layer, begins its part of `a` and `b`: [modules, r, in] and
    [out, r], as in host memory. So a load is one copy of each. ranks: [S] int32 on the device; 0 if the adapter leaves
    the layer as it is. module_ranks: those of all modules of each slot, on the host. Module m has the outputs bounds[m]
    .. bounds[m + 1].
    """

    def __init__(self, shape: LayerShape, ranks: torch.Tensor, rank: int, dtype: torch.dtype) -> None:
        """rank: R, the largest."""
        self.bounds = (0, *accumulate(shape.outs))
        self.rank = rank
        self.ranks = ranks
        count, device = len(ranks), ranks.device
        self.a = torch.zeros((count, len(shape.outs) * rank * shape.ins), dtype=dtype, device=device)
        self.b = torch.zeros((count, sum(shape.outs) * rank), dtype=dtype, device=device)
        self.module_ranks: list[tuple[int, ...]] = [()] * count

    def content(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [modules, r, in] and B [out, r] of a slot's adapter, which changes the layer."""
        modules, rank = len(self.bounds) - 1, padded_rank(max(self.module_ranks[slot]))
        ins = self.a.shape[1] // (modules * self.rank)
        a = self.a[slot, : modules * rank * ins].view(modules, rank, ins)
        return a, self.b[slot, : self.bounds[-1] * rank].view(-1, rank)


class DeviceSlots:
    """All slots of a model. `rank`: the largest, padded. `ranks`: [layers, S] int32, of each layer and slot."""

    def __init__(
        self, shapes: Sequence[LayerShape], count: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = count
        self.rank = padded_rank(max_rank)
        self.shapes = tuple(shapes)
        self.dtype, self.device = dtype, device
        # Every layer's begin at a multiple of 16 bytes: kernels are compiled for aligned pointers.
        width = -(-count // _ALIGNED_COUNT) * _ALIGNED_COUNT
        self.ranks = torch.zeros((len(shapes), width), dtype=torch.int32, device=device)[:, :count]
        pairs = zip(shapes, self.ranks.unbind(), strict=True)
        self.layers = [LayerSlots(shape, ranks, self.rank, dtype) for shape, ranks in pairs]

    def hold(self, slot: int, adapter: HostAdapter) -> list[int]:
        """Note the adapter of a slot on the host. Return its column of `ranks`."""
        for layer, content in zip(self.layers, adapter.layers, strict=True):
            layer.module_ranks[slot] = () if content is None else content.ranks
        return [0 if content is None else content.b.shape[1] for content in adapter.layers]

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
        self._slots.ranks[:, slot] = torch.tensor(self._slots.hold(slot, adapter))
        for layer, content in zip(self._slots.layers, adapter.layers, strict=True):
            if content is not None:
                a, b = layer.content(slot)
                a.copy_(content.a)
                b.copy_(content.b)

    def finish(self) -> None:
        """Do nothing: no copy runs between calls."""
