from functools import partial

import pytest
import torch

from roseinfer.quant.fp8_weight import TRIED_SCALE_COUNT, Fp8Weight
from roseinfer.quant.int8_weight import Int8Weight


def test_rounding_a_weight_errs_by_a_seventeenth_of_an_element_at_most():
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    found = Fp8Weight.of(weight)
    wide = found.widen(torch.float32)
    # Normal codes have 3 bits after the point: half of the last bit, relative to the smallest mantissa.
    assert ((wide - weight).abs() <= torch.maximum(weight.abs() / 17, found.scales[:, None] * 2**-10)).all()
    assert not found.is_block
    torch.testing.assert_close(wide.abs().amax(1), weight.abs().amax(1))


def test_a_row_of_zeros_stays_one():
    found = Fp8Weight.of(torch.zeros(2, 16))
    assert torch.equal(found.widen(torch.float32), torch.zeros(2, 16))


@pytest.mark.parametrize("rounded", [Fp8Weight.of, partial(Fp8Weight.of, block=True), Fp8Weight.nearest, Int8Weight.of])
def test_a_row_too_small_for_a_scale_becomes_zeros(rounded):
    """A 448th part of 1e-44 is zero, which must not be divided by."""
    weight = torch.zeros(2, 16)
    weight[:, 1] = 1e-44
    found = rounded(weight)
    assert (found.scales > 0).all()
    assert torch.equal(found.widen(torch.float32), torch.zeros(2, 16))


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_a_block_shares_a_scale(shape):
    rows, columns = shape
    codes = torch.ones(shape).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 1 + -(-rows // 128) * -(-columns // 128)).view(-(-rows // 128), -(-columns // 128))
    wide = Fp8Weight(codes, scales).widen(torch.float32)
    for row, column in ((0, 0), (127, 127), (128, 0), (rows - 1, columns - 1)):
        assert wide[row, column] == scales[row // 128, column // 128]


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (1, 1)])
def test_rounded_by_block(shape):
    """Every block is rounded like a matrix of its own, whose rows share the largest magnitude."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 1 + shape[1])
    kept = weight.clone()
    found = Fp8Weight.of(weight, block=True)
    assert torch.equal(weight, kept) and found.is_block
    wide = found.widen(torch.float32)
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            part = slice(row, row + 128), slice(column, column + 128)
            expected = Fp8Weight.of(weight[part].reshape(1, -1)).widen(torch.float32)
            torch.testing.assert_close(wide[part].reshape(1, -1), expected)


def test_the_best_of_the_scales_is_chosen(monkeypatch):
    weight = torch.randn(9, 384, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 10)[:, None]
    weight[4] = 0
    kept = weight.clone()
    found = Fp8Weight.nearest(weight)
    assert torch.equal(weight, kept)

    def costs(rounded):
        return ((rounded - weight) * weight).square().sum(1)

    tried = []
    for step in range(TRIED_SCALE_COUNT):
        scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / 448 * (1 + step / TRIED_SCALE_COUNT)
        tried.append(costs((weight / scales).to(torch.float8_e4m3fn).float() * scales))
    least = torch.stack(tried).amin(0)
    torch.testing.assert_close(costs(found.widen(torch.float32)), least, rtol=1e-3, atol=0)
    assert least.sum() < 0.9 * tried[0].sum()
    assert torch.equal(found.widen(torch.float32)[4], weight[4])
    monkeypatch.setattr("roseinfer.quant.fp8_weight.PART_ELEMENTS", {False: 2 * 384})
    again = Fp8Weight.nearest(weight)
    assert torch.equal(again.scales, found.scales) and torch.equal(again.codes.float(), found.codes.float())


def test_the_best_of_the_scales_in_16_bits():
    weight = torch.randn(4, 64).bfloat16()
    wide, narrow = Fp8Weight.nearest(weight.float()), Fp8Weight.nearest(weight)
    assert torch.equal(wide.scales, narrow.scales) and torch.equal(wide.codes.float(), narrow.codes.float())
