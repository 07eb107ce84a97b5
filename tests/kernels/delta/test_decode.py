"""One launch for a token of each of several sequences, compared with the serial rule over their whole history."""

import pytest
import torch

from roseinfer.state.batch import RowSnapshot
from roseinfer.state.delta_spec import DeltaSpec
from roseinfer.state.triton_delta import TritonDelta
from tests.helpers.cases import cases, each_value
from tests.helpers.delta import DeltaRunner, check_drafts

pytestmark = pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's exponentials
DTYPES = [torch.float32, torch.bfloat16]


def check(output: torch.Tensor, expected: torch.Tensor) -> None:
    """In 16 bits a few outputs that nearly vanish are far off, as the norm enlarges them."""
    if output.dtype is torch.float32:
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-4)
    else:
        assert (output.float() - expected).norm() < 0.02 * expected.norm()


def make_spec(group: int, dim: int = 16, key_heads: int = 2, taps: int = 4) -> DeltaSpec:
    return DeltaSpec(key_heads=key_heads, value_heads=group * key_heads, key_dim=dim, value_dim=dim, taps=taps)


@each_value(group=[1, 2, 3], dtype=DTYPES)
def test_token_by_token(group, dtype, device):
    runner = DeltaRunner(TritonDelta, make_spec(group), dtype, device)
    sequences = [runner.sequence(length) for length in (6, 4)]
    for start in range(6):
        active = [i for i in (1, 0) if start < len(sequences[i][1])]
        outputs = runner.run([(sequences[i][0], 3 * i + 1, start, 1) for i in active])
        for i, output in zip(active, outputs, strict=True):
            check(output, sequences[i][1][start : start + 1])


@pytest.mark.parametrize(("dim", "taps"), [(128, 4), (32, 2)])
def test_other_shapes(dim, taps, device):
    runner = DeltaRunner(TritonDelta, make_spec(2, dim, 1, taps), torch.float32, device)
    sequence, expected = runner.sequence(5)
    output = torch.cat([runner.run([(sequence, 2, start, 1)])[0] for start in range(5)])
    check(output, expected)


@cases("start", [0, 5], exhaustive=[1, 2])
def test_snapshots(start, device):
    runner = DeltaRunner(TritonDelta, make_spec(3), torch.float32, device)
    sequence, expected = runner.sequence(10)
    for position in range(start):
        runner.run([(sequence, 0, position, 1)])
    runner.run([(sequence, 0, start, 1)], [RowSnapshot(0, 1, 6)])
    for slot in (6, 0):
        for position in range(start + 1, start + 4):
            output = runner.run([(sequence, slot, position, 1)])[0]
            check(output, expected[position : position + 1])


@cases(("most", "group", "dtype"), [(3, 2, DTYPES[1])], exhaustive=[(1, 1, DTYPES[0]), (5, 2, DTYPES[0])])
def test_right_drafts_are_replayed_and_wrong_ones_forgotten(most, group, dtype, device):
    torch.manual_seed(most)
    runner = DeltaRunner(TritonDelta, make_spec(group, key_heads=1), dtype, device, row_drafts=most)
    check_drafts(runner, most, check, seed=most, length=2 * most + 12)


def test_rows_without_tokens_change_nothing(device):
    runner = DeltaRunner(TritonDelta, make_spec(1), torch.float32, device)
    sequence, expected = runner.sequence(1)
    output = runner.run([(sequence, 0, 0, 0), (sequence, 1, 0, 1), (sequence, 0, 0, 0)])[1]
    check(output, expected)
    assert runner.store.part(1, "memory")[0].isnan().all() and runner.store.part(0, "memory").isnan().all()
