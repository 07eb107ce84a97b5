"""Inputs of captured steps, computed on the CPU: in any mixture of rows, every token gets its row's values."""

import random
from itertools import chain

import numpy as np
import pytest
import torch

from roseinfer.core.plan import Admission, GroupChanges, Row, TableChange
from roseinfer.core.sampling import SequenceParams
from roseinfer.kernels.common.inputs import expand_rows_reference
from roseinfer.runner import cuda_inputs
from roseinfer.runner.cuda_inputs import CudaInputs
from roseinfer.runner.device import ALIGN_COUNT
from roseinfer.runner.forward import Columns
from roseinfer.runner.seats import SeatTable

# As many rows as a layout is aligned to, so that a full step has no column left by chance.
ROWS, TOKENS, BLOCK, LENGTH, CHUNKS = ALIGN_COUNT, 96, 4, 96, 6
SPARE_BLOCK = 999


class HostStaging:
    """`Staging` without a GPU, filled with garbage."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=torch.int32)
        self._rng = np.random.default_rng(0)

    def fill(self) -> np.ndarray:
        self._host = self._rng.integers(-(2**31), 2**31 - 1, len(self.device), dtype=np.int32)
        return self._host

    def send(self, count: int) -> torch.Tensor:
        assert count <= len(self.device)
        self.device[:count] = torch.from_numpy(self._host[:count])
        return self.device[:count]


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> CudaInputs:
    monkeypatch.setattr(cuda_inputs, "Staging", HostStaging)
    monkeypatch.setattr(cuda_inputs, "expand_rows", expand_rows_reference)
    spare_blocks = SPARE_BLOCK, SPARE_BLOCK + 1
    seats = SeatTable(ROWS, LENGTH, BLOCK, 50, torch.device("cpu"), spare_blocks=spare_blocks, adapters=True)
    params = SequenceParams(max_tokens=1)
    blocks = LENGTH // BLOCK
    for seat in range(ROWS):
        tokens = [(seat * 7 + i) % 50 for i in range(LENGTH)]
        table = tuple(range(seat * blocks, (seat + 1) * blocks))
        slot = seat % 4 - 1
        seats.admit([Admission(f"r{seat}", seat, tokens, LENGTH, params, 0, (), table, adapter_slot=slot)])
        seats.grow_tables([], [GroupChanges((TableChange(seat, 0, tuple(reversed(table))),))])
    return CudaInputs(seats, ROWS, TOKENS, TOKENS)


def random_rows(rng: random.Random, budget: int) -> list[Row]:
    rows = []
    for seat in rng.sample(range(ROWS), rng.choice([ROWS, rng.randint(1, ROWS)])):
        if budget == 0:
            break
        count = 1 if rng.random() < 0.8 else rng.randint(1, min(budget, 20))
        start = rng.randint(0, LENGTH - count - 1)
        sample = rng.random() < 0.7
        write_from = rng.choice([start, start + count])
        drafts = tuple(rng.choices(range(50), k=rng.randint(0, count - 1))) if sample else ()
        logits = int(sample) + len(drafts)
        rows.append(Row(f"r{seat}", seat, start, count, logits, sample, write_from, 0, (), drafts))
        budget -= count
    return rows


@pytest.mark.parametrize("seed", range(40))
def test_any_step_padded_to_any_bucket(inputs: CudaInputs, seed: int) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng, rng.choice([8, 60, TOKENS]))
    columns = Columns.of(rows)
    num_tokens, decodes = sum(columns.count), columns.count.count(1)
    bucket = rng.randint(num_tokens, TOKENS)
    found = np.array([[row, 0, 0, 1] for row in range(decodes, len(rows))][:CHUNKS], np.int32).reshape(-1, 4)
    staged = inputs.stage_mixed(columns, bucket, found, CHUNKS)
    batch = inputs.mixed_batch(bucket, CHUNKS)

    ends = np.cumsum(columns.count)
    assert batch.query_start[: len(rows) + 1].tolist() == [0, *ends]
    contexts = [start + count for start, count in zip(columns.start, columns.count, strict=True)]
    assert batch.context_len[: len(rows)].tolist() == contexts
    assert batch.decode_len is not None and batch.chunk_map is not None
    assert batch.decode_len.tolist() == contexts[:decodes] + [0] * (batch.num_rows - decodes)
    assert batch.chunk_map.tolist() == found.tolist() + [[-1] * 4] * (CHUNKS - len(found))
    assert batch.table_rows[: len(rows)].tolist() == list(columns.seat)
    check_tokens(inputs, columns, batch)
    assert all(paging.slots[num_tokens:].eq(-1).all() for paging in batch.paging)
    assert batch.positions[num_tokens:].eq(0).all()
    wanted = [range(end - logits, end) for end, logits in zip(ends, columns.logits, strict=True)]
    assert staged.logits_at.tolist() == list(chain.from_iterable(wanted))
    samples = columns.samples()
    assert staged.sample_at.seats.tolist() == samples.seats and staged.sample_at.ends.tolist() == samples.ends


def check_tokens(inputs: CudaInputs, columns: Columns, batch) -> None:
    at = 0
    layout = zip(columns.seat, columns.start, columns.count, columns.write_from, columns.drafts, strict=True)
    for seat, start, count, write_from, drafts in layout:
        first_draft = start + count - len(drafts)
        for position in range(start, start + count):
            assert batch.positions[at] == position
            assert batch.input_ids[at] == inputs.seats.tokens[seat, position]
            assert position < first_draft or batch.input_ids[at] == drafts[position - first_draft]
            for group, blocks in ((0, range(LENGTH // BLOCK)), (1, range(LENGTH // BLOCK)[::-1])):
                block = seat * len(blocks) + blocks[position // BLOCK]
                slot = block * BLOCK + position % BLOCK if position >= write_from else -1
                assert batch.paging[group].slots[at] == slot
            at += 1


@pytest.mark.parametrize("seed", range(5))
def test_tokens_get_the_adapters_of_their_rows(inputs: CudaInputs, seed: int) -> None:
    columns = Columns.of(random_rows(random.Random(seed), 60))
    slots = [seat % 4 - 1 for seat, count in zip(columns.seat, columns.count, strict=True) for _ in range(count)]
    inputs.stage_mixed(columns, TOKENS, np.empty((0, 4), np.int32), CHUNKS)
    batch = inputs.mixed_batch(TOKENS, CHUNKS, adapted=True)
    assert batch.adapters is not None
    assert batch.adapters.of_tokens.tolist() == slots + [-1] * (TOKENS - len(slots))
    assert inputs.mixed_batch(TOKENS, CHUNKS).adapters is None
    eager = inputs.prepare(columns).batch.adapters
    assert inputs.adapted(columns) == any(slot >= 0 for slot in slots) == (eager is not None)
    assert eager is None or eager.of_tokens.tolist() == slots


def test_decodes_get_the_adapters_of_their_rows(inputs: CudaInputs) -> None:
    rows = [Row(f"r{seat}", seat, 10, 1, 1, True, 10, 0, ()) for seat in (3, 0, 4)]
    inputs.stage_decodes(Columns.of(rows), 5)
    batch = inputs.decode_batch(5, adapted=True)
    assert batch.adapters is not None and batch.adapters.of_tokens.tolist() == [2, -1, -1, -1, -1]
    assert inputs.decode_batch(5).adapters is None
    assert not inputs.adapted(Columns.of(rows[1:]))


@pytest.mark.parametrize("num_rows", [1, 3, ROWS])
def test_decodes_are_padded_with_rows_of_the_spare_seat(inputs: CudaInputs, num_rows: int) -> None:
    rows = [Row(f"r{seat}", seat, 10 + seat, 1, 1, True, 10 + seat, 0, ()) for seat in range(num_rows)]
    sample_at = inputs.stage_decodes(Columns.of(rows), ROWS)
    batch = inputs.decode_batch(ROWS)
    check_tokens(inputs, Columns.of(rows), batch)
    for spare, paging in enumerate(batch.paging, SPARE_BLOCK):
        assert paging.slots[num_rows:].eq(spare * BLOCK).all()
    assert batch.context_len.tolist() == [11 + seat for seat in range(num_rows)] + [1] * (ROWS - num_rows)
    assert batch.query_start.tolist() == list(range(ROWS + 1))
    assert sample_at.ends.tolist() == [11 + seat for seat in range(num_rows)]
    seats, ends = inputs.decode_samples(ROWS)
    assert seats.tolist() == [*range(num_rows), *[ROWS] * (ROWS - num_rows)]
    assert ends.tolist() == [*sample_at.ends.tolist(), *[1] * (ROWS - num_rows)]
