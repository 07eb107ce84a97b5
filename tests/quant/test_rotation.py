import pytest
import torch

from roseinfer.quant.int8_weight import Int8Weight
from roseinfer.quant.rotation import Rotation


@pytest.mark.parametrize("without", ["", "fbgemm_pack_gemm_matrix_fp16"])
@pytest.mark.parametrize("width", [1, 6, 64, 96, 576, 1536])
def test_rotation_does_not_change_products(width: int, without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.delattr(torch, without)
    torch.manual_seed(0)
    x, weight = torch.randn(5, width), torch.randn(7, width)
    rotation = Rotation(width)
    torch.testing.assert_close(rotation(x) @ rotation.of_weight(weight).T, x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("width", "spread"), [(1, 1), (6, 2), (64, 64), (96, 32), (576, 64), (1536, 128)])
def test_one_large_number_is_spread_over_its_block(width: int, spread: int) -> None:
    x = torch.zeros(2, width)
    x[1, -1] = 8.0
    found = Rotation(width)(x)
    assert not found[0].any()
    assert torch.equal(found[1].abs()[-spread:], torch.full((spread,), 8.0))
    assert not found[1, : width - spread].any()


def test_large_numbers_leave_codes_for_the_others() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 576)
    x[:, 100] *= 100
    rotation = Rotation(576)
    back = rotation.of_weight(Int8Weight.of(rotation(x)).widen(torch.float32))
    assert (back - x).norm() < 0.3 * (Int8Weight.of(x).widen(torch.float32) - x).norm()


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    x, rotation = torch.randn(200, 768), Rotation(768)
    together = rotation(x)
    for first, last in ((0, 1), (7, 8), (3, 11), (60, 93), (199, 200)):
        torch.testing.assert_close(rotation(x[first:last]), together[first:last], rtol=1e-6, atol=1e-5)
