"""The KV manager's rules, one by one."""

import pytest

from roseinfer.core.plan import BlockCopy
from roseinfer.kv import blocks
from roseinfer.kv.manager import KvManager
from tests.helpers.kv_managers import kv_manager

TOKENS = [4, 8, 15, 16, 23, 42]  # one and a half blocks of 4


def computed(kv: KvManager, name: str, tokens: list[int], prompt_len: int | None = None, salt: str = "") -> None:
    """Open a sequence and compute all its tokens."""
    kv.open(name, salt)
    hit = kv.match(name, tokens)
    kv.attach(name, hit)
    if hit.tokens < len(tokens):
        assert kv.grow(name, len(tokens)) is not None
    kv.register(name, tokens, len(tokens), prompt_len or len(tokens))
    kv.check_integrity()


def test_full_blocks_and_an_exact_tail_match() -> None:
    kv = kv_manager(8, 4)
    computed(kv, "a", TOKENS)
    kv.open("b")
    assert kv.match("b", TOKENS).tokens == 6
    assert kv.match("b", TOKENS).partial
    kv.open("c")
    longer = kv.match("c", [*TOKENS, 1])
    assert (longer.tokens, longer.partial) == (4, False), "a partly filled block matches a whole prompt only"
    kv.open("d")
    assert kv.match("d", TOKENS[:5]).tokens == 4
    kv.open("e")
    assert kv.match("e", [9, *TOKENS[1:]]).tokens == 0


def test_two_sharers_of_a_cached_tail_each_get_their_own_block() -> None:
    kv = kv_manager(8, 4)
    computed(kv, "a", TOKENS)
    tail = kv.table("a")[-1]
    kv.close("a")
    for name in "bc":
        kv.open(name)
        kv.attach(name, kv.match(name, TOKENS))
    grown = kv.grow_many([("b", 7), ("c", 7)])
    assert grown is not None
    assert [g.copy for g in grown] == [BlockCopy(tail, g.new_blocks[0], 2) for g in grown]
    assert len({tail, kv.table("b")[-1], kv.table("c")[-1]}) == 3
    assert kv.table("b")[0] == kv.table("c")[0], "the full block before it stays shared"
    kv.check_integrity()
    kv.copies_done([g.copy for g in grown if g.copy])
    kv.check_integrity()
    kv.open("d")
    hit = kv.match("d", TOKENS)
    assert hit.blocks[-1] == tail, "the old block ends unowned and still matchable"
    assert kv.pool.refs[tail] == 0


def test_the_writer_appends_in_place_while_others_borrow() -> None:
    kv = kv_manager(8, 4)
    computed(kv, "a", TOKENS)
    kv.open("b")
    kv.attach("b", kv.match("b", TOKENS))
    growth = kv.grow("a", 7)
    assert growth is not None
    assert growth.copy is None and growth.new_blocks == ()
    copied = kv.grow("b", 7)
    assert copied is not None and copied.copy is not None and copied.copy.tokens == 2
    kv.check_integrity()


def test_a_copy_source_is_kept_until_the_step_is_complete() -> None:
    kv = kv_manager(3, 4)
    computed(kv, "a", TOKENS)
    kv.open("b")
    kv.attach("b", kv.match("b", TOKENS))
    kv.close("a")
    growth = kv.grow("b", 7)
    assert growth is not None and growth.copy is not None
    assert kv.num_free == 0, "the source is referenced by the copy"
    kv.copies_done([growth.copy])
    assert kv.num_free == 1


def test_the_last_reader_takes_a_tail_over_when_no_block_is_left() -> None:
    kv = kv_manager(2, 4)
    computed(kv, "a", [*TOKENS, 1, 2], prompt_len=6)  # the tail block holds a partial and a full entry
    kv.close("a")
    kv.open("b")
    kv.attach("b", kv.match("b", TOKENS))
    growth = kv.grow("b", 7)
    assert growth is not None and growth.copy is None, "written in place"
    kv.check_integrity()
    kv.open("c")
    assert kv.match("c", [*TOKENS, 1, 2]).tokens == 4, "what will be overwritten no longer matches"
    kv.open("d")
    assert kv.match("d", TOKENS).tokens == 6, "what stays still does"


def test_growing_without_room_changes_nothing() -> None:
    kv = kv_manager(3, 4)
    kv.open("a")
    kv.grow("a", 8)
    kv.open("b")
    assert kv.grow("b", 8) is None
    assert kv.grow_many([("a", 9), ("b", 4)]) is None
    assert (kv.table("b"), kv.num_free) == ((), 1)
    kv.check_integrity()


def test_undo_restores_a_borrowed_tail() -> None:
    kv = kv_manager(6, 4)
    computed(kv, "a", TOKENS)
    kv.open("b")
    kv.attach("b", kv.match("b", TOKENS))
    before, free = kv.table("b"), kv.num_free
    growth = kv.grow("b", 10)
    assert growth is not None and len(growth.new_blocks) == 2
    kv.undo("b", growth)
    assert (kv.table("b"), kv.num_free, kv.capacity("b")) == (before, free, 6)
    kv.check_integrity()


def test_salts_do_not_share() -> None:
    kv = kv_manager(8, 4)
    computed(kv, "a", TOKENS, salt="tenant one")
    kv.open("b", "tenant two")
    assert kv.match("b", TOKENS).tokens == 0
    kv.open("c", "\ud800")  # what JSON may hold and UTF-8 may not
    assert kv.match("c", TOKENS).tokens == 0


def test_colliding_digests_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "sha256", lambda data: b"the same")
    kv = kv_manager(8, 4)
    computed(kv, "a", TOKENS[:4])
    kv.open("b")
    assert kv.match("b", [1, 2, 3, 4, 5, 6]).tokens == 0
    kv.open("c")
    assert kv.match("c", [*TOKENS[:4], 9]).tokens == 4, "tokens are what is compared"


def test_reused_blocks_stop_matching_and_a_chain_loses_its_tail_first() -> None:
    kv = kv_manager(4, 4)
    tokens = list(range(12))
    computed(kv, "a", tokens)
    kv.close("a")
    computed(kv, "b", [90, 91, 92, 93, 94])  # takes the unused block and one of the chain
    kv.open("c")
    assert kv.match("c", tokens).tokens == 8


@pytest.mark.parametrize("block_size", [0, 3, 512])
def test_block_size_must_be_a_power_of_two(block_size: int) -> None:
    with pytest.raises(ValueError, match="block_size"):
        kv_manager(4, block_size)
