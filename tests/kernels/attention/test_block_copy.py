import pytest
import torch

from roseinfer.kernels.attention.block_copy import copy_blocks, copy_blocks_reference
from tests.helpers.attention import store_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 16, 2, 64), (1, 32, 1, 80), (2, 16, 5, 24)])  # layers, block, heads, dim
@pytest.mark.parametrize("tokens", [1, 13, 16])
def test_copies(dtype, shape, tokens, device):
    store = store_of(9, *shape, dtype, device)
    store.data.copy_(torch.randn(store.data.shape))
    src = torch.tensor([4, 0, 4], device=device)
    dst = torch.tensor([8, 3, 1], device=device)
    expected = store.data.clone()
    copy_blocks_reference(expected, src, dst, tokens)
    assert not torch.equal(expected, store.data)
    copy_blocks(store.data, src, dst, tokens)
    assert torch.equal(store.data, expected)


def test_copies_like_the_store(device):
    stores = [store_of(5, 2, 16, 2, 64, torch.float32, device) for _ in range(2)]
    stores[0].data.copy_(torch.randn(stores[0].data.shape))
    stores[1].data.copy_(stores[0].data)
    src, dst = torch.tensor([1, 2], device=device), torch.tensor([4, 0], device=device)
    stores[0].copy_blocks(src, dst, 7)
    copy_blocks(stores[1].data, src, dst, 7)
    assert torch.equal(stores[0].data, stores[1].data)


def test_nothing_to_copy(device):
    store = store_of(3, 1, 16, 1, 64, torch.float32, device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    copy_blocks(store.data, none, none, 5)
    assert not store.data.any()
