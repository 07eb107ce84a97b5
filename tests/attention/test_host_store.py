import gc
import os
import weakref

import pytest
import torch

from roseinfer.attention import host_store
from roseinfer.attention.host_store import GIB, HostStore, check_host_memory, divide_host_memory
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.pages import _unlock, fresh_pages, pinned_pages
from roseinfer.core.errors import ConfigError
from roseinfer.kernels.common.fp8_codes import CODES
from tests.helpers.attention import spec_of

SPECS = [spec_of(4, 2, 8), spec_of(4, 1, 16), spec_of(8, 2, 8, window=3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, CODES])
def test_a_host_block_has_room_for_every_layer_of_a_block(dtype):
    store = KVStore(5, 4, SPECS, dtype, torch.device("cpu"))
    host = HostStore(3000, store)
    assert [part.shape[0] for part in host.parts] == [3000, 3000]
    assert sum(part.shape[1] for part in host.parts) == KVStore.bytes_per_block(SPECS, 4, dtype)
    for device, kept in zip(store.blocks, host.parts, strict=True):
        assert device.shape == (5, kept.shape[1]) and device.is_contiguous() and kept.is_contiguous()
        kept.fill_(1 + len(host.parts))  # would change another part if they overlapped
    assert all(int(part.sum(dtype=torch.int64)) == part.numel() * 3 for part in host.parts)
    store.blocks[0][2] = 56
    (keys, values), (other, _) = store.layer(0), store.layer(1)
    assert bool(keys.view(torch.uint8)[2].eq(56).all()) and bool(values.view(torch.uint8)[2].eq(56).all())
    assert not other.view(torch.uint8).any() and not keys.view(torch.uint8)[[0, 1, 3, 4]].any()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_memory_is_there_as_long_as_the_store_is(monkeypatch, mode):
    gone = []

    def watched(num_bytes: int) -> torch.Tensor:
        pages = fresh_pages(num_bytes)
        weakref.finalize(pages, gone.append, num_bytes)
        return pages

    monkeypatch.setattr(host_store, "fresh_pages", watched)
    with mode():
        host = HostStore(10, KVStore(1, 4, SPECS, torch.float32, torch.device("cpu")))
    gc.collect()
    assert not gone and host.parts
    del host
    gc.collect()
    assert gone


def test_blocks_of_a_size_in_gib():
    assert divide_host_memory(0.0, 1 << 20) == (0, 0)
    assert divide_host_memory(1.5, 1 << 20) == (1536, 0)
    with pytest.raises(ConfigError, match=r"kv_offloading_size is 0\.001 GiB, but one KV block takes 2359296 bytes"):
        divide_host_memory(0.001, 2359296)


def test_slots_of_states_take_the_share_of_the_memory_that_they_have_on_the_device():
    assert divide_host_memory(1.0, 1 << 20, 0.25, 4 << 20) == (512, 128)
    assert divide_host_memory(0.0, 1 << 20, 0.25, 4 << 20) == (0, 0)


def test_too_large_a_size_is_rejected_with_the_available_memory(monkeypatch):
    monkeypatch.setattr(host_store, "available_memory_bytes", lambda: 100 * GIB)
    check_host_memory(90 * GIB)
    with pytest.raises(ConfigError, match=r"96\.0 GiB of host memory, but no more than 90\.0 GiB are available"):
        check_host_memory(96 * GIB)
    store = KVStore(1, 4, SPECS, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match="no more than 90"):
        HostStore(96 * GIB // store.blocks[0].shape[1], store)


def test_want_of_address_space_is_an_error_of_the_option(monkeypatch):
    def full(num_bytes: int) -> torch.Tensor:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_store, "fresh_pages", full)
    with pytest.raises(ConfigError, match="lower kv_offloading_size"):
        HostStore(10, KVStore(1, 4, SPECS, torch.float32, torch.device("cpu")))


class Runtime:
    """Stand-in for the CUDA runtime's functions that lock pages."""

    def __init__(self, error: int) -> None:
        self.error, self.locked = error, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.error:
            self.locked[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


def test_pages_are_locked_as_long_as_they_are_there(monkeypatch):
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pages = pinned_pages(1 << 16)
    assert runtime.locked == {pages.data_ptr(): 1 << 16}
    _unlock(runtime, pages.data_ptr(), owner=os.getpid() + 1)
    assert runtime.locked, "a fork has no say in it"
    del pages
    gc.collect()
    assert not runtime.locked


def test_memory_that_the_driver_cannot_lock_is_an_error_of_the_option(monkeypatch):
    """The driver's last error is read, so that no later call reports it."""
    runtime, asked = Runtime(2), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **how: asked.append(how) or zeros(*size))
    with pytest.raises(ConfigError, match=r"lock 0\.0 GiB .*error 2: out of memory\); lower kv_offloading_size"):
        pinned_pages(1 << 16)
    assert asked[-1] == {"device": "cuda"}
