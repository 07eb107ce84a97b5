"""Blocks in host memory: what is kept, what is matched, and what becomes of copies whose sequence has gone."""

from roseinfer.kv.host import HostCache
from roseinfer.kv.manager import HostHit, KvManager
from tests.helpers.kv_managers import kv_manager

SIZE = 4


def manager(blocks: int = 8, host: int = 8) -> tuple[KvManager, HostCache]:
    kv = kv_manager(blocks, SIZE, num_host_blocks=host)
    assert kv.host is not None
    return kv, kv.host


def compute(kv: KvManager, name: str, tokens: list[int]) -> tuple[int, ...]:
    kv.open(name)
    kv.attach(name, kv.match(name, tokens))
    assert kv.grow(name, len(tokens)) is not None
    kv.register(name, tokens, len(tokens), len(tokens))
    return kv.table(name)


def keep(kv: KvManager, host: HostCache, tokens: list[int]) -> None:
    """Compute these tokens, store all of them that fills blocks, and have their KV blocks used by others."""
    copies = [host.begin_store(block) for block in compute(kv, "stored", tokens)]
    host.finish_stores([copy for copy in copies if copy is not None])
    kv.close("stored")
    overwrite(kv)


def overwrite(kv: KvManager) -> None:
    kv.open("others")
    assert kv.grow("others", kv.num_free * SIZE) is not None
    kv.close("others")
    assert len(kv.index) == 0


def found(kv: KvManager, name: str, tokens: list[int]) -> tuple[int, int]:
    """Tokens on the device, and blocks behind them in host memory."""
    hit = kv.match(name, tokens)
    return hit.tokens, len(kv.match_host(name, tokens, hit).blocks)


def test_without_host_blocks_or_a_prefix_cache_there_is_none() -> None:
    assert kv_manager(4, SIZE).host is None
    assert kv_manager(4, SIZE, prefix_caching=False, num_host_blocks=4).host is None


def test_full_blocks_are_kept_and_come_back() -> None:
    kv, host = manager()
    tokens = list(range(10))
    keep(kv, host, tokens)
    assert host.num_used == 2, "the last block is not full"
    kv.open("a")
    assert found(kv, "a", tokens) == (0, 2)
    copies = kv.load("a", kv.match_host("a", tokens, kv.match("a", tokens)))
    assert found(kv, "a", tokens) == (0, 2), "not matched before the load is done"
    host.finish_loads(copies)
    assert found(kv, "a", tokens) == (8, 0)
    kv.close("a")
    kv.check_integrity()


def test_what_is_stored_is_matched_once_it_is_there() -> None:
    kv, host = manager()
    tokens = list(range(8))
    copies = [copy for block in compute(kv, "a", tokens) if (copy := host.begin_store(block)) is not None]
    assert host.num_used == 2 and not any(map(host.should_store, kv.table("a"))), "it is on its way"
    kv.close("a")
    assert kv.num_free == 6, "nobody writes what is being stored"
    assert list(host.look_up(kv.index.chain(""), tokens, 0, None).hit.blocks) == []
    host.finish_stores(copies)
    assert kv.num_free == 8
    assert len(host.look_up(kv.index.chain(""), tokens, 0, None).hit.blocks) == 2


def test_the_least_recently_used_makes_room_and_the_tail_of_a_chain_first() -> None:
    kv, host = manager(host=3)
    first, second = list(range(8)), list(range(10, 18))
    keep(kv, host, first)
    keep(kv, host, second)
    kv.open("a")
    kv.open("b")
    assert found(kv, "a", first) == (0, 1)
    assert found(kv, "b", second) == (0, 2)
    host.touch(compute(kv, "c", first))  # it is computed again, and what is kept of it was used
    kv.close("c")
    overwrite(kv)
    keep(kv, host, list(range(20, 24)))
    assert found(kv, "a", first) == (0, 1)
    assert found(kv, "b", second) == (0, 1)


def test_what_failed_is_forgotten_wherever_it_is() -> None:
    kv, host = manager()
    tokens = list(range(12))
    blocks = compute(kv, "bad", tokens)
    (kept,) = [host.begin_store(blocks[0])]
    assert kept is not None
    host.finish_stores([kept])
    (under_way,) = [host.begin_store(blocks[1])]
    assert under_way is not None
    kv.invalidate("bad")
    host.finish_stores([under_way])
    assert host.begin_store(blocks[2]) is None, "nobody knows what it holds"
    kv.close("bad")
    kv.open("a")
    assert found(kv, "a", tokens) == (0, 0)
    kv.check_integrity()
    assert host.num_used == 0 and kv.num_free == 8


