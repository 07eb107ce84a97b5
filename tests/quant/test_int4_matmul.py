"""`Int4Matmul` against float64 on the widened weight. On a CPU its kernels run under Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from roseinfer.core.errors import UnsupportedModelError
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.layers.norm import RMSNorm
from roseinfer.quant.base import NO_EPILOGUE, Epilogue
from roseinfer.quant.int4_format import CudaProducts
from roseinfer.quant.int4_weight import Int4Weight
from tests.helpers.cases import pairwise
from tests.helpers.int4 import NVFP4, four_bits
from tests.helpers.interpreter import hurry
from tests.helpers.weights import BUILD, Named

WIDTH, OUT = 256, 96
# One row in pairs, a few in tiles (on matrix units on a GPU), and a prompt by the library.
ROWS = (1, 5, 19, 300)
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


def draw(*shape):
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def product(weight, bias=None, epilogue=NO_EPILOGUE, inputs=None):
    return CudaProducts()(weight, bias, epilogue, inputs)


def rms_norm():
    norm = RMSNorm(WIDTH, 1e-5)
    norm.load(Named({"n.weight": torch.rand(WIDTH) + 0.5}, replace(BUILD, dtype=DTYPE, device=DEVICE)), "n")
    return norm


def exact(x, weight, *, bias=None, gated=False):
    y = x.double() @ weight.widen(torch.float32).double().T
    if bias is not None:
        y = y + bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    return y


def assert_near(out, expected):
    error = ((out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
    assert out.shape == expected.shape and error < TOLERANCE, error


@pairwise(rows=ROWS, group=[NVFP4, 32, 256], symmetric=[False, True], biased=[False, True])
def test_products(rows, group, symmetric, biased):
    weight = four_bits(OUT, WIDTH, group, symmetric=symmetric, device=DEVICE)
    bias, x = draw(OUT) if biased else None, draw(rows, WIDTH)
    expected = exact(x, weight, bias=bias)
    matmul = product(weight, bias)
    assert_near(matmul(x), expected)
    out = torch.empty(rows, OUT, dtype=DTYPE, device=DEVICE)
    assert matmul(x, None, out).data_ptr() == out.data_ptr()
    assert_near(out, expected)
    residual = draw(rows, OUT)
    expected = expected + residual.double()
    assert_near(matmul(x, residual), expected)


@pytest.mark.parametrize("rows", ROWS)
def test_gate_after_a_norm_with_permuted_inputs(rows):
    weight, bias, inputs = four_bits(OUT, WIDTH, 64, device=DEVICE), draw(OUT), torch.randperm(WIDTH, device=DEVICE)
    norm, x = rms_norm(), draw(rows, WIDTH)
    wide = F.rms_norm(x.double(), (WIDTH,), norm.weight.double(), norm.eps)[:, inputs]
    matmul = product(weight, bias, SILU, inputs)
    assert_near(matmul.after(norm, x), exact(wide, weight, bias=bias, gated=True))
    assert_near(matmul.bare()(x), exact(x[:, inputs], weight, bias=bias))


def test_unsupported_weights():
    for weight, named in (
        (four_bits(OUT, 36, 36), "8 does not divide 36"),
        (Int4Weight(four_bits(OUT, 64, 64).codes, torch.full((OUT, 1), 1e6), None), "range of float16"),
        (Int4Weight(four_bits(OUT, 64, 64).codes, torch.full((OUT, 1), 1e-9), None), "range of float16"),
        (Int4Weight(four_bits(OUT, 64, 64).codes, torch.full((OUT, 1), 1e4), None), "range of float16"),
    ):
        with pytest.raises(UnsupportedModelError, match=named):
            product(weight)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("rows", [*ROWS, 16, 64, 128])
@pytest.mark.parametrize("groups", [(64, 128), (NVFP4, NVFP4)])
def test_a_graph_has_the_results_of_single_launches(rows, groups):
    """Both products of a feed-forward block: each kernel may start while the one before ends."""
    norm, gate = rms_norm(), product(four_bits(2 * WIDTH, WIDTH, groups[0], device=DEVICE), None, SILU)
    down = product(four_bits(WIDTH, WIDTH, groups[1], device=DEVICE))

    def block(x):
        for _ in range(3):
            x = down(gate.after(norm, x), x.clone())
        return x

    x = draw(rows, WIDTH)
    block(x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = block(x)
    for _ in range(3):
        x.copy_(draw(rows, WIDTH))
        expected = block(x)
        graph.replay()
        assert torch.equal(found, expected)


def test_engines_of_one_process_do_not_disturb_each_other(monkeypatch):
    """A thread of another engine multiplies between the copy of a weight in 16 bits and the product by it."""
    from roseinfer.kernels.linear import int4_product

    first, second = (product(four_bits(OUT, WIDTH, 64, device=DEVICE)) for _ in range(2))
    x = draw(ROWS[-1], WIDTH)
    expected, real = first(x).clone(), int4_product.widen

    def interrupted(*args):
        real(*args)
        monkeypatch.setattr(int4_product, "widen", real)
        second(x)

    monkeypatch.setattr(int4_product, "widen", interrupted)
    assert torch.equal(first(x), expected) and not torch.equal(second(x), expected)
