"""Storage of states: one tensor for all layers of one shape, so that one copy moves a slot of all of them."""

from collections.abc import Sequence

import torch

from roseinfer.state.spec import StatePart, StateSpec


class StateStore:
    """States of `num_slots` sequences, for each layer and part.

    tensors: for each part among the layers, [num_slots, layers of it, *shape]. A slot's number is its index in every
    tensor. The slot comes first, so that a copy of a slot reads and writes contiguous memory. Slots begin as zeros.
    """

    def __init__(self, num_slots: int, specs: Sequence[StateSpec], device: torch.device) -> None:
        """specs: of the model's layers with states, in order, at least one."""
        assert specs, "a model without states needs no store"
        self.num_slots = num_slots
        parts = list(dict.fromkeys(part for spec in specs for part in spec.parts))
        counts = dict.fromkeys(parts, 0)
        self._places: list[dict[str, tuple[int, int]]] = []
        for spec in specs:
            self._places.append({part.name: (parts.index(part), counts[part]) for part in spec.parts})
            for part in spec.parts:
                counts[part] += 1
        self.tensors = tuple(_zeros((num_slots, counts[part], *part.shape), part, device) for part in parts)
        self.bytes_per_slot = sum(spec.bytes_per_slot for spec in specs)

    def part(self, layer: int, name: str) -> torch.Tensor:
        """Return a view of a part of one layer's states [num_slots, *shape], strided by slot. layer: its index among
        the layers with states.
        """
        tensor, plane = self._places[layer][name]
        return self.tensors[tensor][:, plane]

    def find(self, layer: int, name: str) -> torch.Tensor | None:
        """Return what `part` does; None if the layer has no such part."""
        return self.part(layer, name) if name in self._places[layer] else None

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The tensors as bytes: [num_slots, bytes of a slot in the tensor] uint8 each, views of the same memory."""
        return tuple(tensor.view(self.num_slots, -1).view(torch.uint8) for tensor in self.tensors)

    def copy(self, src: int, dst: int) -> None:
        """Copy slot `src` to slot `dst`, in every layer."""
        for tensor in self.tensors:
            tensor[dst].copy_(tensor[src])


def _zeros(shape: tuple[int, ...], part: StatePart, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, part.dtype), device=device)