def test_what_fails_while_it_is_loaded_is_not_matched() -> None:
    kv, host = manager()
    tokens = list(range(8))
    keep(kv, host, tokens)
    kv.open("a")
    copies = kv.load("a", kv.match_host("a", tokens, kv.match("a", tokens)))
    compute(kv, "bad", tokens)
    kv.invalidate("bad")
    host.finish_loads(copies)
    kv.check_integrity()
    kv.open("b")
    assert found(kv, "b", tokens) == (0, 0)


def test_a_load_outlives_the_sequence_that_wanted_it() -> None:
    kv, host = manager()
    tokens = list(range(8))
    keep(kv, host, tokens)
    for end in (host.finish_loads, host.cancel_loads):
        kv.open("a")
        copies = kv.load("a", kv.match_host("a", tokens, kv.match("a", tokens)))
        kv.close("a")
        assert kv.num_free == 6, "the copy still writes to them"
        end(copies)
        assert kv.num_free == 8
        kv.check_integrity()
        kv.open("b")
        assert found(kv, "b", tokens) == ((8, 0) if end == host.finish_loads else (0, 2))
        kv.close("b")
        overwrite(kv)


def test_a_remembered_look_up_does_not_survive_a_block_that_left_and_came_back() -> None:
    """The last block is loaded to its former place, and the one before it to another."""
    kv, host = manager(blocks=3)
    tokens = list(range(8))
    kv.open("w")
    copies = [copy for block in compute(kv, "a", tokens) if (copy := host.begin_store(block)) is not None]
    host.finish_stores(copies)
    head, tail = kv.table("a")
    assert kv.match("w", tokens).blocks == (head, tail)
    kv.close("a")
    holders = {}
    for name in "xyz":
        kv.open(name)
        growth = kv.grow(name, SIZE)
        assert growth is not None
        holders[growth.new_blocks[0]] = name
    for block in (head, tail, ({0, 1, 2} - {head, tail}).pop()):  # what is freed last is taken first
        kv.close(holders[block])
    kv.open("b")
    blocks = host.look_up(kv.index.chain(""), tokens, 0, None).hit.blocks
    again = kv.load("b", HostHit(0, len(blocks) * SIZE, blocks))
    host.finish_loads(again)
    assert [copy.block for copy in again] == [3 - head - tail, tail]
    assert kv.match("w", tokens).blocks == kv.table("b")


def test_what_others_would_be_given_next_is_kept_and_given_to_them_as_soon() -> None:
    kv, host = manager(blocks=6)
    first, second = list(range(10)), list(range(20, 28))
    of_first = compute(kv, "first", first)
    of_second = compute(kv, "second", second)
    kv.close("first")  # a partly filled block too, which cannot be kept
    kv.close("second")
    copies = host.store_next_evicted(6, 3)
    assert [copy.block for copy in copies] == [of_first[1], of_first[0], of_second[1]], "the oldest, tails first"
    assert kv.num_free == 3 and not kv.index.full_entry(of_first[2])
    kv.open("a")
    assert kv.match("a", first).tokens == 10, "meanwhile it is matched"
    host.finish_stores(copies)
    kv.check_integrity()
    assert kv.num_free == 6 and host.num_used == 3
    kv.grow("a", 3 * SIZE)
    assert set(kv.table("a")) == {copy.block for copy in copies}, "what is kept goes first, in the order that it would"
    kv.open("b")
    assert found(kv, "b", first) == (0, 2)
    kv.open("c")
    assert found(kv, "c", second) == (4, 1)


def test_blocks_are_looked_at_once_until_a_part_of_them_is_gone() -> None:
    kv, host = manager(blocks=12, host=12)
    for number in range(3):
        compute(kv, f"{number}", [10 * number + token for token in range(2 * SIZE)])
        kv.close(f"{number}")
    assert host.eviction_near(8)
    copies = host.store_next_evicted(8, 1)
    assert len(copies) == 1 and host.eviction_near(8), "it stopped at as many as there was time for"
    host.finish_stores(copies)
    copies = host.store_next_evicted(8, 9)
    assert len(copies) == 1 and not host.eviction_near(8), "six empty blocks and the first one come first"
    kv.open("a")
    kv.grow("a", 2 * SIZE)
    assert host.eviction_near(8)
