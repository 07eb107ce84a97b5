"""Attention of decoding rows by compiled functions against PyTorch's operators."""

import pytest
import torch

from roseinfer.attention import torch_backend
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.kernels.cpu import native
from tests.attention.test_torch_backend import LAYERS, Case
from tests.helpers.batches import make_batch

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the compiled functions are not installed")

CONTEXTS = (1, 2, 63, 64, 65, 130, 700)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def case_of(contexts: tuple[int, ...], **settings: object) -> Case:
    case = Case(6, 2, 16, 8, **settings)
    for context in contexts:
        case.add(context - 1, 1)
    return case


def attended(case: Case, layer: int = 0) -> torch.Tensor:
    attention = TorchAttention(case.specs, torch.float32)
    attention.begin(make_batch(case.rows, case.store.block_size), case.store)
    q, k, v = (case.packed(tensors, layer) for tensors in (case.queries, case.keys, case.values))
    return attention.attend(layer, q, k, v)


@pytest.mark.parametrize("windows", [(None,) * LAYERS, (50,) * LAYERS])
@pytest.mark.parametrize("skips", [False, True])
def test_results_are_those_of_pytorch(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...], skips: bool
) -> None:
    case = case_of(CONTEXTS, windows=windows, skips_first=(skips,) * LAYERS)
    case.add(20, 9)  # a chunk of a prompt after the decoding rows
    case.check(case.backend(), 1e-5)
    found = attended(case)
    monkeypatch.setattr(torch_backend, "_is_native", lambda spec: False)
    torch.testing.assert_close(found, attended(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dim", [8, 64, 256])
def test_sizes_of_heads(dim: int) -> None:
    case = Case(4, 4, dim, 16)
    for context in CONTEXTS:
        case.add(context - 1, 1)
    case.check(case.backend(), 1e-5)


def test_a_row_depends_neither_on_other_rows_nor_on_threads() -> None:
    case = case_of(CONTEXTS)
    together, threads = attended(case), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(attended(case), together)
    finally:
        torch.set_num_threads(threads)
    for rows in (case.rows, case.queries, case.keys, case.values):
        del rows[1:]
    assert torch.equal(attended(case), together[:1])


def test_a_row_without_numbers_spoils_no_other() -> None:
    case = case_of(CONTEXTS)
    before = attended(case)
    case.queries[3][:] = torch.nan
    found = attended(case)
    assert found[3].isnan().all()
    others = [row for row in range(len(CONTEXTS)) if row != 3]
    assert torch.equal(found[others], before[others])
