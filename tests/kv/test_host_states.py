"""Snapshots of states in host memory: what is stored, what is found and loaded, and what must not be found."""

import random

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.plan import HostCopy
from roseinfer.core.runner import StatePool
from roseinfer.kv.host_states import HostStates
from roseinfer.kv.manager import HostHit, KvManager
from roseinfer.kv.states import StateGroup
from tests.helpers.cases import examples
from tests.helpers.kv_managers import kv_manager

SIZE = 4
TOKENS = list(range(100, 124))


def manager(slots: int = 4, host_slots: int = 4, blocks: int = 40) -> tuple[KvManager, StateGroup, HostStates]:
    pool = StatePool(slots, 100)
    kv = kv_manager(blocks, SIZE, num_host_blocks=40, states=pool, num_host_slots=host_slots)
    assert kv.states is not None and kv.host_states is not None
    return kv, kv.states, kv.host_states


def compute(kv: KvManager, name: str, tokens: list[int]) -> None:
    kv.open(name)
    kv.attach(name, kv.match(name, tokens))
    assert kv.grow(name, len(tokens)) is not None
    kv.register(name, tokens, len(tokens), len(tokens))


def snapshot(kv: KvManager, name: str, tokens: list[int], position: int) -> int:
    assert kv.states is not None
    slot = kv.states.begin_snapshot(position)
    assert slot is not None
    assert kv.states.finish_snapshot(slot, kv.chain(name).entry(tokens, position // SIZE - 1), position)
    return slot


def store(host: HostStates, slot: int) -> None:
    copy = host.begin_store(slot)
    assert copy is not None
    host.finish_stores([copy])


def overwrite(states: StateGroup) -> None:
    """Take all free slots once."""
    for slot in [states.take_slot() for _ in range(states.pool.num_free)]:
        states.release_slot(slot)
    assert states.num_snapshots == 0


def found(kv: KvManager, name: str, tokens: list[int]) -> HostHit:
    return kv.match_host(name, tokens, kv.match(name, tokens))


def stored_and_overwritten() -> tuple[KvManager, StateGroup, HostStates]:
    """Return a manager whose K/V is in the KV cache, and the only snapshot, after 16 tokens, in host memory."""
    kv, states, host = manager()
    compute(kv, "a", TOKENS)
    store(host, snapshot(kv, "a", TOKENS, 16))
    overwrite(states)
    return kv, states, host


def test_host_slots_need_states_and_a_prefix_cache() -> None:
    assert kv_manager(8, SIZE, num_host_blocks=8, num_host_slots=8).host_states is None
    assert kv_manager(8, SIZE, states=StatePool(4, 1), num_host_slots=8).host_states is None


def test_a_stored_snapshot_continues_a_prefix_after_its_load() -> None:
    kv, states, host = stored_and_overwritten()
    kv.open("b")
    assert kv.match("b", TOKENS).tokens == 0
    hit = found(kv, "b", TOKENS)
    assert (hit.cached, hit.tokens, hit.blocks, len(hit.slots)) == (0, 16, (), 1)
    assert kv.load("b", hit) == [] and len(kv.table("b")) == 4
    copy = host.load(hit.slots[0])
    assert host.is_loading(hit.slots)
    kv.check_integrity()
    assert kv.match("b", TOKENS).tokens == 0, "not before the load is done"
    host.finish_loads([copy])
    kv.release("b")
    assert kv.match("b", TOKENS).tokens == 16 and not found(kv, "b", TOKENS)
    assert (host.stored, host.loaded, states.num_snapshots) == (1, 1, 1)
    kv.check_integrity()


def test_an_exact_repeat_with_a_partly_filled_block_finds_its_state() -> None:
    kv, states, host = manager()
    tokens = TOKENS[:18]
    compute(kv, "a", tokens)
    store(host, snapshot(kv, "a", tokens, 16))
    overwrite(states)
    kv.open("b")
    kv.attach("b", kv.match("b", tokens))
    hit = found(kv, "b", tokens)
    assert hit.tokens == 16 and hit.slots
    assert kv.load("b", hit) == [] and len(kv.table("b")) == 4
    host.cancel_loads([host.load(hit.slots[0])])
    kv.check_integrity()


def test_the_longer_snapshot_counts_whatever_memory_it_is_in() -> None:
    kv, states, host = stored_and_overwritten()
    snapshot(kv, "a", TOKENS, 8)
    kv.open("b")
    assert kv.match("b", TOKENS).tokens == 8 and found(kv, "b", TOKENS).tokens == 16
    snapshot(kv, "a", TOKENS, 20)
    assert kv.match("b", TOKENS).tokens == 20 and not found(kv, "b", TOKENS)
    assert host.num_used == 1 and states.num_snapshots == 2


def test_a_failed_sequence_is_found_in_neither_memory() -> None:
    kv, states, host = stored_and_overwritten()
    kv.open("b")
    copy = host.load(found(kv, "b", TOKENS).slots[0])
    stored = host.begin_store(snapshot(kv, "a", TOKENS, 20))
    assert stored is not None
    kv.invalidate("a")
    host.finish_loads([copy])
    host.finish_stores([stored])
    assert not found(kv, "b", TOKENS) and host.num_used == states.num_snapshots == 0
    kv.close("a")
    kv.check_integrity()
    assert states.num_free == states.num_slots


def test_nothing_is_loaded_without_a_free_slot() -> None:
    kv, states, _ = stored_and_overwritten()
    kv.open("b")
    slots = [states.take_slot() for _ in range(states.num_slots)]
    assert not found(kv, "b", TOKENS)
    states.release_slot(slots[0])
    assert found(kv, "b", TOKENS).tokens == 16


@examples(100, derandomize=True)
@given(st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 6))
def test_random_copies_keep_the_books_and_the_contents(seed: int, slots: int, host_slots: int) -> None:
    rng = random.Random(seed)
    kv, states, host = manager(slots, host_slots)
    texts = {name: [rng.randrange(2) for _ in range(24)] for name in "abc"}
    for name, tokens in texts.items():
        compute(kv, name, tokens)
    here, there = dict[int, tuple[int, ...]](), dict[int, tuple[int, ...]]()
    stores, loads = list[HostCopy](), list[HostCopy]()
    for _ in range(150):
        name, tokens = rng.choice(list(texts.items()))
        position = SIZE * rng.randrange(1, 6)
        match rng.randrange(5):
            case 0:
                slot = states.begin_snapshot(position)
                if slot is not None:
                    here[slot] = tuple(tokens[:position])
                    states.finish_snapshot(slot, kv.chain(name).entry(tokens, position // SIZE - 1), position)
            case 1:
                copy = host.begin_store(rng.randrange(slots))
                stores += [] if copy is None else [copy]
            case 2:
                hit = found(kv, name, tokens)
                if hit.slots and not host.is_loading(hit.slots):
                    assert there[hit.slots[0]] == tuple(tokens[: hit.tokens])
                    loads.append(host.load(hit.slots[0]))
            case 3:
                for copy in stores:
                    there[copy.host] = here[copy.block]
                host.finish_stores(stores)
                stores = []
            case _:
                for copy in loads:
                    here[copy.block] = there[copy.host]
                host.finish_loads(loads)
                loads = []
        last = states.look_up(kv.chain(name), tokens, 24)
        assert not last.tokens or here[last.slot] == tuple(tokens[: last.tokens])
        kv.check_integrity()
