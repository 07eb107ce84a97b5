"""Copies of blocks between a GPU and pinned memory, queued while the device is busy."""

import pytest
import torch

from roseinfer.attention.host_store import HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import HostCopy
from roseinfer.kernels.common.fp8_codes import CODES
from tests.helpers.attention import spec_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SPECS = [spec_of(4, 2, 64), spec_of(4, 1, 128), spec_of(8, 2, 64, window=3)]
LATE = 50_000_000  # cycles, some 25 ms


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, CODES])
def test_copies_run_after_earlier_work_and_end_before_wait_returns(dtype, batched):
    from roseinfer.kernels.common.memory_copies import CopyDriver
    from roseinfer.runner.cuda_host_copies import CudaCopier

    store = KVStore(32, 16, SPECS, dtype, torch.device("cuda"))
    host = HostStore(64, store)
    assert all(part.is_pinned() for part in host.parts)
    copier = CudaCopier(store, host, CopyDriver(batched=batched))
    for part in store.blocks:
        part.random_(0, 255)
    want = [part.clone() for part in store.blocks]
    torch.cuda._sleep(LATE)
    for part, kept in zip(store.blocks, want, strict=True):
        kept[:8] = 7
        part[:8] = 7  # a step in flight writes blocks that are stored next
    stored = copier.start([], [HostCopy(block, 63 - block) for block in range(16)])
    assert stored.wait().store_s > 0
    for part, kept in zip(host.parts, want, strict=True):
        assert torch.equal(part[48:].flip(0), kept[:16].cpu())
    torch.cuda._sleep(LATE)
    for part in store.blocks:
        part[16:] = 9  # and blocks that are loaded next
    loads = [HostCopy(16 + block, 63 - block) for block in range(16)]
    times = copier.start(loads, [HostCopy(0, 0)]).wait()
    assert times.load_s > 0 and times.store_s > 0
    for part, kept in zip(store.blocks, want, strict=True):
        assert torch.equal(part[16:], kept[:16]) and torch.equal(part[:16], kept[:16])
    copier.close()
