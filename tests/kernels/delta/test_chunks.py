"""Kernels of rows of several tokens, compared with the serial rule over whole sequences."""

import pytest
import torch

from roseinfer.kernels.delta import tables
from roseinfer.kernels.delta.decode import MAX_ROW_PROGRAMS
from roseinfer.kernels.delta.windows import MAX_WINDOW_PROGRAMS
from roseinfer.state import batch
from roseinfer.state.batch import RowSnapshot
from roseinfer.state.triton_delta import TritonDelta
from tests.helpers.cases import cases, each_value
from tests.helpers.delta import DeltaRunner, expected_output
from tests.kernels.delta.test_decode import DTYPES, check, make_spec

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exponentials

MULTIPROCESSORS = 132  # of an H200


def make_runner(group, device, dtype=torch.float32, dim=16):
    return DeltaRunner(TritonDelta, make_spec(group, dim, 1), dtype, device)


def test_kernels_read_the_tables_that_are_laid_out():
    names = ["SLOT", "START", "FIRST", "COUNT", "SNAPSHOT", "PIECES_FROM", "PIECES_TO", "REPLAYED", "DRAFTS"]
    names += ["SNAPSHOT_AFTER", "PIECED", "NUM_PIECED", "PIECE_FIELD_COUNT"]
    assert {name: getattr(tables, name).value for name in names} == {name: getattr(batch, name) for name in names}
    assert tables.PIECE_TOKENS == batch.MAX_PIECE_TOKENS


@cases("tokens", [2, 3, 5, 17, 64, 65, 200], exhaustive=range(2, 201))
def test_whole_sequence(tokens, device):
    runner = make_runner(2, device)
    sequence, expected = runner.sequence(tokens)
    check(runner.run([(sequence, 3, 0, tokens)])[0], expected)


@each_value(group=[1, 2, 3], dtype=DTYPES, dim=[16, 32])
def test_shapes(group, dtype, dim, device):
    runner = make_runner(group, device, dtype, dim)
    sequence, expected = runner.sequence(90)
    head = runner.run([(sequence, 3, 0, 21)])[0]
    check(torch.cat((head, runner.run([(sequence, 3, 21, 69)])[0])), expected)


@each_value(dim=[64, 128], dtype=DTYPES)
def test_wide_heads(dim, dtype, device):
    """Heads as models have them, whose products on a GPU are of other kinds."""
    runner = make_runner(3, device, dtype, dim)
    sequence, expected = runner.sequence(75)
    head = runner.run([(sequence, 3, 0, 67)])[0]
    check(torch.cat((head, runner.run([(sequence, 3, 67, 8)])[0])), expected)


@each_value(dim=[64, 128], group=[2, 3])
def test_wide_heads_beside_others(dim, group, device):
    """A row's short pieces end among the tokens of others, or of none, whose workspace holds NaN."""
    runner = make_runner(group, device, torch.bfloat16, dim)
    sequences = [runner.sequence(150) for _ in range(3)]
    a, b, c = (sequence for sequence, _ in sequences)
    steps = [
        ([(a, 0, 0, 1), (b, 5, 0, 101), (c, 2, 0, 2)], [RowSnapshot(1, 29, 7)]),
        ([(a, 0, 1, 1), (b, 5, 101, 1), (c, 2, 2, 66)], []),
        ([(b, 7, 29, 121), (c, 2, 68, 64)], []),
    ]
    expected = {id(sequence): output for sequence, output in sequences}
    for rows, snapshots in steps:
        unwritten = torch.full((2**20,), float("nan"), device=device)
        del unwritten  # a GPU's allocator hands it out again
        for (sequence, _, start, count), output in zip(rows, runner.run(rows, snapshots), strict=True):
            check(output, expected[id(sequence)][start : start + count])


@cases("cut", [1, 2, 3, 4, 66], exhaustive=range(5, 99))
def test_every_split(cut, device):
    runner = make_runner(3, device)
    sequence, expected = runner.sequence(100)
    head = runner.run([(sequence, 1, 0, cut)])[0]
    check(torch.cat((head, runner.run([(sequence, 1, cut, 100 - cut)])[0])), expected)


def test_chunks_of_5(device):
    runner = make_runner(2, device)
    sequence, expected = runner.sequence(20)
    check(torch.cat([runner.run([(sequence, 1, start, 5)])[0] for start in range(0, 20, 5)]), expected)


