"""Int8 against float64 on the very codes that it multiplies, so that only float32's rounding is left."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from roseinfer.core.errors import ConfigError
from roseinfer.layers.norm import LayerNorm
from roseinfer.parallel.group import Share
from roseinfer.quant import int8_product
from roseinfer.quant.base import NO_EPILOGUE, Epilogue, WeightPiece
from roseinfer.quant.int8_format import Int8Format
from roseinfer.quant.int8_matmul import Int8Matmul
from roseinfer.quant.int8_product import BothProducts, FbgemmProduct, OnednnProduct, unsupported_reason
from roseinfer.quant.int8_weight import MAX_CODE, Int8Weight
from roseinfer.quant.rotation import Rotation
from roseinfer.quant.select import choose_format
from tests.helpers.weights import Named
from tests.quant.test_matmul import EPILOGUES, activated

pytestmark = pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"int8 is not supported: {unsupported_reason()}"
)

WIDTH, OUT = 320, 448
ROWS = (1, 2, 7, 8, 33, 200)
KINDS = [FbgemmProduct, *([OnednnProduct] if int8_product.has_fast_onednn() else [])]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def draw_weight(outs: int = OUT) -> torch.Tensor:
    return torch.randn(outs, WIDTH) * torch.rand(outs, 1)


def rounded(x: torch.Tensor, codes: int) -> torch.Tensor:
    """Return the values of x's codes, in float64. Codes are computed in float32, which decides numbers close to .5."""
    largest = x.abs().amax(1, keepdim=True)
    return (x / largest * codes).round().double() * largest.double() / codes


def exact(x: torch.Tensor, weight: torch.Tensor, codes: int = MAX_CODE) -> torch.Tensor:
    return rounded(x, codes) @ Int8Weight.of(weight).widen(torch.float64).T


def rotated_and_exact(x: torch.Tensor, weight: torch.Tensor, codes: int) -> torch.Tensor:
    rotation = Rotation(WIDTH)
    return exact(rotation(x), rotation.of_weight(weight), codes)


def codes_here(kind: type[FbgemmProduct] | type[OnednnProduct]) -> int:
    return int8_product.activation_codes() if kind is FbgemmProduct else MAX_CODE


def test_a_weight_is_rounded_by_half_a_code_at_most() -> None:
    weight = draw_weight()
    weight[5] = 0
    found = Int8Weight.of(weight)
    assert ((found.widen(torch.float64) - weight).abs() <= 0.5001 * found.scales[:, None]).all()
    torch.testing.assert_close(found.codes.abs().amax(1)[[0, 5]].tolist(), [MAX_CODE, 0])


def test_parts_of_a_large_weight_are_rounded_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = draw_weight()
    whole = Int8Weight.of(weight)
    monkeypatch.setattr("roseinfer.quant.int8_weight.PART_ELEMENTS", 100 * WIDTH)
    parts = Int8Weight.of(weight)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("codes", [127, 63])
