"""The canonical form of weights in four bits: its values, parts, and rounding."""

import pytest
import torch

from roseinfer.quant.int4_weight import Int4Weight


def test_widens_codes_by_scales_and_offsets():
    codes = torch.tensor([[0x10, 0x32] + [0] * 30, [0xF8, 0x08] + [0x88] * 30], dtype=torch.uint8)
    scales = torch.tensor([[0.5, 1.0], [2.0, 4.0]], dtype=torch.float16)
    offsets = torch.tensor([[1.0, 3.0], [0.25, 0.0]], dtype=torch.float16)
    wide = Int4Weight(codes, scales, offsets).widen(torch.float32)
    assert wide[0, :4].tolist() == [-1.0, -0.5, 0.0, 0.5] and wide[0, 32] == -3.0
    assert wide[1, :4].tolist() == [15.75, 29.75, 15.75, -0.25] and wide[1, 63] == 32.0
    symmetric = Int4Weight(codes, scales, None).widen(torch.float32)
    assert symmetric[1, :4].tolist() == [0.0, 14.0, 0.0, -16.0] and symmetric[1, 63] == 0.0


@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_rounding_is_within_half_a_step(group):
    weight = torch.randn(6, 384, generator=torch.Generator().manual_seed(group))
    rounded = Int4Weight.of(weight, group)
    assert (rounded.shape, rounded.group) == ((6, 384), group)
    steps = rounded.scales.float().repeat_interleave(group, 1)
    assert ((rounded.widen(torch.float32) - weight).abs() <= 0.51 * steps).all()
    relative = (rounded.widen(torch.float32) - weight).norm() / weight.norm()
    assert relative < (0.09 if group == 32 else 0.105 if group <= 128 else 0.13)


def test_rounds_groups_of_one_number_and_of_zeros_exactly():
    weight = torch.cat((torch.full((2, 32), 0.75), torch.zeros(2, 32), torch.full((2, 32), -3.0)), 1)
    assert torch.equal(Int4Weight.of(weight, 32).widen(torch.float32), weight)


def test_parts_are_views_in_which_rows_are_rounded_alike():
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    whole = Int4Weight.empty(5, 128, 32)
    for rows in (slice(0, 2), slice(2, 5)):
        whole.part(rows).round(weight[rows])
    expected = Int4Weight.of(weight, 32)
    assert torch.equal(whole.codes, expected.codes)
    assert torch.equal(whole.widen(torch.bfloat16), expected.widen(torch.bfloat16))
