import gc

import pytest
import torch

from roseinfer.attention.groups import KVGroups
from roseinfer.attention.kv_store import KVStore
from tests.helpers.attention import spec_of, store_of


@pytest.mark.parametrize(("blocks", "dtype"), [(1, torch.float32), (300, torch.float32), (300, torch.bfloat16)])
def test_starts_as_zeros_that_can_be_written(blocks, dtype):
    store = store_of(blocks, 3, 4, 2, 8, dtype, torch.device("cpu"))
    gc.collect()
    assert store.data.shape == (blocks, 3, 2, 4, 2, 8)
    assert store.data.dtype == dtype
    assert not store.data.any()
    assert store.data.nbytes == blocks * KVStore.bytes_per_block([spec_of(2, 2, 8)] * 3, 4, dtype)
    keys, values = store.layer(1)
    keys[-1] = 1
    values[0] = 2
    assert store.data.sum(dtype=torch.float32) == 3 * keys[0].numel()


def test_copies_of_a_step():
    store = store_of(6, 2, 4, 1, 8, torch.float32, torch.device("cpu"))
    store.data.normal_(generator=torch.Generator().manual_seed(0))
    before = store.data.clone()
    store.copy_blocks(torch.tensor([0, 1, 1]), torch.tensor([3, 4, 5]), 4)
    assert torch.equal(store.data[3], before[0])
    assert torch.equal(store.data[4], before[1])
    assert torch.equal(store.data[5], before[1])
    assert torch.equal(store.data[:3], before[:3])


def test_copies_only_the_slots_asked_for():
    store = store_of(3, 2, 4, 1, 8, torch.float32, torch.device("cpu"))
    store.data.normal_(generator=torch.Generator().manual_seed(0))
    before = store.data.clone()
    store.copy_blocks(torch.tensor([0]), torch.tensor([2]), 3)
    assert torch.equal(store.data[2, :, :, :3], before[0, :, :, :3])
    assert torch.equal(store.data[2, :, :, 3:], before[2, :, :, 3:])
    assert torch.equal(store.data[:2], before[:2])


def test_layers_may_differ_in_heads_and_share_block_ids():
    specs = [spec_of(4, 2, 8), spec_of(4, 1, 16), spec_of(8, 2, 8, window=3)]
    store = KVStore(5, 4, specs, torch.float32, torch.device("cpu"))
    assert [part.shape for part in store.parts] == [(5, 2, 2, 4, 2, 8), (5, 1, 2, 4, 1, 16)]
    assert sum(part.nbytes for part in store.parts) == 5 * KVStore.bytes_per_block(specs, 4, torch.float32)
    for layer, value in enumerate((1.0, 2.0, 3.0)):
        for cache in store.layer(layer):
            cache[1] = value
    store.copy_blocks(torch.tensor([1]), torch.tensor([3]), 3)
    for layer, value in enumerate((1.0, 2.0, 3.0)):
        for cache in store.layer(layer):
            assert cache.shape == (5, 4, specs[layer].kv_heads, specs[layer].head_dim)
            assert bool((cache[3, :3] == value).all()) and not cache[3, 3:].any() and not cache[0].any()


def test_each_group_has_blocks_of_its_own():
    full, window, other = spec_of(4, 2, 8), spec_of(4, 2, 8, window=3), spec_of(4, 1, 16, window=3)
    specs = [full, window, full, other]
    groups = KVGroups.by_window(specs, 100)
    store = KVStore(5, 4, specs, torch.float32, torch.device("cpu"), groups, [7])
    assert [part.shape[:2] for part in store.parts] == [(5, 2), (7, 1), (7, 1)]
    assert [store.layer(layer)[0].shape[0] for layer in range(4)] == [5, 7, 5, 7]
    assert [part.shape for part in store.blocks] == [(5, KVStore.bytes_per_block([full, full], 4, torch.float32))]
    for layer in range(4):
        for cache in store.layer(layer):
            cache[1] = float(layer + 1)
    store.copy_blocks(torch.tensor([1]), torch.tensor([3]), 4, group=1)
    for layer in range(4):
        for cache in store.layer(layer):
            mine = layer in (1, 3)
            assert bool((cache[3] == (layer + 1 if mine else 0)).all())
