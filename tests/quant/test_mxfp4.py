"""MXFP4: exact numbers for every byte and scale, rounding, and what checkpoints may hold."""

import gguf
import numpy as np
import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from roseinfer.kernels.common.mxfp4_codes import reordered, round_mxfp4, widen_mxfp4
from tests.helpers.mxfp4_files import packed, unpacked


def every_byte_and_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks [255, 16, 16] and scales [255, 16]: 16 blocks with all bytes for each scale but that of NaN."""
    stored = torch.arange(256, dtype=torch.uint8).view(16, 16).expand(255, 16, 16)
    return stored, torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_with_every_scale_is_exact(dtype: torch.dtype) -> None:
    stored, scales = every_byte_and_scale()
    found = widen_mxfp4(reordered(stored).flatten(-2), scales, dtype)
    expected = torch.from_numpy(unpacked(stored.numpy(), scales.numpy())).to(dtype)
    assert torch.equal(found, expected)
    theirs = convert_moe_packed_tensors(stored[None].clone(), scales[None].clone(), dtype=dtype)
    assert torch.equal(found, theirs[0].T)


def test_a_scale_of_255_is_nan() -> None:
    scales = torch.tensor([255, 254], dtype=torch.uint8)
    found = widen_mxfp4(torch.full((32,), 0x21, dtype=torch.uint8), scales, torch.float32)
    assert found[:32].isnan().all() and found[32:].isfinite().all()


def test_codes_of_gguf_in_the_order_of_checkpoints() -> None:
    raw = np.random.default_rng(0).integers(0, 256, (64, 17), dtype=np.uint8)
    raw[:, 0] = np.random.default_rng(1).integers(100, 150, 64)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.MXFP4)
    codes = np.concatenate((raw[:, 1:] & 15, raw[:, 1:] >> 4), 1)
    stored = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
    found = widen_mxfp4(reordered(stored), torch.from_numpy(raw[:, :1].copy()), torch.float32)
    assert torch.equal(found, torch.from_numpy(expected))


def test_rounding_takes_the_nearest_number_of_the_block() -> None:
    weights = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    weights[0] *= 1e-30
    weights[1] *= 1e20
    weights[2, :32] = 0
    blocks, scales = packed(weights.numpy())
    found = widen_mxfp4(*round_mxfp4(weights), torch.float32)
    assert torch.equal(found, torch.from_numpy(unpacked(blocks, scales)))


def test_numbers_that_mxfp4_holds_are_rounded_to_themselves() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(8, 1)
    scales = torch.arange(3, 131, dtype=torch.uint8)[:, None]
    numbers = widen_mxfp4(codes, scales, torch.float32)
    assert torch.equal(widen_mxfp4(*round_mxfp4(numbers), torch.float32), numbers)
