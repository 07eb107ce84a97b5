import pytest
import torch

from roseinfer.quant.base import Epilogue
from roseinfer.quant.cpu_matmul import MIN_PACKED_ELEMENTS, PackedMatmul, PlainMatmul, can_pack
from roseinfer.quant.plain import plain_matmul

WIDTH, OUT = 320, 448
CASES = [(None, False), (None, True), ("gelu", False), ("gelu_tanh", False), ("silu", False)]


def reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    out = out if bias is None else out + bias.double()
    if activation == "silu":
        return out * out.sigmoid()
    if activation == "gelu":
        return 0.5 * out * (1 + torch.erf(out / 2**0.5))
    if activation == "gelu_tanh":
        return 0.5 * out * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (out + 0.044715 * out**3)))
    return out


@pytest.mark.parametrize(("activation", "with_residual"), CASES)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_and_packed(activation: str | None, with_residual: bool, with_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(OUT, WIDTH) / WIDTH**0.5).to(dtype)
    bias = torch.randn(OUT).to(dtype) if with_bias else None
    kinds = [PlainMatmul] + [PackedMatmul] * can_pack(weight)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for rows in (1, 2, 8, 31, 32, 33, 200):
        x = torch.randn(rows, WIDTH).to(dtype)
        residual = torch.randn(rows, OUT).to(dtype) if with_residual else None
        expected = reference(x, weight, bias, activation)
        expected = expected if residual is None else expected + residual.double()
        for kind in kinds:
            actual = kind(weight, bias, Epilogue(activation))(x, residual)
            assert actual.dtype is dtype
            torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def test_residual_is_not_changed() -> None:
    weight, residual = torch.randn(OUT, WIDTH), torch.randn(5, OUT)
    kept = residual.clone()
    for kind in [PlainMatmul] + [PackedMatmul] * can_pack(weight):
        kind(weight, None)(torch.randn(5, WIDTH), residual)
        assert torch.equal(residual, kept)


def test_small_and_unsupported_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.empty(8, MIN_PACKED_ELEMENTS // 8 - 1))
    assert not can_pack(torch.empty(OUT, WIDTH, dtype=torch.float64))
    assert not can_pack(torch.empty(OUT, WIDTH, device="meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(plain_matmul(torch.empty(OUT, WIDTH), None), PlainMatmul)


@pytest.mark.parametrize("packed", [False, True])
def test_gate_and_up_side_by_side(packed: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(2 * OUT, WIDTH), torch.randn(5, WIDTH)
    if packed and not can_pack(weight):
        pytest.skip("this CPU does not pack")
    kind = PackedMatmul if packed else PlainMatmul
    gate, up = (x.double() @ half.double().T for half in weight.chunk(2))
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(
        kind(weight, None, Epilogue("silu", gated=True))(x).double(), expected, rtol=0, atol=1e-2
    )
