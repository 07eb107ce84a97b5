"""K and V in FP8 on their way into the store and out of it, in plain PyTorch."""

from itertools import accumulate

import pytest
import torch

from roseinfer.attention.kv_fp8 import CodeWidener, kv_dtype_of, narrow
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE
from tests.helpers.attention import spec_of, store_of
from tests.helpers.batches import Blocks, HandRow, make_batch

CPU = torch.device("cpu")
ALL_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(CODES)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [6, 7])
def test_every_code_is_widened_exactly(dtype: torch.dtype, columns: int) -> None:
    codes = ALL_CODES.repeat(columns * 3).view(-1, columns)
    wide = CodeWidener(dtype, CPU)(codes, torch.empty(codes.shape, dtype=dtype))
    assert torch.equal(wide.nan_to_num(1e4), codes.to(dtype).nan_to_num(1e4))
    assert torch.equal(narrow(wide[:, None], None).float().nan_to_num(0)[:, 0], codes.float().nan_to_num(0))


def test_large_numbers_become_the_largest_code_and_nan_stays_nan() -> None:
    inf = float("inf")
    k = torch.tensor([[[1e30, -inf]], [[inf, float("nan")]]])
    assert narrow(k, None).float().nan_to_num(0).flatten().tolist() == [MAX_CODE, -MAX_CODE, MAX_CODE, 0]
    scaled = narrow(torch.tensor([[[7.0], [7.0]]]), torch.tensor([0.5, 7 / 448])).float()
    assert scaled.flatten().tolist() == [14, MAX_CODE]


def test_dtype_of_k_and_v() -> None:
    assert kv_dtype_of("auto", torch.bfloat16) is torch.bfloat16
    assert kv_dtype_of("fp8", torch.bfloat16) is CODES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("windows", [(None, None), (20, None)])
def test_attention_is_that_over_the_numbers_which_codes_stand_for(dtype: torch.dtype, scaled: bool, windows) -> None:
    """Decodes, whole prompts and chunks; tokens of earlier steps, and the step's own."""
    specs = [spec_of(6, 2, 16, window=window) for window in windows]
    scales = KVScales(*(0.1 + torch.rand(2, 2))) if scaled else None
    ours, theirs = (store_of(64, 2, 16, 2, 16, kept, CPU) for kept in (CODES, dtype))
    assert ours.data.nbytes * dtype.itemsize == theirs.data.nbytes
    for store in (ours, theirs):
        store.data.fill_(float("nan"))
    ours_by, theirs_by = (TorchAttention(specs, dtype) for _ in range(2))
    blocks = Blocks(64, 16)
    tables = [blocks.table(100) for _ in range(4)]
    for lengths in (
        [(0, 3), (0, 40), (0, 40)],
        [(3, 1), (40, 1), (40, 20), (0, 9)],
        [(4, 1), (41, 5), (60, 1), (9, 33)],
    ):
        rows = [
            HandRow(tokens=[0] * (start + count), table=table, start=start, count=count)
            for (start, count), table in zip(lengths, tables, strict=False)
        ]
        batch = make_batch(sorted(rows, key=lambda row: row.count > 1), 16)
        ours_by.begin(batch, ours)
        theirs_by.begin(batch, theirs)
        tokens = list(accumulate(batch.query_lens))[-1]
        for layer in range(2):
            q, k, v = (torch.randn(tokens, heads, 16).to(dtype) for heads in (6, 2, 2))
            found = ours_by.attend(layer, q, k, v, scales)
            stood_for = (
                (narrow(x, scale).float() * (1 if scale is None else scale[:, None]))
                for x, scale in zip((k, v), scales or (None, None), strict=True)
            )
            expected = theirs_by.attend(layer, q, *(x.to(dtype) for x in stood_for))
            assert found.dtype is dtype and found.shape == q.shape
            tolerance = 1e-5 if dtype is torch.float32 else 0.03
            torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_a_store_of_codes_is_copied() -> None:
    store = KVStore(6, 4, [spec_of(2, 2, 8)] * 2, CODES, CPU)
    store.data.view(torch.uint8).copy_(torch.randint(256, store.data.shape))
    before = store.data.float().nan_to_num(1e4)
    assert (before == 1e4).any()
    store.copy_blocks(torch.tensor([0, 1]), torch.tensor([3, 4]), 3)
    copied = before.clone()
    copied[[3, 4], :, :, :3] = before[[0, 1], :, :, :3]
    assert torch.equal(store.data.float().nan_to_num(1e4), copied)
