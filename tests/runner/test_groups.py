"""A runner whose layers are in several KV groups computes what one with a single group does."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.groups import KVGroups
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.core.plan import Admission, BlockCopy, GroupChanges, Row, StepLimits, StepPlan, TableChange
from roseinfer.core.sampling import SequenceParams
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.runner import cuda_inputs
from roseinfer.runner.cuda_inputs import CudaInputs
from roseinfer.runner.forward import Columns, EagerForward, Forwarded, ForwardPass, from_rows, nothing
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.seats import SeatTable
from tests.helpers.attention import shape_of, spec_of
from tests.helpers.cases import cases
from tests.helpers.interpreter import hurry
from tests.runner.test_cuda_inputs import HostStaging
from tests.runner.tiny import VOCAB, run

BLOCK, LENGTH, SEATS, BLOCKS = 4, 64, 3, 80
WINDOWS = (None, 9, 5, 9)
SPECS = [spec_of(2, 1, 16, window=window) for window in WINDOWS]
WIDTH = 32  # of all heads together


class LayeredModel:
    """Model with an attention layer for each spec, and nothing between them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.randn(VOCAB, WIDTH, generator=generator)
        self.position = torch.randn(LENGTH, WIDTH, generator=generator)
        self.projections = torch.randn(len(SPECS), WIDTH, SPECS[0].qkv_width, generator=generator) / 6
        self.head = torch.randn(WIDTH, VOCAB, generator=generator)

    def forward(self, batch: ForwardBatch, attention: TorchAttention) -> torch.Tensor:
        hidden = self.embedding[batch.input_ids] + self.position[batch.positions]
        for layer, (spec, weight) in enumerate(zip(SPECS, self.projections, strict=True)):
            hidden = hidden + attention.forward(layer, hidden @ weight, HeadTransform(spec))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head


class Interpreted:
    """`ForwardPass` that computes each step as a captured one, by our kernels under Triton's interpreter."""

    bucket = 32

    def __init__(self, model: LayeredModel, store: KVStore, seats: SeatTable) -> None:
        from roseinfer.attention.triton_backend import TritonAttention

        self._model, self._store, self._inputs = model, store, CudaInputs(seats, SEATS, self.bucket)
        sizes = {"max_rows": SEATS, "max_tokens": self.bucket, "max_model_len": LENGTH, "block_size": BLOCK}
        self._attention = TritonAttention(shape_of(*SPECS, device=torch.device("cpu"), **sizes))

    def run(self, columns: Columns, staged: Callable[[], None] = nothing) -> Forwarded:
        attention, first = self._attention, columns.num_decodes
        counts = columns.count[first:]
        contexts = [start + count for start, count in zip(columns.start[first:], counts, strict=True)]
        chunk_map = attention.map_chunks(self.bucket, first, counts, contexts)
        divided = attention.is_divided(chunk_map)
        room = attention.max_chunks(self.bucket, SEATS, divided)
        found = self._inputs.stage_mixed(columns, self.bucket, chunk_map, room)
        batch = self._inputs.mixed_batch(self.bucket, room, divided)
        attention.begin(batch, self._store)
        return Forwarded(hidden=self._model.forward(batch, attention).index_select(0, found.logits_at))


class Pool:
    """Blocks of one KV group, handed out in random order and soon again."""

    def __init__(self, rng: random.Random, store: KVStore, group: int) -> None:
        self._rng, self._store, self._group = rng, store, group
        self._free = list(range(BLOCKS))

    def take(self, count: int) -> list[int]:
        self._rng.shuffle(self._free)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks, with contents that would show in every result."""
        self._free += blocks
        for layer, group in enumerate(self._store.group_of):
            if group == self._group:
                for cache in self._store.layer(layer):
                    cache[blocks] = float("nan")


@dataclass
class Sequence:
    """A request's tokens, how many are computed, and its blocks by entry of the table in each group."""

    seat: int
    tokens: list[int]
    computed: int = 0
    tables: list[dict[int, int]] = field(default_factory=list)
    out: list[int] = field(default_factory=list)
    admitted: bool = False


