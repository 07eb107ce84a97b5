"""The compiled int8 products against PyTorch's: equal sums, and one result for a row whatever is computed beside it."""

import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from roseinfer.kernels.cpu import native
from roseinfer.layers.norm import LayerNorm, RMSNorm
from roseinfer.quant.base import NO_EPILOGUE, Epilogue
from roseinfer.quant.cpu_matmul import activate
from roseinfer.quant.int8_matmul import Int8Matmul
from roseinfer.quant.int8_product import FbgemmProduct, OnednnProduct, activation_codes, has_fast_onednn
from roseinfer.quant.int8_rows import Int8RowsMatmul
from roseinfer.quant.int8_weight import MAX_CODE, Int8Weight
from roseinfer.quant.rotation import Rotation
from tests.helpers.weights import Named
from tests.quant.test_matmul import EPILOGUES, activated

pytestmark = pytest.mark.skipif(native.instructions() is None, reason="the compiled functions are not installed")

MAX_CODE_7_BITS = 63
WIDTH, OUT = 320, 456
ODD = 454  # halves of it are not a multiple of the outputs that are computed together
PARTS = ((0, 1), (7, 8), (3, 6), (3, 14), (60, 93), (199, 200), (0, 128))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw_weight(outs: int = OUT) -> Int8Weight:
    return Int8Weight.of(torch.randn(outs, WIDTH) * torch.rand(outs, 1))


def rows_of(weight: Int8Weight, threads: int = 2, codes: int | None = None) -> native.Int8Rows:
    codes = codes or activation_codes()
    return native.Int8Rows(weight.codes, weight.scales, None, block=1, max_code=codes, threads=threads)


def multiply(rows: native.Int8Rows, x: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape[0], rows.out_width)
    rows(x, None, out, None)
    return out


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("outs", [1, 3, 64, ODD])
def test_products_have_the_bits_of_fbgemm(outs: int, threads: int) -> None:
    weight = draw_weight(outs)
    ours, theirs = rows_of(weight, threads), FbgemmProduct(weight)
    for count in (0, 1, 2, 3, 8, 33, 200):
        x = torch.randn(count, WIDTH) * torch.rand(count, 1) * 9
        assert torch.equal(multiply(ours, x), theirs(x))


@pytest.mark.parametrize("instructions", ["AVX-512 VNNI", "AVX-VNNI", "AVX2"])
def test_all_instructions_give_the_same_sums(instructions: str) -> None:
    chosen, codes = native.instructions(), MAX_CODE_7_BITS if instructions == "AVX2" else activation_codes()
    if not native.use(instructions):
        pytest.skip("this CPU lacks these instructions")
    try:
        for outs, count in ((1, 1), (ODD, 3), (64, 4), (ODD, 33), (OUT, 200)):
            weight, x = draw_weight(outs), torch.randn(count, WIDTH) * 9
            weight.codes[0], x[0] = MAX_CODE, codes
            assert torch.equal(multiply(rows_of(weight, codes=codes), x), FbgemmProduct(weight, codes)(x))
    finally:
        assert native.use(chosen)


def test_instructions_without_a_name() -> None:
    assert not native.use("MMX")


def test_halves_of_a_code_are_rounded_to_even() -> None:
    weight, codes = draw_weight(), activation_codes()
    x = torch.arange(WIDTH).float()[None] / 2 % codes
    x[0, 0] = codes
    assert torch.equal(multiply(rows_of(weight), x), FbgemmProduct(weight)(x))


def test_rows_without_values_and_without_numbers() -> None:
    rows, x = rows_of(draw_weight()), torch.randn(4, WIDTH)
    alone = multiply(rows, x)
    x[1], x[2, 3], x[3, 3] = 0, torch.nan, -torch.inf
    found = multiply(rows, x)
    assert torch.equal(found[0], alone[0]) and torch.equal(found[1], torch.zeros(OUT))
    assert not found[2:].isfinite().any(), "a request whose numbers are broken must be seen to be"


