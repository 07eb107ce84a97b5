"""Events of random operations, applied to an empty index, give the content of the indexes."""

import random

from hypothesis import given
from hypothesis import strategies as st

from roseinfer.kv.blocks import IndexEntry, PrefixIndex, root_key
from roseinfer.kv.events import CPU, GPU, BlockStored, KvEvents
from tests.helpers.cases import examples
from tests.property.test_kv_host import Driver

Held = dict[tuple[bytes, str], IndexEntry]


def apply(held: Held, events: KvEvents) -> None:
    for event in events.take():
        if isinstance(event, BlockStored):
            assert (event.key, event.medium) not in held
            parent = root_key("") if event.parent is None else event.parent
            held[event.key, event.medium] = IndexEntry(event.key, parent, event.tokens)
        else:
            del held[event.key, event.medium]


def holds(index: PrefixIndex, blocks: int, medium: str) -> Held:
    entries = (index.full_entry(block) for block in range(blocks))
    return {(entry.key, medium): entry for entry in entries if entry is not None}


@examples(60, derandomize=True)
@given(st.integers(0, 10**9), st.integers(4, 24), st.integers(1, 24), st.sampled_from([1, 2, 4]))
def test_events_give_the_content_of_the_indexes(seed: int, num_blocks: int, num_host: int, block_size: int) -> None:
    events = KvEvents()
    driver = Driver(random.Random(seed), num_blocks, num_host, block_size, events)
    held: Held = {}
    for _ in range(60):
        driver.act()
        apply(held, events)
        assert held == holds(driver.kv.index, num_blocks, GPU) | holds(driver.host.index, num_host, CPU)