def test_decodes_and_chunks_in_one_step(device):
    runner = make_runner(2, device)
    sequences = [runner.sequence(80) for _ in range(3)]
    a, b, c = (sequence for sequence, _ in sequences)
    steps = [
        [(a, 0, 0, 1), (b, 5, 0, 70), (c, 2, 0, 2)],
        [(a, 0, 1, 1), (b, 5, 70, 1), (c, 2, 2, 3)],
        [(b, 5, 71, 1), (c, 2, 5, 1), (a, 0, 2, 78)],
        [(b, 5, 72, 8), (c, 2, 6, 74)],
    ]
    expected = {id(sequence): output for sequence, output in sequences}
    for rows in steps:
        for (sequence, _, start, count), output in zip(rows, runner.run(rows), strict=True):
            check(output, expected[id(sequence)][start : start + count])


@pytest.mark.parametrize("dim", [64, 128])
def test_several_rows_a_program(dim, device):
    """On a GPU a program of the scan computes several of these rows, whose numbers of pieces are odd and even."""
    count = 2 * MULTIPROCESSORS // 3 if device.type == "cuda" else MAX_WINDOW_PROGRAMS + 2
    lengths = [2 + 9 * row % 70 for row in range(count)]
    runner = DeltaRunner(TritonDelta, make_spec(3, dim, 1), torch.bfloat16, device, slots=count)
    sequences = [runner.sequence(length + 2) for length in lengths]
    for starts, counts in (([0] * count, lengths), (lengths, [2] * count)):
        rows = [(sequences[slot][0], slot, starts[slot], tokens) for slot, tokens in enumerate(counts)]
        for (_, slot, start, tokens), output in zip(rows, runner.run(rows), strict=True):
            check(output, sequences[slot][1][start : start + tokens])


def test_more_rows_than_programs(device):
    spec = make_spec(1, key_heads=1)
    rows = MAX_ROW_PROGRAMS + 6
    runner = DeltaRunner(TritonDelta, spec, torch.float32, device, slots=rows)
    sequences = [runner.sequence(5) for _ in range(rows)]
    starts = [0] * rows
    for counts in ([1] * (rows - 1) + [2], [1] * (rows - 5) + [2, 1, 3, 1, 1]):
        step = [(sequences[slot][0], slot, starts[slot], count) for slot, count in enumerate(counts)]
        for (_, slot, start, count), output in zip(step, runner.run(step), strict=True):
            check(output, sequences[slot][1][start : start + count])
        starts = [start + count for start, count in zip(starts, counts, strict=True)]


@cases("offset", [2, 64], exhaustive=[1, *range(3, 64), *range(65, 73)])
def test_snapshots(offset, device):
    """A snapshot at any offset, and another one in the same row."""
    runner = make_runner(2, device)
    sequence, expected = runner.sequence(85)
    runner.run([(sequence, 0, 0, 2)])
    other = 40 if offset != 40 else 41
    check(runner.run([(sequence, 0, 2, 72)], [RowSnapshot(0, offset, 7), RowSnapshot(0, other, 6)])[0], expected[2:74])
    for slot, start in ((7, 2 + offset), (6, 2 + other), (0, 74)):
        check(runner.run([(sequence, slot, start, 1)])[0], expected[start : start + 1])
        check(runner.run([(sequence, slot, start + 1, 9)])[0], expected[start + 1 : start + 10])


def test_equal_keys_without_decay(device):
    """The hardest system to solve: nothing is forgotten, and all keys are equal."""
    runner = make_runner(1, device)
    runner.weights.decay.zero_()
    sequence, _ = runner.sequence(64)
    sequence.mixed.copy_(sequence.mixed[:1].expand_as(sequence.mixed))
    sequence.gates.fill_(8.0)
    output = runner.run([(sequence, 0, 0, 64)])[0]
    again = torch.cat([runner.run([(sequence, 1, start, 1)])[0] for start in range(64)])
    torch.testing.assert_close(output, again, atol=1e-4, rtol=1e-3)


def test_strong_decay_does_not_overflow(device):
    runner = make_runner(1, device)
    runner.weights.decay.fill_(-30.0)
    sequence, _ = runner.sequence(70)
    expected = expected_output(runner.spec, runner.weights, sequence)
    check(runner.run([(sequence, 0, 0, 70)])[0], expected)
