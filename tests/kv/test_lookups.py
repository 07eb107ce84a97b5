"""Looking a waiting sequence up again costs a comparison, however long the prefix that it shares."""

import pytest

from roseinfer.core.request import Prompt, Request
from roseinfer.core.sampling import SequenceParams
from roseinfer.kv import blocks
from roseinfer.kv.blocks import Chain, IndexEntry
from roseinfer.kv.manager import KvManager
from tests.helpers.engines import add, gather, make_core
from tests.helpers.kv_managers import kv_manager

BLOCK, SHARED, WAITING = 16, 8192, 64


class Counts:
    """Entries that were looked at (each compares a block's tokens), and digests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries = self.digests = 0
        entry = Chain.entry

        def counted(chain: Chain, tokens: list[int], index: int) -> IndexEntry:
            self.entries += 1
            return entry(chain, tokens, index)

        monkeypatch.setattr(Chain, "entry", counted)
        monkeypatch.setattr(blocks, "sha256", self.digest)

    def digest(self, data: bytes) -> bytes:
        self.digests += 1
        return hash(data).to_bytes(8, "little", signed=True)

    def reset(self) -> None:
        self.entries = self.digests = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def test_uncached_of_many_that_wait_is_a_comparison_each(counts: Counts) -> None:
    """Steps register blocks of others and reuse others' blocks all the while."""
    core = make_core(
        num_blocks=1200, block_size=BLOCK, max_num_seqs=2, max_num_batched_tokens=10_000, vocab_size=200,
    )  # fmt: skip
    scheduler = core.scheduler
    shared = [i % 50 for i in range(SHARED)]
    add(core, "first", shared, max_tokens=2, ignore_eos=True)
    while core.busy:
        core.step()
    for name in ("busy-1", "busy-2"):
        add(core, name, [ord(name[-1]) % 50] * 40, max_tokens=3000, ignore_eos=True)
    core.step()
    for i in range(WAITING):
        add(core, f"w{i}", [*shared, 51, i], max_tokens=4)
    waiting = [request for request in scheduler.waiting if request.request_id.startswith("w")]
    assert len(waiting) == WAITING
    assert [scheduler.seating.uncached(request) for request in waiting] == [2] * WAITING
    assert counts.digests >= SHARED // BLOCK, "the first look hashes the prompt"
    for _ in range(60):
        core.step()
        counts.reset()
        assert [scheduler.seating.uncached(request) for request in waiting] == [2] * WAITING
        assert counts.digests == 0
        assert counts.entries == 0, "nothing of what they found was reused, and nothing that follows it registered"


def manager(blocks: int = 16) -> KvManager:
    kv = kv_manager(blocks, 4)
    for name in ("a", "b", "w"):
        kv.open(name)
    return kv


def compute(kv: KvManager, name: str, tokens: list[int]) -> None:
    kv.attach(name, kv.match(name, tokens))
    assert kv.grow(name, len(tokens)) is not None
    kv.register(name, tokens, len(tokens), len(tokens))


def test_what_is_registered_behind_a_hit_is_found(counts: Counts) -> None:
    kv, tokens = manager(), list(range(10))
    assert kv.match("w", tokens).tokens == 0
    compute(kv, "a", tokens[:4])
    assert kv.match("w", tokens).tokens == 4
    compute(kv, "b", tokens)
    assert kv.match("w", tokens).tokens == 10


def test_a_hit_is_forgotten_when_its_last_block_is_reused() -> None:
    kv, tokens = manager(blocks=3), list(range(10))
    compute(kv, "a", tokens)
    kv.release("a")
    assert kv.match("w", tokens).tokens == 10
    assert kv.grow("b", 1) is not None
    assert kv.match("w", tokens).tokens == 8


def test_a_hit_is_forgotten_when_a_block_within_it_is() -> None:
    """Two compute the same first block; the one whose copy is known goes, and what the other put behind it stays."""
    kv, tokens = manager(), list(range(9))
    kv.open("c")
    for name in ("a", "b"):
        assert kv.grow(name, 4) is not None
        kv.register(name, tokens, 4, 9)
    assert kv.grow("b", 8) is not None
    kv.register("b", tokens, 8, 9)
    assert kv.match("w", tokens).tokens == 8
    kv.invalidate("a")
    assert kv.match("w", tokens).tokens == 0, "what follows cannot be reached any more"
    compute(kv, "c", tokens[:4])
    assert kv.match("w", tokens).tokens == 8, "until its prefix is computed again"


def test_samples_do_not_hash_their_prompt_again(counts: Counts) -> None:
    core = make_core(num_blocks=200, block_size=BLOCK, max_num_seqs=32, max_num_batched_tokens=4096)
    add(core, "a", [i % 50 for i in range(1024)], max_tokens=20, n=16, ignore_eos=True)
    done = {}
    while core.busy:
        gather(core.step(), done)
    # Sample 0 hashes the root, its 64 full blocks and what follows; the others only what follows (and a root each).
    assert counts.digests < 64 + 16 * 6


def test_a_request_that_grew_is_looked_up_anew() -> None:
    kv = manager()
    request = Request("w", Prompt(list(range(8)), SequenceParams()))
    compute(kv, "a", list(range(12)))
    assert kv.match("w", request.tokens).tokens == 8
    request.tokens.extend([8, 9, 10, 11])
    assert kv.match("w", request.tokens).tokens == 12
