"""KV cache as the scheduler sees it: sequences that match, grow, fork, register and close.

A sequence has a block table in each KV group (`kv/group.py`). The first group keeps all of its tokens. Window groups
(`kv/window.py`) keep those that later tokens see. Their tables grow together. If the model has recurrent states, a
sequence also has a slot for its own (`kv/states.py`). A prefix hit is the longest one that every group can continue.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from roseinfer.core.errors import InvalidRequestError
from roseinfer.core.plan import BlockCopy, HostCopy
from roseinfer.core.runner import KvSizes, StatePool
from roseinfer.kv.blocks import KEY_BYTES, BlockPool, Chain, Lookup, PrefixHit, PrefixIndex
from roseinfer.kv.events import CPU, GPU, KvEvents
from roseinfer.kv.group import AUDIT_PIECE_BLOCKS, BlockGroup, BlockTable, Growth
from roseinfer.kv.host import HostCache
from roseinfer.kv.host_states import HostStates
from roseinfer.kv.snapshot_index import StateLookup
from roseinfer.kv.states import SNAPSHOT_RESERVE_SHARE, StateGroup
from roseinfer.kv.window import WindowGroup, WindowHit

NO_HIT = PrefixHit()


class HostHit(NamedTuple):
    """Continuation of a hit of `cached` tokens in host memory: with its `blocks` loaded, `tokens` are cached.

    `slots`: the host slot of the state after them, if it has to be loaded too.
    """

    cached: int
    tokens: int
    blocks: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return self.tokens > self.cached


@dataclass(slots=True)
class AgreedHit:
    """Agreement of all groups, while `lookup` was the first group's result and the others' indexes had changed as
    often as `changes` says. `windows`: the blocks in each window group. `state`: what the state group found.
    """

    lookup: Lookup
    changes: tuple[int, ...]
    hit: PrefixHit
    windows: tuple[WindowHit, ...]
    state: StateLookup | None = None


@dataclass(slots=True)
class SequenceKv:
    """Block tables of one sequence, in the first group and in each window group.

    `lookup`: last result in the first group's prefix index; `host_lookup`: last result for the following blocks in host
    memory; `device_state`, `host_state`: last snapshots within them, in either memory; `agreed`: last agreement of the
    groups. `wanted`: positions at which other sequences may continue.
    """

    chain: Chain
    table: BlockTable
    windows: tuple[BlockTable, ...]
    lookup: Lookup | None = None
    host_lookup: Lookup | None = None
    device_state: StateLookup | None = None
    host_state: StateLookup | None = None
    agreed: AgreedHit | None = None
    wanted: tuple[int, ...] = ()


class KvManager:
    """Block tables of all live sequences, with prefix cache and copy-on-write.

    All calls are O(blocks touched). Misuse (an unknown sequence, growth without room) asserts. When blocks run out,
    calls return None. Numbers of blocks, tables and hits are the first group's, if nothing else is said.
    """

    def __init__(self, sizes: KvSizes, step_tokens: int = 0, events: KvEvents | None = None) -> None:
        """step_tokens: most tokens of a row, needed if there are window groups. events: collects which blocks are
        matchable.
        """
        block_size, states = sizes.block_size, sizes.states
        if block_size <= 0 or block_size & (block_size - 1) or block_size > 256:
            raise ValueError(f"block_size must be a power of two up to 256, got {block_size}")
        if sizes.windows and sizes.num_host_blocks:
            raise ValueError("blocks in host memory hold the K/V of all layers, so there can be no window groups")
        self.block_size = block_size
        self.num_blocks = sizes.num_blocks
        self.prefix_caching = sizes.prefix_caching
        listener = None if events is None else events.of(GPU)
        self._first = BlockGroup(sizes.num_blocks, block_size, spare_from=sizes.spare_from, listener=listener)
        self.windows = tuple(WindowGroup(pool, block_size, step_tokens) for pool in sizes.windows)
        self.states = None if states is None else _state_group(states, block_size, sizes.prefix_caching)
        self._sequences: dict[str, SequenceKv] = {}
        self.host: HostCache | None = None
        if sizes.num_host_blocks and sizes.prefix_caching:
            listener = None if events is None else events.of(CPU)
            index = PrefixIndex(sizes.num_host_blocks, block_size, listener)
            self.host = HostCache(sizes.num_host_blocks, self.pool, self.index, index)
        self.host_states: HostStates | None = None
        if sizes.num_host_slots and self.host is not None and self.states is not None:
            self.host_states = HostStates(sizes.num_host_slots, self.states, block_size)

    # --- size ---------------------------------------------------------------------------------------------------
    @property
    def pool(self) -> BlockPool:
        return self._first.pool

    @property
    def index(self) -> PrefixIndex:
        return self._first.index

    @property
    def num_free(self) -> int:
        return self._first.pool.num_free

    @property
    def num_used(self) -> int:
        """Return how many blocks would be in use if the first pool were as full as the fullest."""
        used = self.num_blocks - self.num_free
        for group in self.windows:
            used = max(used, self.num_blocks * (group.num_blocks - group.pool.num_free) // group.num_blocks)
        return used

    @property
    def num_free_to_start(self) -> int:
        """Return the free blocks for a sequence that starts; a window group that cannot take any sequence bounds it."""
        free = self.num_free
        for group in self.windows:
            if group.pool.num_free < group.most_blocks:
                free = min(free, group.pool.num_free)
        return free

    @property
    def max_tokens(self) -> int:
        """Return the longest sequence that the whole cache can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def capacity(self, sequence_id: str) -> int:
        """Return the number of positions that can be written without growing."""
        seq = self._sequences[sequence_id]
        capacity = self._first.capacity(seq.table)
        if not self.windows:
            return capacity
        for group, table in zip(self.windows, seq.windows, strict=True):
            capacity = min(capacity, group.capacity(table))
        return capacity

    def table(self, sequence_id: str) -> tuple[int, ...]:
        return tuple(self._sequences[sequence_id].table.blocks)

    def window_tables(self, sequence_id: str) -> list[tuple[int, tuple[int, ...]]]:
        """Return the sequence's table in each window group: its first entry that is held, and the blocks from there."""
        return [(table.gone, tuple(table.held)) for table in self._sequences[sequence_id].windows]

    # --- life of a sequence -------------------------------------------------------------------------------------
    def open(self, sequence_id: str, cache_salt: str = "", keys: Sequence[bytes] = ()) -> None:
        """Add a sequence without blocks. `keys`: `block_keys` of its tokens, if they were computed before."""
        assert sequence_id not in self._sequences, f"sequence {sequence_id!r} is open already"
        chain = self.index.chain(cache_salt)
        chain.keys += keys
        windows = tuple([BlockTable() for _ in self.windows])
        self._sequences[sequence_id] = SequenceKv(chain, BlockTable(), windows)

    def split_keys(self, packed: bytes, prompt_len: int) -> list[bytes]:
        """Split the concatenated keys of a prompt's full blocks. Return none if this cache does not use them.

        Raise `InvalidRequestError` if their number does not fit a prompt of this length.
        """
        if not packed or not self.prefix_caching:
            return []
        if len(packed) != prompt_len // self.block_size * KEY_BYTES:
            raise InvalidRequestError(f"keys must be those of blocks of {self.block_size} tokens", "keys")
        return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]

    def match(self, sequence_id: str, tokens: Sequence[int]) -> PrefixHit:
        """Return the longest cached prefix of `tokens`, the sequence's known tokens. Takes no blocks.

        The first call hashes and walks the prefix; later ones compare whether the index still holds the result.
        """
        if not self.prefix_caching:
            return NO_HIT
        seq = self._sequences[sequence_id]
        seq.lookup = self.index.look_up(seq.chain, tokens, seq.lookup)
        return self._agree(seq, seq.lookup, tokens) if self.windows or self.states else seq.lookup.hit

    def _agree(self, seq: SequenceKv, lookup: Lookup, tokens: Sequence[int]) -> PrefixHit:
        """Return the longest part of the first group's hit that every group can continue."""
        changes = tuple([group.index.changes for group in self.windows])
        if self.states is not None and changes:
            changes = (*changes, self.states.index.changes)
        agreed = seq.agreed
        same = agreed is not None and agreed.lookup is lookup and agreed.changes == changes
        if agreed is not None and same and self._same_state(seq, tokens, agreed.state):
            return agreed.hit
        hit, state = lookup.hit, None
        upto, before = hit.tokens, -1
        if self.states is not None:
            upto = min(upto, len(tokens) - 1)  # the last token is computed again, after a state without it
        while upto != before:
            before = upto
            for group in self.windows:
                upto = group.longest(seq.chain, tokens, upto)
            # A search up to what another has found would be remembered in its place, and not notice longer snapshots.
            if self.states is not None and (state is None or state.tokens != upto):
                state = self.states.look_up(seq.chain, tokens, upto)
                upto = state.tokens
        if upto != hit.tokens:
            hit = PrefixHit(upto, hit.blocks[: upto // self.block_size])
        windows = tuple([group.window_before(seq.chain, tokens, upto) for group in self.windows])
        seq.agreed = AgreedHit(lookup, changes, hit, windows, state)
        return hit

    def _same_state(self, seq: SequenceKv, tokens: Sequence[int], before: StateLookup | None) -> bool:
        """True if the state group would find the same again."""
        if self.states is None or before is None:
            return True
        return self.states.look_up(seq.chain, tokens, before.upto, before) is before

    def divergence(self, sequence_id: str) -> int:
        """Return the end of the last full block that the first group had for the last `match`, whatever the others had;
        0 if no other sequence goes on after it.
        """
        seq = self._sequences[sequence_id]
        blocks = 0 if seq.lookup is None else seq.lookup.hit.tokens // self.block_size
        return blocks * self.block_size if blocks and self.index.has_followers(seq.chain.keys[blocks - 1]) else 0

    def chain(self, sequence_id: str) -> Chain:
        return self._sequences[sequence_id].chain

    def attach(self, sequence_id: str, hit: PrefixHit) -> None:
        """Give an empty sequence the blocks of a hit that `match` has just returned; their other holders share them."""
        seq = self._sequences[sequence_id]
        self._first.attach(seq.table, hit.blocks, hit.tokens)
        agreed = seq.agreed
        if agreed is None:
            return  # nothing was looked for, or there is one group
        assert agreed.hit is hit, "the hit is the last that the groups agreed on"
        for group, table, found in zip(self.windows, seq.windows, agreed.windows, strict=True):
            group.attach(table, found.blocks, hit.tokens, found.first)
        seq.wanted = (hit.tokens, agreed.lookup.hit.tokens)

    def match_host(self, sequence_id: str, tokens: Sequence[int], hit: PrefixHit) -> HostHit:
        """Return what follows in host memory a hit that `match` has just returned, full blocks only.
        Takes no blocks.
        """
        seq = self._sequences[sequence_id]
        if self.host is not None and self.states is not None:
            return self._match_host_with_state(seq, tokens, hit, self.host, self.states)
        if self.host is None or hit.partial:
            return HostHit(hit.tokens, hit.tokens)
        seq.host_lookup = self.host.look_up(seq.chain, tokens, len(hit.blocks), seq.host_lookup)
        found = seq.host_lookup.hit.blocks
        return HostHit(hit.tokens, hit.tokens + len(found) * self.block_size, found)

    def _match_host_with_state(
        self, seq: SequenceKv, tokens: Sequence[int], hit: PrefixHit, host: HostCache, states: StateGroup
    ) -> HostHit:
        """Return the continuation of a hit up to the last snapshot in either memory.

        Its blocks follow what the first group has, which the hit may be a part of.
        """
        assert seq.lookup is not None, "the sequence was looked up"
        first, found = seq.lookup.hit, tuple[int, ...]()
        if not first.partial:
            seq.host_lookup = host.look_up(seq.chain, tokens, len(first.blocks), seq.host_lookup)
            found = seq.host_lookup.hit.blocks
        reach = min(first.tokens + len(found) * self.block_size, len(tokens) - 1)
        seq.device_state = last = states.look_up(seq.chain, tokens, reach, seq.device_state)
        slots: tuple[int, ...] = ()
        if self.host_states is not None and self.host_states.can_load:
            seq.host_state = there = self.host_states.find_longest(seq.chain, tokens, reach, seq.host_state)
            if there.tokens > last.tokens:
                last, slots = there, (there.slot,)
        if last.tokens <= hit.tokens:
            return HostHit(hit.tokens, hit.tokens)
        return HostHit(
            hit.tokens, last.tokens, found[: max(0, last.tokens // self.block_size - len(first.blocks))], slots
        )

    def load(self, sequence_id: str, host_hit: HostHit) -> list[HostCopy]:
        """Add blocks to a sequence that holds only a hit of full blocks, and begin to load the blocks of a hit in host
        memory into them. It is what `match_host` has just returned.

        The caller has checked `num_free` and ends the loads with `host.finish_loads` or `host.cancel_loads`. The blocks
        must not be read before.
        """
        seq = self._sequences[sequence_id]
        table = seq.table
        if self.states is not None and seq.lookup is not None:  # the hit was cut to a snapshot
            held = min(seq.lookup.hit.tokens, host_hit.tokens) // self.block_size
            self._first.release(table)
            self._first.attach(table, seq.lookup.hit.blocks[:held], held * self.block_size)
        assert self.host is not None and not table.tail_borrowed, "only full blocks are loaded"
        blocks = self.pool.take(len(host_hit.blocks))
        table.blocks.extend(blocks)
        return self.host.begin_loads(host_hit.blocks, blocks)

    def can_fork(self, parent_id: str, tokens: int) -> bool:
        """True if the parent still holds all that a continuation after its first `tokens` tokens needs."""
        parent = self._sequences[parent_id]
        # The last token is computed again, after a state without it.
        if self.states is not None and tokens > 1 and self.states.held_position(parent_id) != tokens - 1:
            return False
        pairs = zip(self.windows, parent.windows, strict=True)
        return all(table.gone <= group.first_needed(tokens) for group, table in pairs)

    def fork(self, parent_id: str, child_id: str, tokens: int) -> None:
        """Give an empty sequence the parent's first `tokens` tokens, whose K/V the parent has computed.

        The caller has checked `can_fork`.
        """
        parent, child = self._sequences[parent_id], self._sequences[child_id]
        shared = self.blocks_for(tokens)
        assert shared <= len(parent.table.blocks), "the parent does not hold that many tokens"
        self._first.attach(child.table, parent.table.blocks[:shared], tokens)
        child.table.partial_registered = False
        for group, mine, table in zip(self.windows, child.windows, parent.windows, strict=True):
            first = group.first_needed(tokens)
            group.attach(mine, table.blocks[first:shared], tokens, first)
            mine.partial_registered = False
        child.chain.share(parent.chain, tokens // self.block_size)

    # --- room ---------------------------------------------------------------------------------------------------
    def has_room(self, sequence_id: str, upto: int, reserve: int = 0) -> bool:
        """True if the free blocks, less `reserve` in the first pool, hold all that the sequence takes until it has
        computed `upto` tokens. A window group needs less if that takes several steps.
        """
        seq = self._sequences[sequence_id]
        if self._first.growth_cost(seq.table, upto) + reserve > self.num_free:
            return False
        pairs = zip(self.windows, seq.windows, strict=True)
        return all(group.most_growth(table, upto) <= group.pool.num_free for group, table in pairs)

    def has_room_after(self, sequence_id: str, upto: int, planned: int, leaving: Sequence[str], stored: int) -> bool:
        """True if `grow` could succeed when the sequence has computed its `planned` tokens, the sequences `leaving`
        have released their blocks, and `stored` more became free in the first pool. Some blocks are shared, so it may
        fail even then.
        """
        seq, gone = self._sequences[sequence_id], [self._sequences[name] for name in leaving]
        to_come = stored + sum(len(other.table.blocks) for other in gone)
        if self._first.growth_cost(seq.table, upto) > self.num_free + to_come:
            return False
        for number, (group, table) in enumerate(zip(self.windows, seq.windows, strict=True)):
            to_come = sum(len(other.windows[number].held) for other in gone)
            to_come += max(0, group.first_needed(planned) - table.gone)
            if group.growth_cost(table, upto) > group.pool.num_free + to_come:
                return False
        return True

    def grow(self, sequence_id: str, upto: int) -> Growth | None:
        """Make positions below `upto` writable. Return None and change nothing if there are not enough free blocks."""
        seq = self._sequences[sequence_id]
        if not self._first.can_grow(seq.table, upto):
            return None
        pairs = tuple(zip(self.windows, seq.windows, strict=True))
        if not all(group.can_grow(table, upto) for group, table in pairs):
            return None
        growth = self._first.grow(seq.table, upto)
        if pairs:
            growth = replace(growth, windows=tuple(group.grow(table, upto) for group, table in pairs))
        return growth

    def grow_many(self, wants: Sequence[tuple[str, int]]) -> list[Growth] | None:
        """Run `grow` for a whole batch of (sequence, upto), all or nothing, with one access to each pool."""
        sequences = [self._sequences[sequence_id] for sequence_id, _ in wants]
        uptos = [upto for _, upto in wants]
        costs = [self._first.growth_cost(seq.table, upto) for seq, upto in zip(sequences, uptos, strict=True)]
        if sum(costs) > self.num_free:
            return None
        in_windows = [
            [group.growth_cost(seq.windows[number], upto) for seq, upto in zip(sequences, uptos, strict=True)]
            for number, group in enumerate(self.windows)
        ]
        if any(sum(of) > group.pool.num_free for group, of in zip(self.windows, in_windows, strict=True)):
            return None
        grown = _extend_all(self._first, [seq.table for seq in sequences], uptos, costs)
        if not self.windows:
            return grown
        further = [
            _extend_all(group, [seq.windows[number] for seq in sequences], uptos, in_windows[number])
            for number, group in enumerate(self.windows)
        ]
        return [replace(growth, windows=same) for growth, *same in zip(grown, *further, strict=True)]

    def undo(self, sequence_id: str, growth: Growth) -> None:
        """Revert a `grow` that no submitted step has seen."""
        seq = self._sequences[sequence_id]
        self._first.undo(seq.table, growth)
        for group, table, of in zip(self.windows, seq.windows, growth.windows, strict=True):
            group.undo(table, of)

    def copies_done(self, copies: Iterable[BlockCopy], windows: Sequence[Iterable[BlockCopy]] = ()) -> None:
        """Release the sources of these copies, whose step is complete. windows: of each window group; empty = none."""
        self._first.copies_done(copies)
        for group, of in zip(self.windows, windows, strict=False):
            group.copies_done(of)

    # --- computed tokens ----------------------------------------------------------------------------------------
    def register(self, sequence_id: str, tokens: Sequence[int], computed: int, prompt_len: int) -> None:
        """Offer computed blocks to the prefix index, and release those that have left a window.

        `tokens`: the sequence's known tokens. The K/V of the first `computed` is in the cache, and no later row begins
        before them.
        """
        seq = self._sequences[sequence_id]
        if self.prefix_caching:
            self._first.register(seq.table, seq.chain, tokens, computed, prompt_len)
        if not self.windows:
            return
        for group, table in zip(self.windows, seq.windows, strict=True):
            if self.prefix_caching:
                group.register(table, seq.chain, tokens, computed, prompt_len)
            group.leave(table, computed, (*seq.wanted, prompt_len))

    def invalidate(self, sequence_id: str) -> None:
        """Prevent matches of the sequence's blocks, because it failed and its K/V may be the cause.

        Blocks that other sequences have computed are included. Values that are not finite may come from a shared
        prefix, and all further requests with it would fail too. The next one computes the prefix again.
        """
        seq = self._sequences[sequence_id]
        blocks = seq.table.blocks
        if self.host is not None:
            held = map(self.index.full_entry, blocks)
            self.host.invalidate(entry.key for entry in held if entry is not None)
        for block in blocks:
            self.index.remove(block)
        for group, table in zip(self.windows, seq.windows, strict=True):
            group.invalidate(table, seq.chain)
        if self.states is not None:
            self.states.invalidate(seq.chain)
        if self.host_states is not None:
            self.host_states.invalidate(seq.chain.keys)

    def release(self, sequence_id: str) -> None:
        """Release all blocks of a sequence, which stays open, and its slot."""
        seq = self._sequences[sequence_id]
        if self.states is not None:
            self.states.release(sequence_id)
        self._first.release(seq.table)
        for group, table in zip(self.windows, seq.windows, strict=True):
            group.release(table)

    def close(self, sequence_id: str) -> None:
        """Remove a sequence. Its blocks stay matchable until they are reused."""
        self.release(sequence_id)
        del self._sequences[sequence_id]

    # --- checks -------------------------------------------------------------------------------------------------
    def check_integrity(self) -> None:
        """Raise AssertionError unless free + owned = total and every reference has exactly one owner."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """Run `check_integrity` in pieces of some 1,000 blocks, a millisecond or two each. The cache must not change
        meanwhile.
        """
        copied = self.host.referenced_blocks() if self.host is not None else ()
        yield from self._first.audit(((name, seq.table) for name, seq in self._sequences.items()), copied)
        for number, group in enumerate(self.windows):
            yield from group.audit((name, seq.windows[number]) for name, seq in self._sequences.items())
        for name, seq in self._sequences.items():
            assert all(len(table.blocks) == len(seq.table.blocks) for table in seq.windows), f"tables of {name!r}"
        if self.states is not None:
            copied = self.host_states.referenced_blocks() if self.host_states is not None else ()
            yield from self.states.audit(AUDIT_PIECE_BLOCKS, copied)
        if self.host_states is not None:
            yield from self.host_states.audit(AUDIT_PIECE_BLOCKS)
        if self.host is not None:
            yield from self.host.audit(AUDIT_PIECE_BLOCKS)


def _state_group(pool: StatePool, block_size: int, prefix_caching: bool) -> StateGroup:
    reserved = int(pool.num_slots * SNAPSHOT_RESERVE_SHARE) if prefix_caching else 0
    return StateGroup(pool, block_size, reserved)


def _extend_all(
    group: BlockGroup, tables: Sequence[BlockTable], uptos: Sequence[int], costs: Sequence[int]
) -> list[Growth]:
    """Extend many tables by `costs` blocks each, with one access to the pool."""
    blocks, used, grown = group.pool.take(sum(costs)), 0, []
    for table, upto, cost in zip(tables, uptos, costs, strict=True):
        grown.append(group.extend(table, blocks[used : used + cost], upto))
        used += cost
    return grown