def test_a_product_is_that_of_the_codes(codes: int) -> None:
    if codes > codes_here(FbgemmProduct):
        pytest.skip("this CPU's sums of 8 bits are not exact")
    weight = draw_weight()
    kept = Int8Weight.of(weight)
    for rows in ROWS:
        x = torch.randn(rows, WIDTH) * torch.rand(rows, 1) * 9
        expected = exact(x, weight, codes)
        torch.testing.assert_close(FbgemmProduct(kept, codes)(x).double(), expected, rtol=1e-4, atol=1e-4)
        if codes == MAX_CODE and OnednnProduct in KINDS:
            torch.testing.assert_close(OnednnProduct(kept)(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind: type[FbgemmProduct] | type[OnednnProduct]) -> None:
    matmul = Int8Matmul(kind(Int8Weight.of(draw_weight())), torch.randn(OUT), Epilogue("gelu_tanh"))
    x = torch.randn(200, WIDTH)
    together = matmul(x)
    for first, last in ((0, 1), (7, 8), (3, 11), (60, 93), (199, 200), (0, 128)):
        assert torch.equal(matmul(x[first:last]), together[first:last])


def test_one_thread_multiplies_small_products() -> None:
    small, large = (Int8Weight.empty(rows, 768) for rows in (768, 50257))
    assert int8_product.max_alone_rows(large, 2) < 1
    assert int8_product.max_alone_rows(small, 2) > int8_product.max_alone_rows(small, 16) > 1
    assert int8_product.max_alone_rows(small, 1) == 0, "a single thread has no other threads to wait for"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_values_and_without_numbers(kind: type[FbgemmProduct] | type[OnednnProduct]) -> None:
    product = kind(Int8Weight.of(draw_weight()))
    x = torch.randn(4, WIDTH)
    alone = product(x)
    x[1], x[2, 3], x[3, 3] = 0, torch.nan, torch.inf
    found = product(x)
    assert torch.equal(found[0], alone[0]) and torch.equal(found[1], torch.zeros(OUT))
    assert not found[2:].isfinite().any(), "a request whose numbers are broken must be seen to be"
    assert product(x[:0]).shape == (0, OUT)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_sums_are_exact(kind: type[FbgemmProduct] | type[OnednnProduct]) -> None:
    codes = codes_here(kind)
    weight = Int8Weight(torch.full((OUT, 4096), MAX_CODE, dtype=torch.int8), torch.ones(OUT))
    x = torch.full((3, 4096), float(codes))
    x[1] *= -1
    torch.testing.assert_close(kind(weight)(x)[:, 0].tolist(), [s * 4096.0 * codes * MAX_CODE for s in (1, -1, 1)])


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_around_a_product(epilogue: Epilogue, dtype: torch.dtype) -> None:
    weight, bias = draw_weight(), torch.randn(OUT)
    matmul = Int8Matmul(FbgemmProduct(Int8Weight.of(weight)), bias.to(dtype), epilogue)
    x = torch.randn(8, WIDTH).to(dtype)
    expected = activated(exact(x.float(), weight, codes_here(FbgemmProduct)) + bias.to(dtype).double(), epilogue)
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    found, out = matmul(x), torch.empty(expected.shape, dtype=dtype)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, **near)
    assert matmul(x, None, out) is out and torch.equal(out, found)
    if epilogue == NO_EPILOGUE:
        residual = torch.randn(8, OUT).to(dtype)
        kept = residual.clone()
        torch.testing.assert_close(matmul(x, residual).double(), expected + residual.double(), **near)
        assert torch.equal(residual, kept)


def test_a_norm_before() -> None:
    norm = LayerNorm(WIDTH, 1e-5)
    norm.load(Named({"n.weight": torch.rand(WIDTH) + 0.5, "n.bias": torch.randn(WIDTH)}), "n")
    weight, x = draw_weight(), torch.randn(8, WIDTH)
    matmul = Int8Matmul(FbgemmProduct(Int8Weight.of(weight)), None)
    normed = F.layer_norm(x, (WIDTH,), norm.weight, norm.bias, norm.eps)
    expected = exact(normed, weight, codes_here(FbgemmProduct))
    torch.testing.assert_close(matmul.after(norm, x).double(), expected, rtol=1e-4, atol=1e-4)


