"""Slots of states."""

import torch

from roseinfer.state.spec import StatePart, StateSpec
from roseinfer.state.store import StateStore

CPU = torch.device("cpu")
WIDE = StateSpec((StatePart("memory", (3, 4, 5), "float32"), StatePart("window", (4, 7), "bfloat16")))
NARROW = StateSpec((StatePart("memory", (2,), "float32"),))


def fill(store: StateStore) -> None:
    for number, tensor in enumerate(store.tensors):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))


def test_bytes_of_a_slot():
    assert WIDE.bytes_per_slot == 3 * 4 * 5 * 4 + 4 * 7 * 2
    store = StateStore(5, (WIDE, NARROW, WIDE), CPU)
    assert store.bytes_per_slot == 2 * WIDE.bytes_per_slot + NARROW.bytes_per_slot
    assert sum(slots.nbytes for slots in store.blocks) == 5 * store.bytes_per_slot


def test_each_layer_has_its_own_part():
    store = StateStore(5, (WIDE, NARROW, WIDE), CPU)
    parts = [store.part(0, "memory"), store.part(1, "memory"), store.part(2, "memory"), store.part(2, "window")]
    assert [tuple(part.shape) for part in parts] == [(5, 3, 4, 5), (5, 2), (5, 3, 4, 5), (5, 4, 7)]
    assert parts[3].dtype is torch.bfloat16
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [part.unique().tolist() for part in parts] == [[0], [1], [2], [3]]


def test_copies_a_slot_of_all_layers():
    store = StateStore(5, (WIDE, NARROW, WIDE), CPU)
    fill(store)
    before = [slots.clone() for slots in store.blocks]
    store.copy(3, 1)
    for slots, old in zip(store.blocks, before, strict=True):
        assert torch.equal(slots[1], old[3])
        assert torch.equal(slots[[0, 2, 3, 4]], old[[0, 2, 3, 4]])