class Side:
    """A runner and its pools. Window groups free blocks as soon as they have left the window."""

    def __init__(self, groups: KVGroups, seed: int, *, interpreted: bool = False) -> None:
        device = torch.device("cpu")
        self.windows = (None, *groups.windows)
        more = [BLOCKS] * len(groups.windows)
        self.store = KVStore(BLOCKS, BLOCK, SPECS, torch.float32, device, groups, more)
        self.seats = SeatTable(SEATS, LENGTH, BLOCK, VOCAB, device, [0] * groups.count)
        self.model, attention = LayeredModel(), TorchAttention(SPECS, torch.float32)
        forward: ForwardPass = EagerForward(self.model, attention, self.store, from_rows(self.seats))
        if interpreted:
            forward = Interpreted(self.model, self.store, self.seats)
        self.runner = ModelRunner(self.model, forward, self.store, self.seats, StepLimits(SEATS, SEATS * LENGTH))
        rng = random.Random(seed)
        self.pools = [Pool(rng, self.store, group) for group in range(groups.count)]
        self.steps = 0

    def step(self, spans: list[tuple[Sequence, int]], copied: list[Sequence]) -> None:
        """Compute so many tokens of each sequence. copied: sequences whose last block is copied first."""
        rows, admitted, tables, copies = [], [], [[] for _ in self.pools], [[] for _ in self.pools]
        for sequence, count in spans:
            first = not sequence.admitted
            if first:
                sequence.admitted, sequence.tables = True, [{} for _ in self.pools]
                params = SequenceParams(max_tokens=64, temperature=0.0)
                prompt = list(sequence.tokens)
                admitted.append(Admission(f"r{sequence.seat}", sequence.seat, prompt, len(prompt), params, 0, (), ()))
            changes = [
                self._grow(sequence, group, count, sequence in copied, copies) for group in range(len(self.pools))
            ]
            for group, change in enumerate(changes):
                if change.blocks:
                    tables[group].append(change)
            end = sequence.computed + count
            sample = end == len(sequence.tokens)
            name, seat, start = f"r{sequence.seat}", sequence.seat, sequence.computed
            _, table_from, blocks = changes[0] if changes[0].blocks else (seat, 0, ())
            rows.append(Row(name, seat, start, count, int(sample), sample, start, table_from, blocks))
        self.steps += 1
        groups = tuple(GroupChanges(tuple(tables[g]), tuple(copies[g])) for g in range(1, len(self.pools)))
        total = sum(count for _, count in spans)
        plan = StepPlan(self.steps, rows, admitted, copies[0], num_tokens=total, groups=groups)
        found = run(self.runner, plan)
        for (sequence, count), result in zip(spans, found.rows, strict=True):
            assert result.error is None
            sequence.computed += count
            sequence.tokens += result.token_ids
            sequence.out += result.token_ids
            self._leave(sequence)

    def end(self, sequence: Sequence) -> None:
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            pool.give_back(list(table.values()))
        run(self.runner, StepPlan(-1, [], released=[sequence.seat]))

    def _grow(self, sequence: Sequence, group: int, count: int, copied: bool, copies: list[list]) -> TableChange:
        table = sequence.tables[group]
        first, end = max(table, default=-1) + 1, -(-(sequence.computed + count) // BLOCK)
        if copied and sequence.computed % BLOCK:
            first -= 1
            (block,) = self.pools[group].take(1)
            copies[group].append(BlockCopy(table[first], block, sequence.computed % BLOCK))
            table[first] = block  # its old block stays taken
            blocks = [block, *self.pools[group].take(end - first - 1)]
        else:
            blocks = self.pools[group].take(end - first)
        table.update(zip(range(first, end), blocks, strict=True))
        return TableChange(sequence.seat, first, tuple(blocks))

    def _leave(self, sequence: Sequence) -> None:
        for pool, table, window in zip(self.pools, sequence.tables, self.windows, strict=True):
            gone = 0 if window is None else max(0, sequence.computed - window + 1) // BLOCK
            pool.give_back([table.pop(entry) for entry in list(table) if entry < gone])


def test_a_seat_may_be_admitted_and_grow_in_one_step() -> None:
    seats = SeatTable(SEATS, LENGTH, BLOCK, VOCAB, torch.device("cpu"), [70, 71])
    tables = (TableChange(1, 2, (5, 6, 7)), TableChange(0, 0, (9,)), TableChange(1, 4, (8, 10)))
    seats.grow_tables([], [GroupChanges(tables)])
    assert seats.tables[1][1, 2:6].tolist() == [5, 6, 8, 10]
    assert seats.tables[1][0, 0] == 9 and seats.tables[1][SEATS].unique().tolist() == [71]
    assert not seats.tables[0][:SEATS].any() and seats.tables[0][SEATS].unique().tolist() == [70]


@cases("seed", range(1), exhaustive=range(1, 4))
def test_window_groups_change_no_token(seed: int) -> None:
    sides = [Side(KVGroups.by_window(SPECS, LENGTH), seed), Side(KVGroups.single(len(SPECS)), seed)]
    assert sides[0].windows == (None, 5, 9)
    compare(sides, seed, rounds=3, steps=24)


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_captured_steps_read_and_write_the_blocks_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)
    hurry()
    groups = KVGroups.by_window(SPECS, LENGTH)
    compare([Side(groups, 1, interpreted=True), Side(groups, 1)], 1, rounds=1, steps=3)


def compare(sides: list[Side], seed: int, rounds: int, steps: int) -> None:
    """Run the same random steps on both sides. Assert that they sample the same tokens."""
    rng = random.Random(seed)
    outputs: list[list[list[int]]] = [[], []]
    for _ in range(rounds):
        prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(SEATS)]
        both = [[Sequence(seat, list(prompt)) for seat, prompt in enumerate(prompts)] for _ in sides]
        for _ in range(steps):
            chosen = rng.sample(range(SEATS), rng.randint(1, SEATS))
            room = {seat: LENGTH - both[0][seat].computed for seat in chosen}
            chosen = [seat for seat in chosen if room[seat]]
            counts = [min(rng.randint(1, 10), len(both[0][s].tokens) - both[0][s].computed) for s in chosen]
            copied = [seat for seat in chosen if rng.random() < 0.2]
            for side, sequences in zip(sides, both, strict=True):
                spans = [(sequences[seat], count) for seat, count in zip(chosen, counts, strict=True)]
                if spans:
                    side.step(spans, [sequences[seat] for seat in copied])
        for number, (side, sequences) in enumerate(zip(sides, both, strict=True)):
            outputs[number].append([sequence.out for sequence in sequences])
            for sequence in sequences:
                if sequence.admitted:
                    side.end(sequence)
    assert outputs[0] == outputs[1] and any(map(any, outputs[0]))
