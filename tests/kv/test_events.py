"""Events of the prefix index."""

from roseinfer.kv.events import GPU, BlockRemoved, BlockStored, KvEvents
from roseinfer.kv.manager import KvManager
from tests.helpers.kv_managers import kv_manager


def compute(kv: KvManager, name: str, tokens: list[int], salt: str = "") -> None:
    kv.open(name, salt)
    assert kv.grow(name, len(tokens)) is not None
    kv.register(name, tokens, len(tokens), len(tokens))
    kv.close(name)


def test_full_blocks_are_told_with_what_they_follow():
    events = KvEvents()
    kv = kv_manager(4, 2, events=events)
    compute(kv, "a", [1, 2, 3, 4, 5])
    first, second = events.take()
    assert isinstance(first, BlockStored) and isinstance(second, BlockStored)
    assert (first.parent, first.tokens, first.medium) == (None, (1, 2), GPU)
    assert (second.parent, second.tokens) == (first.key, (3, 4))
    assert events.take() == []
    compute(kv, "b", [7] * 8)  # takes all blocks: the tail of the other prompt goes first
    assert events.take()[:2] == [BlockRemoved(second.key, GPU), BlockRemoved(first.key, GPU)]


def test_nothing_is_told_of_prompts_with_a_salt():
    events = KvEvents()
    kv = kv_manager(4, 2, num_host_blocks=4, events=events)
    compute(kv, "a", [1, 2, 3, 4], salt="tenant")
    assert kv.host is not None
    copies = [copy for block in range(4) if (copy := kv.host.begin_store(block)) is not None]
    kv.host.finish_stores(copies)
    assert kv.host.num_used == 2
    compute(kv, "b", [7] * 8)
    assert all(isinstance(event, BlockStored) and event.tokens == (7, 7) for event in events.take())
