"""`Fp8Matmul` against float64: few rows on the widened weight, many on rows that are rounded, too.

On a CPU its kernels run under Triton's interpreter.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.kernels.linear.fp8_rows import rows_reference
from roseinfer.layers.norm import LayerNorm, RMSNorm
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, Norm
from roseinfer.quant.cpu_matmul import PlainMatmul
from roseinfer.quant.fp8_weight import Fp8Weight
from tests.helpers.cases import each_value, pairwise
from tests.helpers.interpreter import hurry, round_codes
from tests.helpers.weights import BUILD, Named

WIDTH, OUT = 384, 256  # three blocks of columns, which are no multiple of four
FEW, MANY = 2, 19
SILU = Epilogue("silu", gated=True)
# float16, as the interpreter has no bfloat16 products.
DTYPE, TOLERANCE = torch.float16, 2e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow"),  # the interpreter's exponentials
]


@pytest.fixture(autouse=True)
def _prepared() -> None:
    torch.manual_seed(0)
    hurry()
    round_codes()
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("FP8 products need compute capability 9.0")


@pytest.fixture(params=[False, True], ids=["channel", "block"])
def block(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def draw_weight(outs: int, width: int, block: bool) -> Fp8Weight:
    return Fp8Weight.of(torch.randn(outs, width, device=DEVICE) / width**0.5, block=block)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def fp8_matmul(weight: Fp8Weight, bias: torch.Tensor | None, epilogue: Epilogue = NO_EPILOGUE):  # type: ignore[no-untyped-def]
    from roseinfer.quant.fp8_matmul import Fp8Matmul

    return Fp8Matmul(weight, bias, epilogue, parts())


@cache
def parts():  # type: ignore[no-untyped-def]
    from roseinfer.kernels.linear.fp8_tiles import Parts

    return Parts.allocate(DEVICE)


def load_norm(kind: type[RMSNorm] | type[LayerNorm], width: int) -> Norm:
    norm = kind(width, 1e-5)
    tensors = {"n.weight": torch.rand(width) + 0.5, "n.bias": torch.randn(width)}
    norm.load(Named(tensors, replace(BUILD, dtype=DTYPE, device=DEVICE)), "n")
    return norm


def normed(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    wide, weight = x.double(), norm.weight.double()
    if norm.bias is None:
        return F.rms_norm(wide, weight.shape, weight, norm.eps)
    return F.layer_norm(wide, weight.shape, weight, norm.bias.double(), norm.eps)


def exact(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, epilogue: Epilogue) -> torch.Tensor:
    """Return the product in float64; many rows are rounded first."""
    if x.shape[0] == MANY:
        x = rows_reference(x, grouped=weight.is_block).widen()
    y = x.double() @ weight.widen(torch.float32).double().T
    if bias is not None:
        y = y + bias.double()
    if epilogue.gated:
        gate, up = y.chunk(2, 1)
        return F.silu(gate) * up
    return F.gelu(y) if epilogue.activation == "gelu" else y


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype is DTYPE and found.shape == expected.shape
    error = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < TOLERANCE).all(), error


@pairwise(epilogue=[NO_EPILOGUE, Epilogue("gelu"), SILU], rows=[FEW, MANY], biased=[False, True])
def test_products(rows: int, epilogue: Epilogue, biased: bool, block: bool) -> None:
    weight, x = draw_weight(OUT, WIDTH, block), draw(rows, WIDTH)
    bias = draw(OUT) if biased else None
    assert_near(fp8_matmul(weight, bias, epilogue)(x), exact(x, weight, bias, epilogue))


@each_value(rows=[FEW, MANY], kind={"rms": RMSNorm, "layer": LayerNorm})
def test_a_norm_before(rows: int, kind: type[RMSNorm] | type[LayerNorm], block: bool) -> None:
    weight, x, norm = draw_weight(OUT, WIDTH, block), draw(rows, WIDTH), load_norm(kind, WIDTH)
    found = fp8_matmul(weight, None, SILU).after(norm, x)
    # The last bit of the norm decides the code of a number between two codes.
    expected = exact(normed(norm, x), weight, None, SILU)
    assert ((found.double() - expected).norm() / expected.norm()) < 2 * TOLERANCE


@pytest.mark.parametrize("rows", [1, FEW, MANY])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_a_small_product_of_the_same_input(rows: int, kind: type[RMSNorm] | type[LayerNorm], block: bool) -> None:
    from roseinfer.quant.cuda_matmul import CudaMatmul

    weight, x, norm, small = draw_weight(OUT, WIDTH, block), draw(rows, WIDTH), load_norm(kind, WIDTH), draw(6, WIDTH)
    first, second = fp8_matmul(weight, None), CudaMatmul(small, None, NO_EPILOGUE)
    joint = first.joined(second)
    assert joint is not None and first.joined(PlainMatmul(small, None)) is None
    assert first.joined(CudaMatmul(small, draw(6), NO_EPILOGUE)) is None
    found, of_small = joint(norm, x)
    assert torch.equal(found, first.after(norm, x))
    assert_near(of_small, normed(norm, x) @ small.double().T)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_a_residual_is_the_accumulator(rows: int, block: bool) -> None:
    weight, x, residual = draw_weight(OUT, WIDTH, block), draw(rows, WIDTH), draw(rows, OUT)
    expected = exact(x, weight, None, NO_EPILOGUE) + residual.double()
    result = fp8_matmul(weight, None)(x, residual)
    assert result.data_ptr() == residual.data_ptr()
    assert_near(result, expected)


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_the_result_goes_where_it_is_wanted(rows: int, block: bool) -> None:
    weight, x, out = draw_weight(OUT, WIDTH, block), draw(rows, WIDTH), draw(rows, OUT)
    assert fp8_matmul(weight, None)(x, None, out).data_ptr() == out.data_ptr()
    assert_near(out, exact(x, weight, None, NO_EPILOGUE))


@pytest.mark.parametrize(
    ("rows", "epilogue", "down_by_blocks"),
    [(FEW, SILU, True), (MANY, SILU, True), (MANY, SILU, False), (MANY, Epilogue("gelu"), True)],
    ids=str,
)
def test_pairs(rows: int, epilogue: Epilogue, block: bool, down_by_blocks: bool) -> None:
    """Two layers whose scales may differ: only the sums of the first one are in 16 bits."""
    width = OUT // 2 if epilogue.gated else OUT
    up, down = draw_weight(OUT, WIDTH, block), draw_weight(WIDTH, width, down_by_blocks)
    x, residual, norm = draw(rows, WIDTH), draw(rows, WIDTH), load_norm(RMSNorm, WIDTH)
    between = exact(normed(norm, x), up, None, epilogue)
    expected = exact(between, down, None, NO_EPILOGUE) + residual.double()
    both = fp8_matmul(up, None, epilogue).paired(fp8_matmul(down, None))
    result = both(norm, x, residual)
    assert result.data_ptr() == residual.data_ptr()
    assert ((result.double() - expected).norm() / expected.norm()) < 3 * TOLERANCE


def test_a_pair_without_a_residual() -> None:
    """Only one rank adds the residual."""
    up, down = draw_weight(OUT, WIDTH, True), draw_weight(WIDTH, OUT, True)
    x, norm = draw(MANY, WIDTH), load_norm(RMSNorm, WIDTH)
    both = fp8_matmul(up, None).paired(fp8_matmul(down, None))
    residual = torch.zeros_like(x)
    assert torch.equal(both(norm, x, None), both(norm, x, residual))


def test_a_product_of_another_kind_gets_16_bits() -> None:
    """A checkpoint may have only one of two layers in FP8."""
    other = PlainMatmul(draw(WIDTH, OUT), None)
    assert fp8_matmul(draw_weight(OUT, WIDTH, True), None).paired(other) is None


@pytest.mark.parametrize(("rows", "columns", "by_block"), [(256, 200, False), (200, 256, False), (256, 192, True)])
def test_shapes_that_cannot_be_multiplied_by_are_refused(rows: int, columns: int, by_block: bool) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{rows} x {columns}"):
        fp8_matmul(draw_weight(rows, columns, by_block), None)