def test_the_format_stacks_pieces_and_reads_transposed_ones() -> None:
    first, second, bias = draw_weight(64), draw_weight(96), torch.randn(160)
    tensors = {"a.weight": first.T, "a.bias": bias[:64], "b.weight": second.T, "b.bias": bias[64:]}
    whole = [(name, weight.shape) for name, weight in (("a", first), ("b", second))]
    pieces = [
        WeightPiece(name, Share(0, outs, outs), Share(0, ins, ins), transposed=True, bias=True)
        for name, (outs, ins) in whole
    ]
    matmul = Int8Format().load(Named(tensors), pieces, NO_EPILOGUE)
    x = torch.randn(5, WIDTH)
    expected = rotated_and_exact(x, torch.cat((first, second)), codes_here(FbgemmProduct)) + bias.double()
    torch.testing.assert_close(matmul(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_is_looked_up_and_multiplied_by_as_the_same_codes(dtype: torch.dtype) -> None:
    rows = draw_weight().to(dtype)
    table, ids, x = Int8Format().table(rows), torch.tensor([5, 0, OUT - 1, 5]), torch.randn(3, WIDTH)
    wide = Int8Weight.of(rows).widen(dtype)
    found = table.look_up(ids)
    assert found.dtype is dtype and torch.equal(found, wide[ids])
    codes = codes_here(OnednnProduct if OnednnProduct in KINDS else FbgemmProduct)
    expected = rotated_and_exact(x, Int8Weight.of(rows).widen(torch.float32), codes)
    torch.testing.assert_close(table.head()(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_few_and_many_rows_get_the_same_bits() -> None:
    """The libraries differ, and a token must not depend on the number of other tokens in a step."""
    if OnednnProduct not in KINDS:
        pytest.skip("this CPU has one product")
    kept = Int8Weight.of(draw_weight())
    both, few = BothProducts(kept, many=12), FbgemmProduct(kept)
    x = torch.randn(400, WIDTH) * torch.rand(400, 1) * 9
    # Halves of a step, which are rounded to even, and numbers that float32 takes for a half next to 128.
    x[0, :4] = torch.tensor([127.0, 62.5, 63.5, -0.50000003])
    expected = few(x)
    for first, last in ((0, 400), (0, 12), (0, 11), (5, 6), (100, 133)):
        assert torch.equal(both(x[first:last]), expected[first:last])


@pytest.mark.parametrize("free, layouts", [(1 << 40, "both"), (0, "one")])
def test_a_second_layout_is_kept_where_there_is_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, layouts: str
) -> None:
    """A single layout is the best one of PyTorch's for its layer: FBGEMM's in layers, oneDNN's in a head."""
    if OnednnProduct not in KINDS:
        pytest.skip("this CPU has one product")
    monkeypatch.setattr("roseinfer.quant.int8_format.runs_natively", lambda weight: False)
    monkeypatch.setattr("roseinfer.quant.int8_format.available_memory_bytes", lambda: free)
    chosen = Int8Format()
    piece = WeightPiece("a", Share(0, OUT, OUT), Share(0, WIDTH, WIDTH))
    layer = chosen.load(Named({"a.weight": draw_weight()}), [piece], NO_EPILOGUE)
    found = {type(layer.product), type(chosen.table(draw_weight()).head().product)}
    assert found == ({BothProducts} if layouts == "both" else {FbgemmProduct, OnednnProduct})


def test_the_format_is_chosen_on_cpus_that_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose_format("int8", None, CPU, torch.float32), Int8Format)
    with pytest.raises(ConfigError, match="int8 is for CPUs; use fp8 on a GPU"):
        choose_format("int8", None, torch.device("cuda"), torch.float32)
    monkeypatch.setattr(int8_product, "ENGINE", "of another build")
    with pytest.raises(ConfigError, match="not supported on this machine: this PyTorch lacks FBGEMM"):
        choose_format("int8", None, CPU, torch.float32)


@pytest.fixture
def only_exact_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Set of codes with exact sums on this CPU, which a test may change before the first product."""
    found: set[int] = set()
    monkeypatch.setattr(int8_product, "is_exact", lambda make, codes: codes in found)
    tried = (int8_product.activation_codes, int8_product.has_fast_onednn)
    for answer in tried:
        answer.cache_clear()
    yield found
    for answer in tried:
        answer.cache_clear()


def test_a_cpu_whose_sums_saturate_gets_seven_bits(only_exact_for: set[int]) -> None:
    only_exact_for.add(63)
    assert Int8Format().stored_as == "int8, activations in 7 bits"
    assert isinstance(int8_product.head_product(Int8Weight.of(draw_weight()), both=True), FbgemmProduct)
    x, weight = torch.randn(3, WIDTH), draw_weight()
    expected = exact(x, weight, 63)
    torch.testing.assert_close(FbgemmProduct(Int8Weight.of(weight))(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_cpu_whose_sums_are_never_exact_is_refused(only_exact_for: set[int]) -> None:
    with pytest.raises(ConfigError, match="not supported on this machine: this CPU's sums of int8"):
        choose_format("int8", None, CPU, torch.float32)
