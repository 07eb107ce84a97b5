"""The mask kernel against the table that a CPU uses."""

from array import array

import pytest
import torch

from roseinfer.core.plan import TokenMasks
from roseinfer.kernels.sampling.mask import CHUNK_TOKENS, mask_logits
from roseinfer.runner.masks import HostMasks, MaskTable


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 77, CHUNK_TOKENS, CHUNK_TOKENS + 33])
def test_equals_the_table_in_any_dtype_and_layout(vocab_size, dtype, device):
    generator = torch.Generator().manual_seed(vocab_size)
    wide = torch.randn(5, vocab_size + 3, generator=generator).to(dtype)
    wide[3, : vocab_size // 2] = torch.nan
    wide[1, 0] = torch.inf
    rows, line = (4, 1, 3), TokenMasks.words_per_row(vocab_size)
    bits = torch.randint(-(2**31), 2**31, (len(rows), line), generator=generator, dtype=torch.int64).to(torch.int32)
    expected = wide.clone()
    masks = TokenMasks(rows, memoryview(array("I", bits.numpy().tobytes())))
    placed = HostMasks(vocab_size, torch.device("cpu")).place(masks, [0, 1, 2, 3, 4])
    MaskTable(torch.device("cpu")).apply(expected[:, :vocab_size], placed)
    on_device = wide.to(device)
    index = torch.tensor(rows, dtype=torch.int32, device=device)
    mask_logits(on_device[:, :vocab_size], index, bits.to(device))
    assert torch.equal(on_device.cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert expected.isneginf().any() or vocab_size == 1


def test_no_rows(device):
    logits = torch.zeros(2, 9, device=device)
    mask_logits(
        logits, torch.empty(0, dtype=torch.int32, device=device), torch.empty(0, 1, dtype=torch.int32, device=device)
    )
    assert not logits.any()
