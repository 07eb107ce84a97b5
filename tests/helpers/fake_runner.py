"""A runner in plain Python that keeps a real paged cache of fingerprints and checks every read and write.

A token's "K/V" is a fingerprint of all tokens up to it. Computing a token verifies that each earlier position of its
context holds the fingerprint it should, so a wrong block, a lost copy or a write into a shared block fails at once.
The next token is a function of the fingerprint and the request's (seed, output index) alone: whatever the schedule,
the same request must give the same tokens. The vector of a prompt-only request is a function of its prompt's
fingerprints: of the last one, or of their sum if the pooling needs every position. Fingerprints of a request with
a LoRA adapter begin with that of its slot.
"""

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from roseinfer.core.plan import (
    Admission,
    BlockCopy,
    Row,
    RowResult,
    StepLimits,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TokenMasks,
)
from roseinfer.core.pooling import PoolingInfo
from roseinfer.core.runner import Capabilities, WindowPool
from tests.helpers.fake_adapters import FakeAdapterSlots
from tests.helpers.fake_slots import FakeSlots

EMPTY = (-1, 0)
JUNK = (-2, 0)


@dataclass
class Seat:
    admission: Admission
    tokens: list[int]
    tables: list[list[int]]  # in each KV group
    counts: dict[int, int] = field(default_factory=dict)
    failed: bool = False
    pooled: list[int] = field(default_factory=list)  # fingerprints that the rows so far asked for
    first: int = 0  # fingerprint before the first token


def fingerprint(previous: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), previous)


def pooled_prints(prints: list[int]) -> bytes:
    """Return the vector that the fake runner makes of fingerprints: their sum, and the last one."""
    return array("f", [sum(value % 1000 for value in prints), prints[-1] % 1000]).tobytes()


