"""Recurrent states of a runner: slots of seats, copies, snapshots, and the tables of captured steps."""

import random

import numpy as np
import pytest
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.core.plan import (
    Admission,
    Row,
    SlotChange,
    SlotCopy,
    StateChanges,
    StateSnapshot,
    StepLimits,
    StepPlan,
)
from roseinfer.core.sampling import SequenceParams
from roseinfer.kernels.common.inputs import expand_rows_reference
from roseinfer.runner import cuda_inputs
from roseinfer.runner.cuda_inputs import CudaInputs, state_pieces
from roseinfer.runner.forward import Columns, EagerForward, from_rows
from roseinfer.runner.model_runner import ModelRunner
from roseinfer.runner.rehearsal import rehearse
from roseinfer.runner.seats import SeatTable
from roseinfer.runner.state_slots import StateSlots
from roseinfer.state.batch import RowSnapshot, StateRow, lay_out
from roseinfer.state.spec import StatePart, StateSpec
from roseinfer.state.store import StateStore
from tests.helpers.attention import store_of
from tests.runner.test_cuda_inputs import HostStaging
from tests.runner.tiny import DIM, VOCAB, LoopAttention, run

SEATS, LENGTH, SLOTS = 4, 300, 7
SPEC = StateSpec((StatePart("sum", (DIM,), "float32"),))
DEVICE = torch.device("cpu")


def make_seats(seats: int = SEATS) -> SeatTable:
    slots = StateSlots(StateStore(SLOTS + 1, [SPEC], DEVICE), seats)
    for tensor in slots.store.tensors:
        tensor.fill_(float("nan"))
    return SeatTable(seats, LENGTH, 4, VOCAB, DEVICE, states=slots)


