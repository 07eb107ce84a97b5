"""Every product against float64, with all operations that it fuses.

Products for a GPU run on one where there is one, else under Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.layers.norm import LayerNorm, RMSNorm
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Matmul, Norm
from roseinfer.quant.cpu_matmul import MIN_PACKED_ELEMENTS, PackedMatmul, PlainMatmul, can_pack
from roseinfer.quant.plain import plain_matmul
from tests.helpers.cases import each_value
from tests.helpers.interpreter import hurry
from tests.helpers.weights import BUILD, Named

WIDTH, OUT = 320, 448
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def cuda_matmul(weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> Matmul:
    from roseinfer.quant.cuda_matmul import CudaMatmul

    return CudaMatmul(weight, bias, epilogue)


@dataclass(frozen=True)
class Kind:
    """A way to multiply, and the numbers of rows that it may treat differently."""

    name: str
    dtype: torch.dtype
    make: Callable[[torch.Tensor, torch.Tensor | None, Epilogue], Matmul]
    rows: tuple[int, ...] = (1, 2, 8, 31, 33, 200)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if self.name == "cuda" and torch.cuda.is_available() else "cpu")

    def skip_where_it_cannot_run(self, weight: torch.Tensor) -> None:
        if self.name == "packed" and not can_pack(weight):
            pytest.skip("this CPU does not pack")
        if self.name == "cuda" and not HAS_TRITON:
            pytest.skip("Triton is not installed")


KINDS = [
    *(Kind("plain", dtype, PlainMatmul) for dtype in TOLERANCE),
    *(Kind("packed", dtype, PackedMatmul) for dtype in TOLERANCE),
    Kind("cuda", torch.float16, cuda_matmul, rows=(1, 2, 17)),  # the interpreter has no bfloat16
    Kind("cuda", torch.float32, cuda_matmul, rows=(3,)),
]
EPILOGUES = [
    *(Epilogue(activation) for activation in (None, "gelu", "gelu_tanh", "silu")),
    Epilogue("silu", gated=True),
]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind.name}-{kind.dtype}")
def kind(request: pytest.FixtureRequest) -> Kind:
    torch.manual_seed(0)
    if request.param.name == "cuda":
        hurry()
    return request.param


def draw(kind: Kind, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=kind.device).to(kind.dtype)


def draw_weight(kind: Kind) -> torch.Tensor:
    weight = (torch.randn(OUT, WIDTH, device=kind.device) / WIDTH**0.5).to(kind.dtype)
    kind.skip_where_it_cannot_run(weight)
    return weight


def activated(x: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    if epilogue.gated:
        gate, up = x.chunk(2, -1)
        return activated(gate, Epilogue(epilogue.activation)) * up
    if epilogue.activation == "silu":
        return x * x.sigmoid()
    if epilogue.activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    if epilogue.activation == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return activated(product if bias is None else product + bias.double(), epilogue)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, kind: Kind) -> None:
    assert actual.dtype is kind.dtype
    # Values of a gate are larger than one, and each half is rounded.
    torch.testing.assert_close(actual.double(), expected, rtol=2 * TOLERANCE[kind.dtype], atol=TOLERANCE[kind.dtype])


@each_value(epilogue=EPILOGUES, with_bias=[True, False])
def test_epilogues(kind: Kind, epilogue: Epilogue, with_bias: bool) -> None:
    weight = draw_weight(kind)
    bias = draw(kind, OUT) if with_bias else None
    product = kind.make(weight, bias, epilogue)
    for rows in kind.rows:
        x = draw(kind, rows, WIDTH)
        assert_near(product(x), exact(x, weight, bias, epilogue), kind)


@pytest.mark.parametrize("epilogue", EPILOGUES[1:], ids=str)
def test_bare_products_have_no_epilogue(kind: Kind, epilogue: Epilogue) -> None:
    weight, bias = draw_weight(kind), draw(kind, OUT)
    bare = kind.make(weight, bias, epilogue).bare()
    x = draw(kind, kind.rows[-1], WIDTH)
    assert_near(bare(x), exact(x, weight, bias, NO_EPILOGUE), kind)


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_residual_is_added(kind: Kind, with_bias: bool) -> None:
    weight = draw_weight(kind)
    bias = draw(kind, OUT) if with_bias else None
    product = kind.make(weight, bias, NO_EPILOGUE)
    for rows in kind.rows:
        x, residual = draw(kind, rows, WIDTH), draw(kind, rows, OUT)
        expected = exact(x, weight, bias, NO_EPILOGUE) + residual.double()
        assert_near(product(x, residual), expected, kind)


@each_value(norm_of={"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}, epilogue=[NO_EPILOGUE, Epilogue("silu", gated=True)])
def test_a_norm_before(kind: Kind, norm_of: type[RMSNorm] | type[LayerNorm], epilogue: Epilogue) -> None:
    weight = draw_weight(kind)
    norm: Norm = norm_of(WIDTH, 1e-5)
    build = replace(BUILD, dtype=kind.dtype, device=kind.device)
    norm.load(Named({"n.weight": torch.rand(WIDTH) + 0.5, "n.bias": torch.randn(WIDTH)}, build), "n")
    moved = (
        norm.weight.to(kind.device, kind.dtype),
        None if norm.bias is None else norm.bias.to(kind.device, kind.dtype),
    )
    norm.weight, bias = moved
    if bias is not None:
        norm.bias = bias  # type: ignore[misc]
    product = kind.make(weight, None, epilogue)
    for rows in kind.rows:
        x = draw(kind, rows, WIDTH)
        wide = x.double()
        if bias is None:
            normed = F.rms_norm(wide, (WIDTH,), norm.weight.double(), norm.eps)
        else:
            normed = F.layer_norm(wide, (WIDTH,), norm.weight.double(), bias.double(), norm.eps)
        assert_near(product.after(norm, x), exact(normed.to(kind.dtype), weight, None, epilogue), kind)


def test_the_result_goes_where_it_is_wanted(kind: Kind) -> None:
    weight = draw_weight(kind)
    product = kind.make(weight, None, NO_EPILOGUE)
    for rows in kind.rows:
        x, out = draw(kind, rows, WIDTH), torch.full((rows, OUT), torch.nan, dtype=kind.dtype, device=kind.device)
        result = product(x, None, out)
        assert result.data_ptr() == out.data_ptr()
        assert_near(out, exact(x, weight, None, NO_EPILOGUE), kind)


@pytest.mark.parametrize("kind_of", [PlainMatmul, PackedMatmul])
def test_residual_is_not_changed_on_a_cpu(kind_of: type[PlainMatmul] | type[PackedMatmul]) -> None:
    weight, residual = torch.randn(OUT, WIDTH), torch.randn(5, OUT)
    if kind_of is PackedMatmul and not can_pack(weight):
        pytest.skip("this CPU does not pack")
    kept = residual.clone()
    kind_of(weight, None)(torch.randn(5, WIDTH), residual)
    assert torch.equal(residual, kept)


def test_small_and_unsupported_weights_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_pack(torch.empty(8, MIN_PACKED_ELEMENTS // 8 - 1))
    assert not can_pack(torch.empty(OUT, WIDTH, dtype=torch.float64))
    assert not can_pack(torch.empty(OUT, WIDTH, device="meta"))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert isinstance(plain_matmul(torch.empty(OUT, WIDTH), None), PlainMatmul)