class FakeRunner:
    capabilities = Capabilities(drafts=True, masks=True, logprobs=True)

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 50,
        fail_on_token: int | None = None,
        num_host_blocks: int = 0,
        pooling: PoolingInfo | None = None,
        windows: tuple[WindowPool, ...] = (),
        num_slots: int = 0,
        num_host_slots: int = 0,
    ) -> None:
        self.pooling = pooling
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.fail_on_token = fail_on_token
        self.failure = "planted failure"
        self.cache = [[EMPTY] * block_size for _ in range(num_blocks)]
        self.windows = [pool.window for pool in windows]
        # The cache of each KV group: the first one's, then those of the window groups.
        self.caches = [self.cache, *([[EMPTY] * block_size for _ in range(pool.num_blocks)] for pool in windows)]
        self.slots = FakeSlots(num_slots, num_host_slots) if num_slots else None
        self.host = [[EMPTY] * block_size for _ in range(num_host_blocks)]
        self._copied: dict[int, list[list[tuple[int, int]]]] = {}  # by step: what its loads and stores read
        self.seats: dict[int, Seat] = {}
        self.adapters: FakeAdapterSlots | None = None
        self.submitted: list[StepPlan] = []
        self.closed = False
        self.limits: StepLimits | None = None  # what plans may hold, if somebody says so
        self.masked = 0
        self.space = memoryview(b"")
        self._computed: dict[int, list[list[int]]] = {}
        self._results: dict[int, StepResult] = {}

    def submit(self, plan: StepPlan) -> int:
        if self.limits is not None:
            self.limits.check(plan)
        self.submitted.append(plan)
        for seat in plan.released:
            self.seats.pop(seat, None)
        for admission in plan.admitted:
            tables = [list(admission.blocks), *([] for _ in self.windows)]
            seat = Seat(admission, list(admission.token_ids), tables)
            for token in seat.tokens[admission.prompt_len :]:
                seat.counts[token] = seat.counts.get(token, 0) + 1
            self.seats[admission.seat] = seat
        if self.adapters is not None:
            for number, digest in self.adapters.submit(plan).items():
                self.seats[number].first = zlib.crc32(digest.encode())
        self._copy(self.cache, plan.copies)
        self._begin_host_copies(plan)
        for row in plan.rows:
            if row.new_blocks:
                self.seats[row.seat].tables[0][row.table_from :] = row.new_blocks
        self._apply_groups(plan)
        for row in plan.rows:
            if row.drafts:
                self._take_drafts(row)
        if self.slots is not None:
            self._compute_states(self.slots, plan)
        # All rows write before any reads, as attention does within a layer.
        for row in plan.rows:
            self._write(row)
        self._computed[plan.step] = [self._verify(row) for row in plan.rows]
        return plan.step

    def _compute_states(self, slots: FakeSlots, plan: StepPlan) -> None:
        ends = {row.seat: row.start + row.count for row in plan.rows}
        slots.apply(plan, {seat: self._prints(self.seats[seat], end) for seat, end in ends.items()})

    def _copy(self, cache: list[list[tuple[int, int]]], copies: Iterable[BlockCopy]) -> None:
        copies = list(copies)
        sources, destinations = {copy.src for copy in copies}, [copy.dst for copy in copies]
        assert sources.isdisjoint(destinations) and len(set(destinations)) == len(destinations)
        held = [cache[copy.src][: copy.tokens] for copy in copies]
        for copy, slots in zip(copies, held, strict=True):
            cache[copy.dst][: copy.tokens] = slots

    def _apply_groups(self, plan: StepPlan) -> None:
        assert len(plan.groups) in (0, len(self.windows))
        for number, group in enumerate(plan.groups, start=1):
            self._copy(self.caches[number], group.copies)
            for change in group.tables:
                table = self.seats[change.seat].tables[number]
                table += [0] * (change.table_from - len(table))
                table[change.table_from :] = change.blocks

    def _begin_host_copies(self, plan: StepPlan) -> None:
        """Hide what loads and stores write until the step is collected."""
        plan.check_host_copies(len(self.cache), len(self.host))
        if not (plan.loads or plan.stores):
            return
        read = [*(self.host[copy.host] for copy in plan.loads), *(self.cache[copy.block] for copy in plan.stores)]
        assert all(JUNK not in slots and EMPTY not in slots for slots in read), "only what is there is copied"
        self._copied[plan.step] = [list(slots) for slots in read]
        for copy in plan.loads:
            self.cache[copy.block][:] = [JUNK] * self.block_size
        for copy in plan.stores:
            self.host[copy.host][:] = [JUNK] * self.block_size

    def _end_host_copies(self, plan: StepPlan) -> None:
        if self.slots is not None:
            self.slots.end_host_copies(plan)
        read = self._copied.pop(plan.step, [])
        loads, stores = read[: len(plan.loads)], read[len(plan.loads) :]
        for copy, slots in zip(plan.loads, loads, strict=True):
            assert self.host[copy.host] == slots, "nobody writes what is being loaded"
            assert self.cache[copy.block] == [JUNK] * self.block_size, "nor where it goes"
            self.cache[copy.block][:] = slots
        for copy, slots in zip(plan.stores, stores, strict=True):
            assert self.cache[copy.block] == slots, "nobody writes what is being stored"
            assert self.host[copy.host] == [JUNK] * self.block_size, "nor where it goes"
            self.host[copy.host][:] = slots

    def _prints(self, seat: Seat, end: int) -> list[int]:
        prints, previous = [], seat.first
        for token in seat.tokens[:end]:
            previous = fingerprint(previous, token)
            prints.append(previous)
        return prints

    def _write(self, row: Row) -> None:
        seat = self.seats[row.seat]
        assert seat.admission.request_id == row.request_id
        end = row.start + row.count
        assert end <= len(seat.tokens), "an input token is not known yet"
        prints = self._prints(seat, end)
        for cache, table in zip(self.caches, seat.tables, strict=True):
            for position in range(max(row.start, row.write_from), end):
                block = table[position // self.block_size]
                cache[block][position % self.block_size] = (position, prints[position])

    def _take_drafts(self, row: Row) -> None:
        """Inputs behind the row's first token, as if they were known."""
        tokens = self.seats[row.seat].tokens
        assert (row.count, row.logits, row.sample) == (1 + len(row.drafts), 1 + len(row.drafts), True)
        assert len(tokens) == row.start + 1, "drafts follow the last known token"
        assert row.start >= self.seats[row.seat].admission.prompt_len
        tokens += row.drafts

    def _verify(self, row: Row) -> list[int]:
        """Check what the row reads; returns the fingerprints of the positions that it computes."""
        seat = self.seats[row.seat]
        end = row.start + row.count
        prints = self._prints(seat, end)
        firsts = [0, *(max(0, row.start - window + 1) for window in self.windows)]
        for cache, table, first in zip(self.caches, seat.tables, firsts, strict=True):
            for position in range(first, end):
                held = cache[table[position // self.block_size]][position % self.block_size]
                assert held == (position, prints[position]), f"{row.request_id}: position {position} holds {held}"
        return prints[row.start :]

    def mask_space(self, lines: int) -> memoryview:
        junk = array("I", [0xDEADBEEF]) * (lines * TokenMasks.words_per_row(self.vocab_size))
        self.space = memoryview(junk)
        return self.space

    def sample(self, handle: int, masks: TokenMasks | None = None) -> None:
        plan = self.submitted[-1]
        assert plan.step == handle
        prints = self._computed.pop(handle)
        allowed = self._allowed(plan, masks)
        rows = [self.sample_row(row, prints[i], allowed.get(i, {})) for i, row in enumerate(plan.rows)]
        self._results[handle] = StepResult(handle, rows)

    def _allowed(self, plan: StepPlan, masks: TokenMasks | None) -> dict[int, dict[int, list[int]]]:
        """Return the tokens that rows may sample after some of their drafts."""
        assert (masks is None) == (not plan.guided), "masks come with the plans that ask for them"
        if masks is None:
            return {}
        size = TokenMasks.words_per_row(self.vocab_size)
        places = [*zip(masks.rows, masks.drafts_before or [0] * len(masks.rows), strict=True)]
        assert set(masks.rows) <= set(plan.guided) and len(places) == len(set(places))
        assert all(drafts_before <= len(plan.rows[row].drafts) for row, drafts_before in places)
        assert not masks.rows or masks.words.obj is self.space.obj
        assert len(masks.words) == size * len(masks.rows)
        self.masked += len(masks.rows)
        allowed: dict[int, dict[int, list[int]]] = {}
        for at, (row, drafts_before) in enumerate(places):
            line = masks.words[at * size : (at + 1) * size]
            bits = [t for t in range(self.vocab_size) if line[t // 32] >> t % 32 & 1]
            allowed.setdefault(row, {})[drafts_before] = bits
        return allowed

    def sample_row(self, row: Row, prints: list[int], allowed: dict[int, list[int]]) -> RowResult:
        seat = self.seats[row.seat]
        if seat.admission.pooling is not None:
            return self._pool_row(row, seat, prints)
        params, prompt_len = seat.admission.params, seat.admission.prompt_len
        scored = None
        if params.prompt_logprobs is not None and row.logits == row.count and row.start < prompt_len - 1:
            ends = range(row.start + 1, min(row.start + row.count, prompt_len - 1) + 1)
            scored = tuple(TokenLogprobs(seat.tokens[p], -float(p), 1, ()) for p in ends)
        if not row.sample:
            return RowResult(row.request_id, prompt_logprobs=scored)
        assert row.logits >= 1
        end = row.start + row.count - len(row.drafts)
        del seat.tokens[end:]  # drafts
        sampled: list[int] = []
        for value, draft in zip(prints[-1 - len(row.drafts) :], (*row.drafts, None), strict=True):
            token = self._choose(seat, value, allowed.get(len(sampled)))
            seat.tokens.append(token)
            seat.counts[token] = seat.counts.get(token, 0) + 1
            seat.failed = seat.failed or token == self.fail_on_token
            if seat.failed:  # now and, if the next step is on its way already, later
                break
            sampled.append(token)
            if token != draft:
                break
        # A log probability tells one position from another.
        scores = tuple(TokenLogprobs(token, -float(end + i), 1, ()) for i, token in enumerate(sampled))
        return RowResult(
            row.request_id,
            tuple(sampled),
            scores if params.logprobs is not None else None,
            scored,
            self.failure if seat.failed else None,
        )

    def _pool_row(self, row: Row, seat: Seat, prints: list[int]) -> RowResult:
        assert self.pooling is not None, "only an engine that pools admits such a request"
        seat.pooled += prints[len(prints) - row.logits :]
        if not row.sample:
            return RowResult(row.request_id)
        assert row.start + row.count == seat.admission.prompt_len
        if self.fail_on_token in seat.tokens:
            return RowResult(row.request_id, error=self.failure)
        whole = self.pooling.method.needs_every_position
        assert len(seat.pooled) == (seat.admission.prompt_len if whole else 1)
        return RowResult(row.request_id, vector=pooled_prints(seat.pooled))

    def _choose(self, seat: Seat, value: int, allowed: list[int] | None) -> int:
        index = len(seat.tokens) - seat.admission.prompt_len
        mixed = fingerprint(value, abs(seat.admission.seed) % 2**31)
        token = fingerprint(mixed, index) % self.vocab_size
        if allowed is not None:
            return allowed[fingerprint(mixed, index) % len(allowed)]
        if seat.admission.params.frequency_penalty and seat.counts.get(token, 0):
            token = (token + seat.counts[token]) % self.vocab_size
        while self._excluded(seat, token, index):
            token = (token + 1) % self.vocab_size
        return token

    def _excluded(self, seat: Seat, token: int, index: int) -> bool:
        params, outputs = seat.admission.params, seat.tokens[seat.admission.prompt_len :]
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            return True
        if any([*outputs, token][-len(ids) :] == list(ids) for ids in params.bad_token_ids):
            return True
        return index < params.min_tokens and token in seat.admission.stop_ids

    def collect(self, handle: int) -> StepResult:
        plan = next(plan for plan in reversed(self.submitted) if plan.step == handle)
        self._end_host_copies(plan)
        if self.adapters is not None:
            self.adapters.collect(plan)
        return self._results.pop(handle)

    def close(self) -> None:
        self.closed = True


class DelayedRunner(FakeRunner):
    """Records in which order plans arrive and results are asked for."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[str] = []

    def submit(self, plan: StepPlan) -> int:
        self.log.append(f"plan {plan.step}")
        return super().submit(plan)

    def collect(self, handle: int) -> StepResult:
        self.log.append(f"result {handle}")
        return super().collect(handle)
