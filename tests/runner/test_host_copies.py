"""K and V in host memory: loads restore exactly what was stored, whatever runs at the same time."""

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch

from roseinfer.attention.host_store import HostStore
from roseinfer.attention.kv_store import KVStore
from roseinfer.core.plan import HostCopy, StepPlan
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.runner.cuda_host_copies import Addresses
from roseinfer.runner.host_copies import Copier, CpuCopier, time_copies
from roseinfer.runner.threaded import ThreadedRunner
from tests.helpers.attention import spec_of
from tests.helpers.late_copies import LateCopies
from tests.runner.tiny import Bench, greedy

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]  # two blocks
OTHER = [2, 7, 1, 8, 2, 8, 1, 8]
SPECS = [spec_of(4, 2, 8), spec_of(4, 1, 16), spec_of(8, 2, 8, window=3)]


def filled(dtype: torch.dtype, blocks: int = 6) -> KVStore:
    store = KVStore(blocks, 4, SPECS, dtype, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    for part in store.blocks:
        part.copy_(torch.randint(0, 256, part.shape, generator=generator, dtype=torch.uint8))
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, CODES])
def test_a_block_is_restored_byte_for_byte_in_every_layer(dtype):
    store = filled(dtype)
    copier = CpuCopier(store, HostStore(8, store))
    before = [part.clone() for part in store.blocks]
    copier.start([], [HostCopy(1, 5), HostCopy(4, 0)]).wait()
    for part in store.blocks:
        part[[1, 4]] = 0
    copier.start([HostCopy(3, 5), HostCopy(1, 5), HostCopy(0, 0)], []).wait()
    for part, old in zip(store.blocks, before, strict=True):
        assert torch.equal(part, torch.stack([old[4], old[1], old[2], old[1], torch.zeros_like(old[4]), old[5]]))


def test_both_directions_are_timed():
    store = filled(torch.float32)
    copier = CpuCopier(store, HostStore(8, store))
    assert copier.start([], []).wait() == (0.0, 0.0)
    loaded = copier.start([HostCopy(1, 5)], []).wait()
    assert loaded.load_s > 0 and loaded.store_s == 0
    both = time_copies(copier, 6, 4)
    assert both.load_s > 0 and both.store_s > 0


def test_addresses_list_blocks_part_by_part():
    parts = filled(torch.float32).blocks
    addresses = Addresses(parts)
    assert addresses.of([4, 0, 2]).tolist() == [part[block].data_ptr() for part in parts for block in (4, 0, 2)]
    assert addresses.sizes(3).tolist() == [part[0].nbytes for part in parts for _ in range(3)]


def submit(bench: Bench, *args: object, **more: object) -> tuple[StepPlan, object]:
    plan = bench.plan(*args, **more)
    handle = bench.runner.submit(plan)
    bench.runner.sample(handle)
    return plan, handle


@pytest.fixture
def copier_of_a_gpu(monkeypatch) -> Callable[[KVStore, HostStore], Copier]:
    return LateCopies(monkeypatch).copier


def test_a_gpus_copier_holds_its_memory_and_wait_ends_its_copies(copier_of_a_gpu):
    store = filled(torch.bfloat16)
    host = HostStore(8, store)
    watched = weakref.ref(host)
    copier = copier_of_a_gpu(store, host)
    del host
    gc.collect()
    assert watched() is not None, "its pages go with it"
    before = [part.clone() for part in store.blocks]
    stored = copier.start([], [HostCopy(1, 5), HostCopy(4, 0)])
    assert stored.wait() == (0.0, 0.002)
    for part in store.blocks:
        part[[1, 4]] = 0
    loaded = copier.start([HostCopy(3, 5), HostCopy(1, 0)], [HostCopy(2, 7)])
    assert [int(part[1].sum()) for part in store.blocks] == [0, 0], "later"
    assert loaded.wait() == (0.002, 0.002)
    for part, old in zip(store.blocks, before, strict=True):
        assert torch.equal(part[[0, 1, 2, 3, 5]], old[[0, 4, 2, 1, 5]])
    copier.close()


