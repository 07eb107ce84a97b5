"""Attention over K and V in FP8, and their storage: on a GPU where there is one, else interpreted."""

from dataclasses import replace

import pytest
import torch

from roseinfer.kernels.attention import prefill_shares
from roseinfer.kernels.attention.decode_config import ELEMENTWISE, MATRIX, TOKENS, DecodeConfig, choose_decode_config
from roseinfer.kernels.attention.heads import store_heads, store_heads_reference
from roseinfer.kernels.attention.prefill import PrefillConfig
from roseinfer.kernels.attention.prefill_shares import PARTS, Division
from roseinfer.kernels.common.fp8_codes import CODES, MAX_CODE
from tests.helpers import decode, prefill
from tests.helpers.cases import cases
from tests.helpers.decode import decodes
from tests.helpers.interpreter import round_codes
from tests.helpers.paged import assert_near, paged_case
from tests.kernels.attention.test_heads import SHAPES, TOLERANCE, Case

SMALL = PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)
ROWS = [(0, 1), (3, 17), (16, 16), (200, 9)]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _exact_codes() -> None:
    round_codes()


@cases(
    ("form", "heads", "kv_heads", "head_dim", "block_size", "window", "dtype"),
    [
        (ELEMENTWISE, 2, 2, 32, 16, 17, torch.bfloat16),
        (MATRIX, 4, 2, 80, 1, 17, torch.float16),
        (MATRIX, 17, 1, 16, 32, 0, torch.float32),
        (TOKENS, 3, 3, 80, 1, 17, torch.float16),
        (TOKENS, 17, 1, 16, 32, 0, torch.float32),
    ],
    exhaustive=[
        (ELEMENTWISE, 2, 2, 64, 16, 0, torch.float16),
        (MATRIX, 8, 2, 128, 16, 0, torch.bfloat16),
        (TOKENS, 8, 2, 128, 16, 0, torch.bfloat16),
    ],
)
def test_decodes(form, heads, kv_heads, head_dim, block_size, window, dtype, device) -> None:
    contexts = (1, 15, 16, 17, 33, 64)
    case = paged_case(decodes(contexts), heads, kv_heads, head_dim, block_size, dtype, device, codes=True)
    expected = decode.reference(case, window)
    for shares in (1, 5):
        case.out.fill_(float("nan"))
        config = DecodeConfig(form, 16, 4, 2, 1, 1)
        assert_near(decode.attend(case, decode.workspace_of(case, config, shares, window=window)), expected)


@pytest.mark.filterwarnings("ignore:invalid value")  # rows that only pad a tile are not stored
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "window", "parts", "dtype"),
    [
        (8, 2, 128, 16, 0, False, torch.bfloat16),
        (4, 2, 80, 1, 7, True, torch.float16),
        (7, 1, 16, 32, 0, True, torch.float32),
    ],
)
def test_prompts(heads, kv_heads, head_dim, block_size, window, parts, dtype, device, monkeypatch) -> None:
    monkeypatch.setattr(prefill_shares, "MIN_DIVIDED_TILES", 2)
    case = paged_case(ROWS, heads, kv_heads, head_dim, block_size, dtype, device, codes=True)
    blocks = prefill.block_map(case, SMALL, division=Division(80, 80, 16) if parts else None)
    assert (blocks[:, PARTS].max() > 1) == parts
    out = prefill.attend(case, SMALL, blocks, window, len(blocks) if parts else None)
    assert_near(out, prefill.reference(case, window))


@pytest.mark.parametrize("size", [1e-6, 3e5])
def test_queries_of_any_size(size, device) -> None:
    """bfloat16 has a larger range than the float16 that codes are widened to."""
    case = paged_case([(40, 3), (0, 20)], 4, 2, 16, 16, torch.bfloat16, device, codes=True)
    case.q.mul_(size)
    case = replace(case, scale=case.scale / size)
    assert_near(prefill.attend(case, SMALL, prefill.block_map(case, SMALL)), prefill.reference(case))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:4], ids=str)
def test_keys_and_values_are_stored_as_codes(shape, dtype, device) -> None:
    """Rotated, divided by the scale of their head and rounded once."""
    case = Case(shape, 7, dtype, device, kv_dtype=CODES)
    (qkv, data), (expected_qkv, expected) = case.run(store_heads), case.run(store_heads_reference)
    torch.testing.assert_close(qkv, expected_qkv, **TOLERANCE[dtype])
    # The last bit before rounding may differ, which may lead to a neighbouring code.
    differing = data.view(torch.uint8) != expected.view(torch.uint8)
    assert differing.float().mean() < 1e-3
    torch.testing.assert_close(data.float(), expected.float(), rtol=0.14, atol=2**-9)


def test_large_numbers_become_the_largest_code(device) -> None:
    case = Case((2, 1, 64, False, False), 5, torch.float32, device, kv_dtype=CODES)
    case.slots = torch.arange(5).to(device)
    case.qkv[:, 2 * 64 :] = torch.tensor([[1e30], [-1e30], [float("inf")], [465.0], [float("nan")]], device=device)
    case.kv_scales = tuple(torch.ones(1, device=device) for _ in range(2))
    _, data = case.run(store_heads)
    for kept in data[0, 1].float():
        assert kept[:4].amin((1, 2)).tolist() == kept[:4].amax((1, 2)).tolist()
        assert kept[:4, 0, 0].tolist() == [MAX_CODE, -MAX_CODE, MAX_CODE, MAX_CODE]
        assert kept[4].isnan().all()


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (1, 128), (4, 128), (8, 256)])
def test_chosen_configs_with_long_ragged_contexts(group, head_dim, dtype, device) -> None:
    rows = decodes((1, 700, 2048, 64, 333))
    case = paged_case(rows, 2 * group, 2, head_dim, 16, dtype, device, codes=True)
    config = choose_decode_config(group, head_dim, dtype, fp8=True)
    assert_near(decode.attend(case, decode.workspace_of(case, config, 40)), decode.reference(case))