class SummingModel:
    """Model whose logits depend on a decaying sum of all tokens so far, kept in a slot."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(VOCAB, DIM, generator=generator)
        self.head = torch.randn(DIM, VOCAB, generator=generator)
        self.kept: dict[int, list[torch.Tensor]] = {}  # by slot: drafts of its last row

    def forward(self, batch: ForwardBatch, attention: LoopAttention) -> torch.Tensor:
        assert batch.states is not None
        states, out, first = batch.states.store.part(0, "sum"), [], 0
        for number, (slot, start, count, drafts, replayed) in enumerate(batch.states.rows):
            state = states[slot] if start else torch.zeros(DIM)
            cuts = {tokens: into for row, tokens, into in batch.states.snapshots if row == number}
            inputs = [*self.kept.pop(slot, [])[:replayed], *batch.input_ids[first : first + count]]
            assert len(inputs) == replayed + count
            for done, token in enumerate(inputs, 1 - replayed):
                state = 0.9 * state + self.embedding[token]
                out += [state] if done > 0 else []
                if done in cuts:
                    states[cuts[done]] = state
                if done == count - drafts:
                    known = state
            states[slot] = known
            self.kept[slot] = inputs[len(inputs) - drafts :]
            first += count
        return torch.stack(out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head


class Bench:
    def __init__(self) -> None:
        self.seats = make_seats()
        store = store_of(8, 1, 4, 1, DIM, torch.float32, DEVICE)
        forward = EagerForward(SummingModel(), LoopAttention(), store, from_rows(self.seats))
        self.runner = ModelRunner(SummingModel(), forward, store, self.seats, StepLimits(SEATS, LENGTH, 20))
        self.step = 0

    def run(
        self, spans: list[tuple[int, int, int]], admitted: dict[int, list[int]] | None = None, **changes: object
    ) -> dict[int, int]:
        """Run rows (seat, start, count), and return the token that each seat samples."""
        admissions = [
            Admission(f"r{seat}", seat, tokens, len(tokens), SequenceParams(max_tokens=9, temperature=0.0), 0, (), ())
            for seat, tokens in (admitted or {}).items()
        ]
        rows = [Row(f"r{seat}", seat, start, count, 1, True, start, 0, ()) for seat, start, count in spans]
        plan = StepPlan(self.step, rows, admissions, num_tokens=sum(count for _, _, count in spans))
        plan.states = StateChanges(**changes) if changes else None
        found = run(self.runner, plan).rows
        self.step += 1
        return {seat: result.token_ids[0] for (seat, _, _), result in zip(spans, found, strict=True)}


def test_a_sequence_continues_from_a_snapshot_in_another_seat() -> None:
    """The snapshot is taken within a chunk, behind a decoding row, which comes first in the batch."""
    bench, prompt = Bench(), [5, 9, 1, 20, 7, 7, 3, 11]
    whole = Bench().run([(1, 0, 8)], {1: prompt}, slots=(SlotChange(1, 3),))[1]
    other = [4, 4, bench.run([(0, 0, 2)], {0: [4, 4]}, slots=(SlotChange(0, 0),))[0]]
    spans, snapshots = [(1, 0, 6), (0, 2, 1)], (StateSnapshot(0, 4, 5), StateSnapshot(1, 1, 6))
    other.append(bench.run(spans, {1: prompt}, slots=(SlotChange(1, 1),), snapshots=snapshots)[0])
    assert bench.run([(1, 6, 2)])[1] == whole
    moved = {"slots": (SlotChange(2, 2), SlotChange(3, 4)), "copies": (SlotCopy(5, 2), SlotCopy(5, 4))}
    both = bench.run([(2, 4, 4), (3, 4, 4)], {2: prompt, 3: prompt}, **moved)
    assert both == {2: whole, 3: whole}
    twins = bench.run([(0, 3, 1), (1, 3, 1)], {1: other}, slots=(SlotChange(1, 3),), copies=(SlotCopy(6, 3),))
    assert twins[0] == twins[1]


def verify(bench: Bench, seat: int, start: int, drafts: list[int], **changes: object) -> list[int]:
    """Run a row with drafts, and return its tokens."""
    count = 1 + len(drafts)
    row = Row(f"r{seat}", seat, start, count, count, True, start, 0, (), tuple(drafts))
    plan = StepPlan(bench.step, [row], num_tokens=count, num_drafts=len(drafts))
    plan.states = StateChanges(**changes) if changes else None
    bench.step += 1
    return list(run(bench.runner, plan).rows[0].token_ids)


def test_right_drafts_are_consumed_in_the_next_row():
    prompt, plain = [5, 9, 1, 20], Bench()
    expected = [plain.run([(1, 0, 4)], {1: prompt}, slots=(SlotChange(1, 3),))[1]]
    expected += [plain.run([(1, position, 1)])[1] for position in range(4, 14)]
    bench = Bench()
    assert bench.run([(2, 0, 4)], {2: prompt}, slots=(SlotChange(2, 5),))[2] == expected[0]
    wrong = (expected[3] + 1) % VOCAB
    assert verify(bench, 2, 4, [*expected[1:3], wrong, 7]) == expected[1:4]
    assert verify(bench, 2, 7, expected[4:6], snapshots=(StateSnapshot(0, -1, 6),)) == expected[4:7]
    assert bench.run([(2, 10, 1)])[2] == expected[7]
    assert bench.run([(2, 11, 1)])[2] == expected[8]
    # Another seat continues from the snapshot, taken after the right drafts of the first verified row but one.
    known = [*prompt, *expected[:6]]
    moved = {"slots": (SlotChange(0, 1),), "copies": (SlotCopy(6, 1),)}
    assert bench.run([(0, 6, 4)], {0: known}, **moved)[0] == expected[6]


def test_a_seat_that_begins_anew_replays_nothing():
    bench, prompt = Bench(), [5, 9, 1, 20]
    first = bench.run([(2, 0, 4)], {2: prompt}, slots=(SlotChange(2, 5),))[2]
    verify(bench, 2, 4, [1, 2])
    run(bench.runner, StepPlan(50, [], released=[2]))
    assert bench.run([(2, 0, 4)], {2: prompt}, slots=(SlotChange(2, 5),))[2] == first


def test_a_slot_keeps_nothing_of_its_last_owner() -> None:
    bench = Bench()
    first = bench.run([(0, 0, 3)], {0: [1, 2, 3]}, slots=(SlotChange(0, 2),))[0]
    run(bench.runner, StepPlan(50, [], released=[0]))
    bench.run([(0, 0, 5)], {0: [9, 9, 9, 9, 9]}, slots=(SlotChange(0, 2),))
    run(bench.runner, StepPlan(51, [], released=[0]))
    assert bench.run([(3, 0, 3)], {3: [1, 2, 3]}, slots=(SlotChange(3, 2),))[3] == first


@pytest.mark.parametrize("slots", [1, 2, 7])
def test_rehearsals_stay_within_the_slots(slots: int) -> None:
    seats = SeatTable(SEATS, 64, 4, VOCAB, DEVICE, states=StateSlots(StateStore(slots + 1, [SPEC], DEVICE), SEATS))
    store = store_of(40, 1, 4, 1, DIM, torch.float32, DEVICE)
    forward = EagerForward(SummingModel(), LoopAttention(), store, from_rows(seats))
    rehearse(ModelRunner(SummingModel(), forward, store, seats, StepLimits(SEATS, 64)), seats, [39], [3] * SEATS)
    assert seats.states is not None and not seats.states.store.part(0, "sum")[slots].any(), "the spare slot"


@pytest.mark.parametrize("seed", range(20))
def test_captured_steps_have_the_tables_of_eager_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)
    monkeypatch.setattr(cuda_inputs, "expand_rows", expand_rows_reference)
    rng, max_rows, max_tokens = random.Random(seed), 32, 256
    seats = make_seats(max_rows)
    inputs = CudaInputs(seats, max_rows, max_tokens, max_tokens)
    assert seats.states is not None
    slot_of = {seat: rng.randrange(100) for seat in range(max_rows)}
    rows = []
    for seat in rng.sample(range(max_rows), rng.randint(1, max_rows)):
        count = 1 if rng.random() < 0.6 else rng.choice([2, 20, 64, 90])
        drafts = tuple(range(count - 1)) if rng.random() < 0.3 else ()
        if sum(row.count for row in rows) + count <= max_tokens:
            logits = 1 + len(drafts)
            rows.append(Row(f"r{seat}", seat, rng.randrange(20, 100), count, logits, True, 0, 0, (), drafts))
    replayed = {row.seat: rng.choice([0, 0, 3]) for row in rows if row.count == 1 + len(row.drafts)}
    cut = [number for number in range(len(rows)) if rng.random() < 0.3]
    snapshots = tuple(
        StateSnapshot(
            number,
            rng.randint(1 - replayed.get(rows[number].seat, 0), rows[number].count - len(rows[number].drafts)),
            200 + number,
        )
        for number in cut
    )
    verified = [Row(f"r{seat}", seat, 0, 9, 9, True, 0, 0, (), (0,) * 8) for seat in replayed]
    starts = {row.seat: row.start for row in rows}
    verified = [row._replace(start=starts[row.seat] - replayed[row.seat] - 1) for row in verified]
    seats.states.apply(StateChanges(tuple(map(SlotChange, *zip(*slot_of.items(), strict=True)))), verified)
    seats.states.apply(StateChanges((), (), snapshots), rows)
    columns = Columns.of(rows)
    places = {number: place for place, number in enumerate(columns.order)}
    in_batch = [RowSnapshot(places[number], tokens, slot) for number, tokens, slot in snapshots]
    ordered = [rows[number] for number in columns.order]
    batch_rows = [
        StateRow(slot_of[row.seat], row.start, row.count, len(row.drafts), replayed.get(row.seat, 0)) for row in ordered
    ]

    eager = inputs.prepare(columns).batch.states
    assert eager is not None and (list(eager.rows), list(eager.snapshots)) == (batch_rows, in_batch)
    if not inputs.fits_states(columns, max_tokens):
        return
    inputs.stage_mixed(columns, max_tokens, np.empty((0, 4), np.int32), 5)
    tables = inputs.mixed_batch(max_tokens, 5).states.tables
    lines, pieces = lay_out(batch_rows, in_batch, (max_rows, state_pieces(max_tokens, max_rows)))
    lines[4, len(rows) :] = tables.rows[4, len(rows) :]  # nothing reads this of a row without tokens
    assert torch.equal(tables.rows, torch.from_numpy(lines)) and torch.equal(tables.pieces, torch.from_numpy(pieces))
    if columns.only_decodes or all(row.count == 1 for row in rows):
        inputs.stage_decodes(columns, max_rows)
        padding = [StateRow(SLOTS, 0, 1)] * (max_rows - len(rows))
        tables = inputs.decode_batch(max_rows).states.tables
        assert torch.equal(tables.rows, torch.from_numpy(lay_out([*batch_rows, *padding], in_batch)[0]))
        assert tables.pieces.shape == (0, 4)


def test_a_step_of_many_short_chunks_has_no_room_in_a_captured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)
    inputs = CudaInputs(make_seats(80), 80, 256)
    few, many = ([Row("r", seat, 0, 2, 1, True, 0, 0, ()) for seat in range(count)] for count in (30, 40))
    assert inputs.fits_states(Columns.of(few), 256) and not inputs.fits_states(Columns.of(many), 256)