@pytest.mark.parametrize("of_gpu", [False, True])
@pytest.mark.parametrize("threaded", [False, True])
def test_a_request_continues_from_blocks_that_were_in_host_memory(threaded, of_gpu, request):
    """Store K and V while the request decodes, reuse its blocks for another request, then load them into
    other blocks.
    """
    bench = Bench(host_blocks=4, copier_of=request.getfixturevalue("copier_of_a_gpu") if of_gpu else CpuCopier)
    want = greedy(bench.model, PROMPT, 4)
    inner = bench.runner
    if threaded:
        bench.runner = ThreadedRunner(inner)
    handles = [submit(bench, [bench.admit(0, PROMPT)], [bench.row(0, 0, 8)])[1]]
    # In flight: the step that writes the blocks, and the one that stores them.
    handles.append(submit(bench, [], [bench.row(0, 8, 1)], stores=[HostCopy(0, 3), HostCopy(1, 1)])[1])
    out = [bench.runner.collect(handle).rows[0].token_ids[0] for handle in handles]
    assert out == want[:2]
    # Another request writes the first one's blocks in one step. The next step, in flight with it, loads into other
    # blocks.
    bench.next_block = 0
    handles = [submit(bench, [bench.admit(1, OTHER)], [bench.row(1, 0, 8)], released=[0])[1]]
    handles.append(submit(bench, [], [], loads=[HostCopy(10, 3), HostCopy(11, 1)])[1])
    results = [bench.runner.collect(handle) for handle in handles]
    assert results[0].rows[0].token_ids[0] == greedy(bench.model, OTHER, 1)[0]
    assert results[1].loads_s > 0 and results[1].stores_s == 0 and results[1].duration_s >= results[1].loads_s
    again = bench.admit(2, [*PROMPT, *out], prompt_len=8, blocks=(10, 11))
    bench.next_block = 12
    handle = submit(bench, [again], [bench.row(2, 8, 2)])[1]
    assert bench.runner.collect(handle).rows[0].token_ids[0] == want[2]
    bench.runner.close()


def test_a_load_waits_for_a_step_in_flight_that_writes_the_block():
    """Abort the request that wrote the block during its step, which frees its blocks before the step ends."""
    bench = Bench(host_blocks=4)
    bench.runner = ThreadedRunner(bench.runner)
    first = submit(bench, [bench.admit(0, PROMPT)], [bench.row(0, 0, 8)])[1]
    bench.runner.collect(first)
    bench.runner.collect(submit(bench, [], [], stores=[HostCopy(0, 0), HostCopy(1, 1)])[1])
    kept = bench.store.data[:2].clone()
    writing = submit(bench, [bench.admit(1, OTHER)], [bench.row(1, 0, 8)], released=[0])[1]
    loading = submit(bench, [], [], released=[1], loads=[HostCopy(2, 0), HostCopy(3, 1)])[1]
    bench.runner.collect(writing)
    bench.runner.collect(loading)
    assert torch.equal(bench.store.data[2:4], kept)
    bench.runner.close()


def test_a_runner_without_host_blocks_refuses_a_plan_that_has_copies():
    bench = Bench()
    with pytest.raises(AssertionError, match="host memory"):
        bench.run([], [], loads=[HostCopy(0, 0)])


def test_random_copies_between_random_steps_keep_every_byte():
    """Apply the same copies one by one to a model of both sides."""
    rng = random.Random(4)
    bench = Bench(host_blocks=6)
    generator = torch.Generator().manual_seed(3)
    bench.store.data.normal_(generator=generator)
    device = [block.clone() for block in bench.store.data]
    host: dict[int, torch.Tensor] = {}
    for _ in range(60):
        blocks = rng.sample(range(20), 6)
        places = rng.sample(range(6), 3)
        stores = [HostCopy(block, place) for block, place in zip(blocks[:3], places, strict=True)]
        free = [place for place in host if place not in places]
        loads = [HostCopy(block, rng.choice(free)) for block in blocks[3:] if free]
        handle = submit(bench, [], [], loads=loads, stores=stores)[1]
        bench.runner.collect(handle)
        for block, place in loads:
            device[block] = host[place]
        for block, place in stores:
            host[place] = device[block]
        written = rng.randrange(20)
        bench.store.data[written].normal_(generator=generator)
        device[written] = bench.store.data[written].clone()
    assert torch.equal(bench.store.data, torch.stack(device))


def test_memory_lives_as_long_as_its_addresses() -> None:
    part = torch.zeros(4, 16, dtype=torch.uint8)
    watched = weakref.ref(part)
    addresses = Addresses([part])
    del part
    assert watched() is not None and addresses.of([0]).tolist() == [watched().data_ptr()]  # type: ignore[union-attr]
