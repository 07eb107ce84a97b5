"""Gated DeltaNet in PyTorch: sequences in steps of every form compared with the serial rule."""

import random

import pytest
import torch

from roseinfer.core.errors import ConfigError
from roseinfer.state.batch import RowSnapshot
from roseinfer.state.delta_spec import DeltaSpec
from roseinfer.state.gated_delta import TorchDelta
from tests.helpers.delta import DeltaRunner, check_drafts

CPU = torch.device("cpu")
SPEC = DeltaSpec(key_heads=2, value_heads=6, key_dim=8, value_dim=12, taps=4)


def make_runner(spec: DeltaSpec = SPEC, dtype: torch.dtype = torch.float32, row_drafts: int = 0) -> DeltaRunner:
    torch.manual_seed(0)
    return DeltaRunner(TorchDelta, spec, dtype, CPU, row_drafts=row_drafts)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 63, 64, 65, 150])
def test_whole_sequence(tokens):
    runner = make_runner()
    sequence, expected = runner.sequence(tokens)
    check(runner.run([(sequence, 3, 0, tokens)])[0], expected)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("counts", [[1] * 9, [5] * 4, [2, 1, 3, 1, 70, 1, 1, 4], [1, 64, 64, 2]])
def test_chunks_of_every_length(counts, taps):
    runner = make_runner(DeltaSpec(key_heads=2, value_heads=4, key_dim=8, value_dim=8, taps=taps))
    sequence, expected = runner.sequence(sum(counts))
    start = 0
    for count in counts:
        check(runner.run([(sequence, 5, start, count)])[0], expected[start : start + count])
        start += count


def test_decodes_and_chunks_in_one_step():
    runner = make_runner()
    draw = random.Random(0)
    lengths = (30, 12, 80, 7)
    pairs = [runner.sequence(length) for length in lengths]
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        active = [i for i, length in enumerate(lengths) if done[i] < length]
        counts = {i: min(draw.choice((1, 1, 2, 5, 20)), lengths[i] - done[i]) for i in active}
        order = sorted(active, key=lambda i: counts[i] > 1)
        outputs = runner.run([(pairs[i][0], 2 * i, done[i], counts[i]) for i in order])
        for i, output in zip(order, outputs, strict=True):
            check(output, pairs[i][1][done[i] : done[i] + counts[i]])
            done[i] += counts[i]


def test_snapshots_continue_like_the_sequence_itself():
    """Several in one row, at each offset: within the window, at a chunk's end, after the last token."""
    runner = make_runner()
    sequence, expected = runner.sequence(100)
    runner.run([(sequence, 0, 0, 7)])
    offsets = {1: 1, 2: 2, 64: 3, 70: 4, 73: 5}
    runner.run([(sequence, 0, 7, 73)], [RowSnapshot(0, tokens, slot) for tokens, slot in offsets.items()])
    for tokens, slot in offsets.items():
        start = 7 + tokens
        check(runner.run([(sequence, slot, start, 1)])[0], expected[start : start + 1])
        check(runner.run([(sequence, slot, start + 1, 9)])[0], expected[start + 1 : start + 10])
    check(runner.run([(sequence, 0, 80, 20)])[0], expected[80:])


def test_snapshots_of_rows_of_one_token():
    runner = make_runner()
    sequence, expected = runner.sequence(10)
    runner.run([(sequence, 0, 0, 1)], [RowSnapshot(0, 1, 1)])
    runner.run([(sequence, 0, 1, 1)], [RowSnapshot(0, 1, 2)])
    check(runner.run([(sequence, 1, 1, 5)])[0], expected[1:6])
    check(runner.run([(sequence, 2, 2, 1)])[0], expected[2:3])
    check(runner.run([(sequence, 0, 2, 8)])[0], expected[2:])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [1, 3, 8])
def test_right_drafts_are_replayed_and_wrong_ones_forgotten(most, seed):
    check_drafts(make_runner(row_drafts=most), most, check, seed)


def test_rows_without_tokens_change_nothing():
    runner = make_runner()
    sequence, expected = runner.sequence(6)
    outputs = runner.run([(sequence, 1, 0, 1), (sequence, 0, 0, 0), (sequence, 2, 0, 5)])
    check(outputs[0], expected[:1])
    check(outputs[2], expected[:5])
    assert runner.store.part(1, "memory")[0].isnan().all() and runner.store.part(0, "memory").isnan().all()


def test_16_bits_round_only():
    runner = make_runner(dtype=torch.bfloat16)
    sequence, expected = runner.sequence(40)
    output = torch.cat([runner.run([(sequence, 1, start, 5)])[0] for start in range(0, 40, 5)])
    assert output.dtype is torch.bfloat16
    torch.testing.assert_close(output.float(), expected, atol=2e-2, rtol=2e-2)


def test_ranks_share_the_heads():
    held = SPEC.held(2)
    assert (held.key_heads, held.value_heads, held.group, held.channels) == (1, 3, 3, 16 + 36)
    assert 2 * held.state("bfloat16").bytes_per_slot == SPEC.state("bfloat16").bytes_per_slot
    with pytest.raises(ConfigError, match="2 heads of linear attention"):
        SPEC.held(4)
