import pytest
import torch

from roseinfer.kernels.common.fp8_codes import SCALE_BLOCK
from roseinfer.kernels.linear.fp8_rows import (
    Fp8Rows,
    activated_rows,
    gated_rows,
    gated_rows_reference,
    normed_rows,
    normed_rows_reference,
    plain_rows,
    rows_reference,
)
from tests.helpers.cases import cases
from tests.helpers.interpreter import clamp_numbers_only, round_codes

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow"),  # the interpreter's exponentials
    pytest.mark.filterwarnings("ignore:All-NaN"),  # and its maxima
]


@pytest.fixture(params=[False, True], ids=["a scale a row", "a scale a group"])
def grouped(request):
    round_codes()
    return request.param


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def dtype(request):
    return request.param


def rows_apart(rows, width, dtype, device):
    """Return [rows, width] of a wider tensor, whose other columns are NaN. Rows and columns differ in size."""
    wide = torch.full((rows, width + 16), torch.nan, dtype=dtype, device=device)
    wide[:, :width] = (
        torch.randn(rows, width, device=device) * 10.0 ** torch.arange(-1, rows - 1, device=device)[:, None]
    )
    wide[:, : width // 2] *= 16
    return wide[:, :width]


def check(found, expected):
    """Check that scales are equal, and that codes differ at most in a tie that the last bit decided."""
    assert found.rows == expected.rows and found.codes.shape == expected.codes.shape
    assert found.scales.stride(1) == found.scales.shape[0] or found.scales.shape[1] == 1
    rows = slice(found.rows)
    torch.testing.assert_close(found.scales[rows], expected.scales[rows], rtol=1e-5, atol=0.0)
    code, wanted = found.codes[rows].float(), expected.codes[rows].float()
    assert ((code - wanted).abs() <= wanted.abs() / 8 + 2**-9).all()  # NaN fails too
    assert (code != wanted).float().mean() < 0.01


@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 384), (2, 1152), (5, 4096)])
def test_plain_rows(rows, width, grouped, dtype, device):
    x = rows_apart(rows, width, dtype, device)
    check(plain_rows(x, grouped=grouped), rows_reference(x, grouped=grouped))


@cases("rows", [257], exhaustive=[1025])
def test_many_plain_rows(rows, device):
    """Their programs are divided differently."""
    round_codes()
    x = torch.randn(rows, 384, device=device)
    check(plain_rows(x, grouped=True), rows_reference(x, grouped=True))


def test_a_width_of_no_whole_groups(dtype, device):
    round_codes()
    x = rows_apart(3, 200, dtype, device)
    check(plain_rows(x, grouped=False), rows_reference(x, grouped=False))


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 768), (2, 1536)])
def test_normed_rows(rows, width, centred, grouped, dtype, device):
    x = rows_apart(rows, width, dtype, device)
    weight, bias = (torch.randn(width, dtype=dtype, device=device) for _ in range(2))
    norm = (weight, bias if centred else None, 1e-5)
    check(normed_rows(x, *norm, grouped=grouped), normed_rows_reference(x, *norm, grouped=grouped))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 1152)])
def test_gated_rows(rows, width, activation, grouped, dtype, device):
    gate_up = rows_apart(rows, 2 * width, dtype, device) / 16
    check(gated_rows(gate_up, activation, grouped=grouped), gated_rows_reference(gate_up, activation, grouped=grouped))


def test_activated_rows(grouped, device):
    x = torch.randn(3, 256, device=device)
    check(activated_rows(x, "gelu", grouped=grouped), rows_reference(torch.nn.functional.gelu(x), grouped=grouped))


def test_nan_in_a_row_longer_than_a_program_holds(device, monkeypatch):
    round_codes()
    clamp_numbers_only(monkeypatch)
    x = torch.randn(2, 17408, device=device)
    x[1, [5, 17000]] = torch.nan
    wide = plain_rows(x, grouped=False).widen()
    assert wide[1, [5, 17000]].isnan().all() and wide[0].isfinite().all()


def test_a_row_longer_than_a_program_holds(device):
    """The largest models have such feed-forward layers."""
    round_codes()
    gate_up = torch.randn(2, 2 * 17408, device=device)
    check(gated_rows(gate_up, "silu", grouped=False), gated_rows_reference(gate_up, "silu", grouped=False))


@pytest.mark.parametrize("value", [0.0, 1e-38, 3e38])
def test_numbers_of_any_size(value, grouped, device):
    x = torch.full((2, 256), value, device=device)
    found = plain_rows(x, grouped=grouped).widen()
    torch.testing.assert_close(found, x, rtol=1e-3, atol=1e-30)


def test_nan_stays_nan(grouped, device, monkeypatch):
    """NaN stays visible, where a code of 448 would hide it."""
    clamp_numbers_only(monkeypatch)
    x = torch.randn(3, 256, device=device)
    x[1, 130] = torch.nan
    gate_up = torch.cat([x, torch.ones_like(x)], 1)
    for found in (
        plain_rows(x, grouped=grouped),
        normed_rows(x, torch.ones(256, device=device), None, 1e-6, grouped=grouped),
        gated_rows(gate_up, "silu", grouped=grouped),
        rows_reference(x, grouped=grouped),
    ):
        wide = found.widen()
        assert wide[1, 130].isnan() and wide[[0, 2]].isfinite().all()


def test_widening_gives_the_row_back_but_for_a_seventeenth(grouped, device):
    x = torch.randn(6, 512, device=device)
    found = plain_rows(x, grouped=grouped)
    scales = found.scales[:6].repeat_interleave(SCALE_BLOCK if grouped else 512, 1)
    assert ((found.widen() - x).abs() <= torch.maximum(x.abs() / 17, scales * 2**-10)).all()


def test_rows_are_held_in_fours_where_scales_are_by_groups(device):
    assert Fp8Rows.empty(5, 256, True, device).codes.shape == (8, 256)
    assert Fp8Rows.empty(5, 256, False, device).codes.shape == (5, 256)
    for grouped in (True, False):
        shapes = [tuple(Fp8Rows.empty(rows, 256, grouped, device).codes.shape) for rows in (64, 65, 128, 129, 260)]
        assert shapes == [(64, 256), (128, 256), (128, 256), (256, 256), (260, 256)], "whole tiles"


def test_no_rows(grouped, device):
    weight = torch.ones(128, device=device)
    assert normed_rows(torch.empty(0, 128, device=device), weight, None, 1e-6, grouped=grouped).widen().shape == (
        0,
        128,
    )
    assert plain_rows(torch.empty(0, 128, device=device), grouped=grouped).rows == 0
