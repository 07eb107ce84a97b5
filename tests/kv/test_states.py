"""Slots of recurrent states: who holds one, which snapshot a prefix finds, and which is overwritten first."""

import pytest

from roseinfer.core.plan import SlotCopy
from roseinfer.core.runner import StatePool
from roseinfer.kv import blocks
from roseinfer.kv.blocks import Chain, root_key
from roseinfer.kv.snapshot_index import MAX_RECENT_COUNT
from roseinfer.kv.states import StateGroup

SIZE = 4
TOKENS = list(range(100, 140))


def chain_of(salt: str = "") -> Chain:
    return Chain(root_key(salt), SIZE)


def snapshot(group: StateGroup, tokens: list[int], position: int, chain: Chain | None = None) -> int:
    """Take a snapshot of a sequence and finish it. Return its slot."""
    slot = group.begin_snapshot(position)
    assert slot is not None
    entry = (chain or chain_of()).entry(tokens, position // SIZE - 1)
    assert group.finish_snapshot(slot, entry, position)
    return slot


def seat(group: StateGroup, name: str, start: int = 0, family: str = "") -> tuple[int, SlotCopy | None]:
    return group.seat(name, chain_of(), TOKENS, start, family)


def found(group: StateGroup, tokens: list[int], upto: int) -> int:
    return group.look_up(chain_of(), tokens, upto).tokens


def check(group: StateGroup) -> None:
    for _ in group.audit(8):
        pass


def test_a_prefix_finds_its_longest_snapshot_within_a_limit() -> None:
    group = StateGroup(StatePool(4, 100), SIZE)
    snapshot(group, TOKENS, 8)
    snapshot(group, TOKENS, 16)
    assert [found(group, TOKENS, upto) for upto in (40, 16, 15, 8, 7, 0)] == [16, 16, 8, 8, 0, 0]
    assert found(group, [1, *TOKENS], 40) == 0, "another prefix"
    assert group.look_up(chain_of("salt"), TOKENS, 40).tokens == 0
    check(group)


def test_a_snapshot_cannot_be_found_while_it_is_written_or_if_it_failed() -> None:
    group = StateGroup(StatePool(2, 100), SIZE)
    slot = group.begin_snapshot(8)
    assert slot is not None and found(group, TOKENS, 40) == 0
    check(group)
    assert not group.finish_snapshot(slot, None, 8)
    assert found(group, TOKENS, 40) == 0 and group.num_free == 2
    check(group)


def test_the_least_recently_used_snapshot_makes_room() -> None:
    group = StateGroup(StatePool(3, 100), SIZE)
    for position in (4, 8, 12):
        snapshot(group, TOKENS, position)
    slot, copy = seat(group, "a", start=8)  # uses the second, overwrites the first
    assert copy is not None and copy.dst == slot
    assert [found(group, TOKENS, upto) for upto in (4, 8, 12)] == [0, 8, 12]
    group.copies_done([copy])
    group.release("a")
    assert seat(group, "b")[0] == slot, "a slot without a snapshot goes first"
    assert seat(group, "c")[1] is None
    assert [found(group, TOKENS, upto) for upto in (4, 8, 12)] == [0, 8, 8]
    check(group)


def test_sequences_leave_some_slots_to_snapshots() -> None:
    group = StateGroup(StatePool(4, 100), SIZE, reserved=1)
    snapshot(group, TOKENS, 8)
    for name in ("a", "b", "c"):
        assert group.num_free_to_start > 0
        seat(group, name)
    assert group.num_free_to_start == 0 and found(group, TOKENS, 40) == 8
    group.release("a")
    assert group.num_free_to_start == 1
    check(group)


def test_a_short_prefix_does_not_overwrite_a_long_one_until_many_have_come() -> None:
    group, long = StateGroup(StatePool(1, 100), SIZE), list(range(200, 300))
    snapshot(group, long, 40)
    for _ in range(20):
        assert group.begin_snapshot(8, rolling=True) is None
    skipped = 0
    while group.begin_snapshot(8) is None:
        assert found(group, long, 100) == 40
        skipped += 1
    assert skipped == 4, "the tokens of four short ones add up to 32"
    check(group)


def test_a_rolling_snapshot_is_overwritten_before_others_until_it_settles() -> None:
    for settled in (False, True):
        group, chain = StateGroup(StatePool(2, 100), SIZE), chain_of()
        snapshot(group, [1, *TOKENS], 8)
        slot, entry = group.begin_snapshot(20, rolling=True), chain.entry(TOKENS, 4)
        assert slot is not None and group.finish_snapshot(slot, entry, 20, rolling=True)
        if settled:
            group.settle(slot, entry)
        seat(group, "a")
        assert (found(group, TOKENS, 40), found(group, [1, *TOKENS], 40)) == ((20, 0) if settled else (0, 8))
        check(group)


def test_a_source_is_not_overwritten_before_its_copy_is_done() -> None:
    group = StateGroup(StatePool(2, 100), SIZE)
    snapshot(group, TOKENS, 8)
    _, copy = seat(group, "a", start=8)
    assert copy is not None and group.num_free == 0
    assert group.begin_snapshot(8) is None
    check(group)
    group.copies_done([copy])
    assert group.num_free == 1 and found(group, TOKENS, 8) == 8
    check(group)


def test_the_last_free_slot_is_taken_over_with_its_snapshot() -> None:
    group = StateGroup(StatePool(1, 100), SIZE)
    slot = snapshot(group, TOKENS, 8)
    assert seat(group, "a", start=8) == (slot, None)
    assert found(group, TOKENS, 8) == 0, "the sequence overwrites it"
    check(group)


def test_a_remembered_search_notices_what_has_changed() -> None:
    group, chain = StateGroup(StatePool(4, 100), SIZE), chain_of()
    remembered = group.look_up(chain, TOKENS, 40)
    snapshot(group, TOKENS, 8)
    remembered = group.look_up(chain, TOKENS, 40, remembered)
    assert remembered.tokens == 8
    snapshot(group, [1, *TOKENS], 12)  # of another sequence
    assert group.look_up(chain, TOKENS, 40, remembered) is remembered
    snapshot(group, TOKENS, 4)
    assert group.look_up(chain, TOKENS, 40, remembered) is remembered, "a shorter one"
    group.invalidate(chain)
    assert group.look_up(chain, TOKENS, 40, remembered).tokens == 0
    check(group)


def test_a_remembered_search_is_made_anew_after_many_snapshots() -> None:
    group, chain = StateGroup(StatePool(4, 100), SIZE), chain_of()
    remembered = group.look_up(chain, TOKENS, 40)
    slot = snapshot(group, TOKENS, 8)
    group.hold("family", 8, slot)
    for number in range(MAX_RECENT_COUNT + 1):
        snapshot(group, [number, *TOKENS], 8)
    assert group.look_up(chain, TOKENS, 40, remembered).tokens == 8


def test_of_two_equal_snapshots_one_remains() -> None:
    group = StateGroup(StatePool(2, 100), SIZE)
    first, second = group.begin_snapshot(8), group.begin_snapshot(8)
    assert first is not None and second is not None
    assert group.finish_snapshot(first, chain_of().entry(TOKENS, 1), 8)
    assert not group.finish_snapshot(second, chain_of().entry(TOKENS, 1), 8)
    assert (group.num_snapshots, group.num_free) == (1, 2)
    check(group)


def test_older_snapshots_of_a_conversation_go_first_unless_several_began_there() -> None:
    group, chain = StateGroup(StatePool(7, 100), SIZE), chain_of()
    others = [1, *TOKENS]
    snapshot(group, others, 8)
    for position in (4, 8, 12):
        snapshot(group, TOKENS, position)
    for name in ("a", "b"):
        _, copy = seat(group, name, start=8)
        assert copy is not None
        group.copies_done([copy])
        group.release(name)
    snapshot(group, TOKENS, 20, chain)
    group.supersede(chain, 20)
    check(group)
    seat(group, "c"), seat(group, "d")
    assert found(group, TOKENS, 40) == 20 and group.num_snapshots == 5, "slots without a snapshot go first"
    seat(group, "e")
    assert [found(group, TOKENS, upto) for upto in (4, 12, 20)] == [0, 12, 20]
    seat(group, "f")
    assert [found(group, TOKENS, upto) for upto in (8, 12, 20)] == [8, 8, 20]
    assert found(group, others, 8) == 8, "older, but not superseded"
    check(group)


def test_a_held_state_lasts_until_no_other_slot_is_left() -> None:
    group = StateGroup(StatePool(3, 100), SIZE)
    slot = group.begin_snapshot(8)
    assert slot is not None
    group.hold("x:0", 5, slot)
    group.finish_snapshot(slot, None, 5)
    assert group.num_free == 3 and group.held_position("x:0") == 5
    taken, copy = seat(group, "x:1", start=5, family="x:0")
    assert copy == SlotCopy(slot, taken)
    group.copies_done([copy])
    seat(group, "a")
    assert group.num_free == 1
    assert group.begin_snapshot(8) is None, "a snapshot is not worth it"
    assert seat(group, "x:2", start=5, family="x:0") == (slot, None), "for a sequence it is given up"
    assert group.held_position("x:0") is None and group.num_free == 0
    check(group)


def test_held_states_of_other_requests_are_given_up_first() -> None:
    group = StateGroup(StatePool(3, 100), SIZE)
    for family in ("x:0", "y:0"):
        slot = group.begin_snapshot(8)
        assert slot is not None
        group.hold(family, 5, slot)
        group.finish_snapshot(slot, None, 5)
    seat(group, "a")
    taken, copy = seat(group, "x:1", start=5, family="x:0")
    assert copy is not None and copy.dst == taken
    assert (group.held_position("x:0"), group.held_position("y:0")) == (5, None)
    check(group)


def test_snapshots_of_a_failed_sequence_are_forgotten() -> None:
    group, chain = StateGroup(StatePool(4, 100), SIZE), chain_of()
    snapshot(group, TOKENS, 8)
    snapshot(group, TOKENS, 16)
    other = snapshot(group, [1, *TOKENS], 16)
    chain.entry(TOKENS, 3)
    group.invalidate(chain)
    assert found(group, TOKENS, 40) == 0
    assert group.look_up(chain_of(), [1, *TOKENS], 40).slot == other
    check(group)


def test_colliding_keys_find_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "sha256", lambda data: b"the same")
    group = StateGroup(StatePool(4, 100), SIZE)
    chain = Chain(b"root", SIZE)
    snapshot(group, TOKENS, 8, chain)
    other = Chain(b"root", SIZE)
    assert group.look_up(other, list(range(40)), 40).tokens == 0