def made(epilogue: Epilogue, *, many: bool = False, outs: int = OUT) -> tuple[Int8RowsMatmul, Int8Matmul]:
    """Return the same layer with the compiled functions and without."""
    rotation, bias = Rotation(WIDTH), torch.randn(outs)
    weight = Int8Weight.of(rotation.of_weight(torch.randn(outs, WIDTH) * torch.rand(outs, 1)))
    product = OnednnProduct(weight) if many else None
    return (
        Int8RowsMatmul(weight, bias, epilogue, rotation, product, many_rows=12),
        Int8Matmul(FbgemmProduct(weight), bias, epilogue, rotation),
    )


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare results of activations that may be rounded to neighbouring codes, which few are."""
    error = (found - expected).abs() / expected.abs().amax(1, keepdim=True)
    assert found.dtype is expected.dtype and error.max() < 0.02 and error.mean() < 1e-4


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outs", [OUT, ODD])
def test_a_layer_is_that_of_pytorch(epilogue: Epilogue, dtype: torch.dtype, outs: int) -> None:
    ours, theirs = made(epilogue, outs=outs)
    x = torch.randn(9, WIDTH).to(dtype)
    expected = theirs(x)
    found, out = ours(x), torch.empty(expected.shape, dtype=dtype)
    if dtype is torch.float32:
        assert_near(found, expected)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)
    assert ours(x, None, out) is out and torch.equal(out, found)
    assert torch.equal(activate(ours.bare()(x), epilogue).to(dtype), found), "a layer with adapters has these bits"
    if epilogue == NO_EPILOGUE:
        residual = torch.randn(9, outs).to(dtype)
        torch.testing.assert_close(ours(x, residual), theirs(x, residual), rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_a_norm_before(kind: type[LayerNorm] | type[RMSNorm]) -> None:
    norm = kind(WIDTH, 1e-5)
    norm.load(Named({"n.weight": torch.rand(WIDTH) + 0.5, "n.bias": torch.randn(WIDTH)}), "n")
    ours, theirs = made(Epilogue("gelu_tanh"))
    x = torch.randn(9, WIDTH) * 3 + 1
    assert_near(ours.after(norm, x), theirs.after(norm, x))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(epilogue: Epilogue, many: bool) -> None:
    if many and not has_fast_onednn():
        pytest.skip("oneDNN has no fast product here")
    norm = LayerNorm(WIDTH, 1e-5)
    norm.load(Named({"n.weight": torch.rand(WIDTH) + 0.5, "n.bias": torch.randn(WIDTH)}), "n")
    matmul, x = made(epilogue, many=many)[0], torch.randn(200, WIDTH)
    together = matmul.after(norm, x)
    for first, last in PARTS:
        assert torch.equal(matmul.after(norm, x[first:last]), together[first:last])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_activations_are_exact_to_float32(epilogue: Epilogue) -> None:
    x = torch.cat((torch.linspace(-30, 30, 2001), torch.randn(2001)))[None]
    found = activate(x.clone(), epilogue)
    torch.testing.assert_close(found.double(), activated(x.double(), epilogue), rtol=1e-5, atol=1e-6)


def test_threads_that_call_at_once_do_not_disturb_each_other() -> None:
    rows = rows_of(draw_weight(4096))
    inputs = [torch.randn(6, WIDTH) for _ in range(4)]
    expected, wrong = [multiply(rows, x) for x in inputs], []

    def work(number: int) -> None:
        for _ in range(50):
            if not torch.equal(multiply(rows, inputs[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_row_that_finds_no_memory() -> None:
    width = 1 << 24
    weight, x = Int8Weight(torch.ones(1, width, dtype=torch.int8), torch.ones(1)), torch.ones(1, width)
    rows, out = rows_of(weight), torch.empty(1, 1)
    child = os.fork()
    if not child:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 2 * width  # enough for the codes, but not for a copy of the row
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        try:
            rows(x, None, out, None)
        except MemoryError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_process_multiplies() -> None:
    rows, x = rows_of(draw_weight(4096)), torch.randn(6, WIDTH)
    expected = multiply(rows, x)
    child = os.fork()
    if not child:
        os._exit(0 if all(torch.equal(multiply(rows, x), expected) for _ in range(20)) else 1)
    assert os.waitpid(child, 0)[1] == 0
