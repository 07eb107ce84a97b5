"""Products on a GPU with adapters: what is added, and that rows without an adapter keep their bits.

On a CPU its kernels run under Triton's interpreter.
"""

import pytest
import torch

from roseinfer.adapters.slots import CpuSlotLoader, DeviceSlots, HostAdapter, LayerShape
from roseinfer.adapters.step import StepAdapters
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.layers.norm import RMSNorm
from roseinfer.quant.base import NO_EPILOGUE, AdapterRows, Epilogue
from roseinfer.quant.cpu_matmul import activate
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.int4_format import CudaProducts
from roseinfer.quant.int4_weight import Int4Weight
from roseinfer.quant.nvfp4_weight import Nvfp4Weight
from tests.helpers.cases import cases, pairwise
from tests.helpers.interpreter import hurry, round_codes
from tests.helpers.slot_matrices import exact_delta
from tests.helpers.weights import BUILD, Named

WIDTH, HIDDEN = 256, 128
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16  # the interpreter has no bfloat16 products
SILU = Epilogue("silu", gated=True)
FEW, MANY = 3, 21

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:overflow"),  # the interpreter's exponentials
]


@pytest.fixture(autouse=True)
def _prepared() -> None:
    torch.manual_seed(0)
    hurry()
    round_codes()


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def make_norm(width: int) -> RMSNorm:
    norm = RMSNorm(width, 1e-5)
    norm.load(Named({"norm.weight": torch.randn(width) + 1}, BUILD), "norm")
    norm.weight = norm.weight.to(DEVICE, DTYPE)
    return norm


def base_product(kind: str, outs: int, width: int, epilogue: Epilogue):
    from roseinfer.kernels.linear.fp8_tiles import Parts
    from roseinfer.quant.cuda_matmul import CudaMatmul
    from roseinfer.quant.fp8_matmul import Fp8Matmul

    weight = torch.randn(outs, width, device=DEVICE) / width**0.5
    if kind == "plain":
        return CudaMatmul(weight.to(DTYPE), None, epilogue)
    if kind == "nvfp4":
        return CudaProducts()(Nvfp4Weight.of(weight), None, epilogue, None)
    if kind in ("int4", "permuted int4"):
        inputs = torch.randperm(width, device=DEVICE) if kind != "int4" else None
        return CudaProducts()(Int4Weight.of(weight, 64), None, epilogue, inputs)
    return Fp8Matmul(Fp8Weight.of(weight, block=kind == "block"), None, epilogue, Parts.allocate(DEVICE))


def adapted_product(base, modules: tuple[int, ...], width: int, epilogue: Epilogue, step: StepAdapters):
    """Return the product with adapters of ranks 4 and 16 in two of three slots."""
    from roseinfer.adapters.cuda_matmul import adapted_on_gpu
    from roseinfer.adapters.cuda_sums import AdapterSums

    made = adapted_on_gpu(base, epilogue, step, AdapterSums(step, DEVICE))
    slots = DeviceSlots([LayerShape(width, modules)], 3, 16, DTYPE, DEVICE)
    for slot, rank in ((0, 4), (2, 16)):
        adapter = HostAdapter.empty(slots.shapes, [(rank,) * len(modules)], DTYPE, pinned=False)
        layer = adapter.layers[0]
        assert layer is not None
        layer.a[:, :rank] = torch.randn(len(modules), rank, width) / width**0.5
        layer.b[:, :rank] = torch.randn(sum(modules), rank) / 4
        CpuSlotLoader(slots).start(slot, adapter)
    made.slots = slots.layers[0]
    return made


def rows_of(count: int) -> AdapterRows:
    slots = [(-1, 0, 2)[row % 3] for row in range(count)]
    return AdapterRows(slots, torch.tensor(slots, dtype=torch.int32, device=DEVICE))


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-2) -> None:
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert (error < tolerance).all(), error  # NaN fails too


@pairwise(
    kind=["plain", "channel", "block", "int4", "permuted int4", "nvfp4"],
    count=[FEW, MANY],
    gated=[False, True],
    normed=[False, True],
)
def test_products(kind: str, count: int, gated: bool, normed: bool) -> None:
    epilogue, modules = (SILU, (HIDDEN, HIDDEN)) if gated else (NO_EPILOGUE, (128, 64, 64))
    base, step = base_product(kind, sum(modules), WIDTH, epilogue), StepAdapters()
    product = adapted_product(base, modules, WIDTH, epilogue, step)
    x, residual = draw(count, WIDTH), None if gated or normed else draw(count, sum(modules))
    norm, rows = make_norm(WIDTH), rows_of(count)

    def run(made) -> torch.Tensor:
        return made.after(norm, x) if normed else made(x, None if residual is None else residual.clone())

    plain = run(base)
    assert torch.equal(run(product), plain)
    step.begin(rows)
    got = run(product)
    assert torch.equal(got[::3], plain[::3])
    bare = base.bare()
    inputs = norm(x) if normed else x
    if kind in ("channel", "block") and not base.few.pays(count):
        inputs = base.many(x, norm if normed else None)[0].widen()
    sums = (bare.after(norm, x) if normed else bare(x)).double() + exact_delta(inputs, rows.of_tokens, product.matrices)
    expected = activate(sums, epilogue) if gated else sums
    assert_close(got, expected if residual is None else expected + residual.double())


@cases(("kind", "count"), [("channel", FEW), ("block", MANY)], exhaustive=[("channel", MANY), ("block", FEW)])
def test_pairs_in_fp8(kind: str, count: int) -> None:
    step = StepAdapters()
    up_base, down_base = base_product(kind, 2 * HIDDEN, WIDTH, SILU), base_product(kind, WIDTH, HIDDEN, NO_EPILOGUE)
    up = adapted_product(up_base, (HIDDEN, HIDDEN), WIDTH, SILU, step)
    down = adapted_product(down_base, (WIDTH,), HIDDEN, NO_EPILOGUE, step)
    pair, base_pair = up.paired(down), up_base.paired(down_base)
    assert pair is not None and base_pair is not None
    x, norm, residual, rows = draw(count, WIDTH), make_norm(WIDTH), draw(count, WIDTH), rows_of(count)
    plain = base_pair(norm, x, residual.clone())
    assert torch.equal(pair(norm, x, residual.clone()), plain)
    step.begin(rows)
    got = pair(norm, x, residual.clone())
    assert torch.equal(got[::3], plain[::3])
    hidden = up.after(norm, x)
    expected = down_base(hidden, residual.clone()).double() + exact_delta(hidden, rows.of_tokens, down.matrices)
    assert_close(got, expected, 4e-2)  # a pair rounds to FP8 before it rounds to 16 bits


def test_products_without_pairs() -> None:
    step = StepAdapters()
    up = adapted_product(base_product("plain", 2 * HIDDEN, WIDTH, SILU), (HIDDEN, HIDDEN), WIDTH, SILU, step)
    down = adapted_product(base_product("plain", WIDTH, HIDDEN, NO_EPILOGUE), (WIDTH,), HIDDEN, NO_EPILOGUE, step)
    assert up.paired(down) is None
