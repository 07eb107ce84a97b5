import gc

import pytest
import torch

from roseinfer.attention.kv_store import KVStore


@pytest.mark.parametrize(("blocks", "dtype"), [(1, torch.float32), (300, torch.float32), (300, torch.bfloat16)])
def test_starts_as_zeros_that_can_be_written(blocks, dtype):
    store = KVStore(blocks, 3, 4, 2, 8, dtype, torch.device("cpu"))
    gc.collect()
    assert store.data.shape == (blocks, 3, 2, 4, 2, 8)
    assert store.data.dtype == dtype
    assert not store.data.any()
    assert store.data.nbytes == blocks * KVStore.bytes_per_block(3, 4, 2, 8, dtype)
    keys, values = store.layer(1)
    keys[-1] = 1
    values[0] = 2
    assert store.data.sum(dtype=torch.float32) == 3 * keys[0].numel()


def test_copies_of_a_step():
    store = KVStore(6, 2, 4, 1, 8, torch.float32, torch.device("cpu"))
    store.data.normal_(generator=torch.Generator().manual_seed(0))
    before = store.data.clone()
    store.copy_blocks(torch.tensor([0, 1, 1]), torch.tensor([3, 4, 5]), 4)
    assert torch.equal(store.data[3], before[0])
    assert torch.equal(store.data[4], before[1])
    assert torch.equal(store.data[5], before[1])
    assert torch.equal(store.data[:3], before[:3])


def test_copies_only_the_slots_asked_for():
    store = KVStore(3, 2, 4, 1, 8, torch.float32, torch.device("cpu"))
    store.data.normal_(generator=torch.Generator().manual_seed(0))
    before = store.data.clone()
    store.copy_blocks(torch.tensor([0]), torch.tensor([2]), 3)
    assert torch.equal(store.data[2, :, :, :3], before[0, :, :, :3])
    assert torch.equal(store.data[2, :, :, 3:], before[2, :, :, 3:])
    assert torch.equal(store.data[:2], before[:2])
