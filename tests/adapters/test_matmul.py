"""Products with adapters in every format of a CPU: near float64, and the model's own rows to the bit."""

from collections.abc import Callable

import pytest
import torch

from roseinfer.adapters.matmul import AdaptedMatmul
from roseinfer.adapters.slots import CpuSlotLoader, DeviceSlots, HostAdapter, LayerShape
from roseinfer.adapters.step import StepAdapters
from roseinfer.layers.norm import RMSNorm
from roseinfer.quant.base import NO_EPILOGUE, AdapterRows, Epilogue, Matmul, Norm, Pair
from roseinfer.quant.cpu_matmul import PackedMatmul, PlainMatmul, activate, can_pack
from roseinfer.quant.int8_matmul import Int8Matmul
from roseinfer.quant.int8_product import layer_product
from roseinfer.quant.int8_weight import Int8Weight

WIDTH, MODULES = 320, (128, 256, 64)
OUT = sum(MODULES)
RANKS = ((3, 0, 16), (8, 8, 8))  # of each slot's modules
SLOTS = [-1, 0, 1, -1, 0]
COUNTS = [1, 4, 3, 2, 1]


def int8(weight: torch.Tensor, bias: torch.Tensor | None, epilogue: Epilogue) -> Matmul:
    return Int8Matmul(layer_product(Int8Weight.of(weight), both=False), bias, epilogue)


KINDS: dict[str, Callable[[torch.Tensor, torch.Tensor | None, Epilogue], Matmul]] = {
    "plain": PlainMatmul,
    "packed": PackedMatmul,
    "int8": int8,
}
EPILOGUES = [NO_EPILOGUE, Epilogue("gelu"), Epilogue("gelu_tanh"), Epilogue("silu", gated=True)]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * max(1, shape[-1]) ** -0.5).to(dtype)


class Layer:
    """Layer of three modules with two adapters, and rows of both and of neither."""

    def __init__(self, kind: str, epilogue: Epilogue, dtype: torch.dtype) -> None:
        self.weight, self.bias = draw(OUT, WIDTH, seed=0, dtype=dtype), draw(OUT, seed=1, dtype=dtype)
        if kind == "packed" and not can_pack(self.weight):
            pytest.skip("this CPU does not pack")
        self.base = KINDS[kind](self.weight.clone(), self.bias, epilogue)
        self.epilogue, self.step = epilogue, StepAdapters()
        self.product = AdaptedMatmul(self.base, self.base.bare(), epilogue, self.step)
        shape = LayerShape(WIDTH, MODULES)
        slots = DeviceSlots([shape], 2, 16, dtype, torch.device("cpu"))
        self.product.slots = slots.layers[0]
        self.changes = torch.zeros(3, OUT, WIDTH)  # of the slots, and of none
        for slot, ranks in enumerate(RANKS):
            adapter = HostAdapter.empty([shape], [ranks], dtype, pinned=False)
            host = adapter.layers[0]
            assert host is not None
            start = 0
            for module, (rank, outs) in enumerate(zip(ranks, MODULES, strict=True)):
                a = draw(rank, WIDTH, seed=9 * slot + module, dtype=dtype)
                b = draw(outs, rank, seed=module, dtype=dtype)
                host.a[module, :rank] = a
                host.b[start : start + outs, :rank] = b
                self.changes[slot, start : start + outs] = b.float() @ a.float()
                start += outs
            CpuSlotLoader(slots).start(slot, adapter)
        self.of_tokens = torch.tensor([slot for slot, count in zip(SLOTS, COUNTS, strict=True) for _ in range(count)])
        self.x = draw(len(self.of_tokens), WIDTH, seed=5, dtype=dtype) * WIDTH**0.5

    def begin(self, slots: list[int] | None = None) -> None:
        of_tokens = self.of_tokens if slots is None else torch.full_like(self.of_tokens, slots[0])
        self.step.begin(AdapterRows(slots or SLOTS, of_tokens.int()))

    def exact(self, residual: torch.Tensor | None) -> torch.Tensor:
        weights = self.weight.float() + self.changes[self.of_tokens]
        y = torch.einsum("tw,tow->to", self.x.float(), weights) + self.bias.float()
        y = activate(y, self.epilogue)
        return y if residual is None else y + residual.float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_mixed_rows(kind: str, epilogue: Epilogue, dtype: torch.dtype) -> None:
    layer = Layer(kind, epilogue, dtype)
    residual = None if epilogue != NO_EPILOGUE else draw(len(layer.x), OUT, seed=7, dtype=dtype)

    def multiply(matmul: Matmul) -> torch.Tensor:
        return matmul(layer.x, None if residual is None else residual.clone())

    plain = multiply(layer.base)
    assert torch.equal(multiply(layer.product), plain), "no row has an adapter"
    layer.begin()
    found = multiply(layer.product)
    assert found.dtype == dtype
    own = layer.of_tokens < 0
    assert torch.equal(found[own], plain[own])
    bar = {"int8": 0.06}.get(kind, 0.0) + (0.04 if dtype is torch.bfloat16 else 1e-4)
    torch.testing.assert_close(found.float(), layer.exact(residual), rtol=bar, atol=bar)
    changed = layer.exact(residual)[~own] - plain[~own].float()
    assert changed.abs().mean() > 0.1, "adapters change more than rounding does"
    into = torch.empty_like(found)
    assert layer.product(layer.x, None if residual is None else residual.clone(), into) is into
    assert torch.equal(into, found)


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
def test_rows_of_one_adapter(epilogue: Epilogue) -> None:
    layer = Layer("plain", epilogue, torch.float32)
    layer.begin([1] * len(SLOTS))
    layer.of_tokens = torch.full_like(layer.of_tokens, 1)
    torch.testing.assert_close(layer.product(layer.x), layer.exact(None), rtol=1e-4, atol=1e-4)
    norm = RMSNorm(WIDTH, 1e-5)
    norm.weight = torch.ones(WIDTH)
    normed = norm(layer.x)
    assert torch.equal(layer.product.after(norm, layer.x), layer.product(normed))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gate_of_the_bare_product_is_the_product(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = Layer(kind, EPILOGUES[-1], dtype)
        bare = layer.base.bare()(layer.x)
        assert torch.equal(activate(bare, layer.epilogue).to(dtype), layer.base(layer.x))


class Counting(PlainMatmul):
    """Product that can be paired, and counts pairs."""

    pairs = 0

    def paired(self, second: Matmul) -> Pair | None:
        def both(norm: Norm, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
            Counting.pairs += 1
            return second(self.after(norm, x), residual)

        return both if isinstance(second, Counting) else None


def test_pairs_are_for_steps_without_adapters() -> None:
    layer, step = Layer("plain", NO_EPILOGUE, torch.float32), StepAdapters()
    products = Counting(draw(OUT, WIDTH, seed=0), None), Counting(draw(WIDTH, OUT, seed=2), None)
    first, second = (AdaptedMatmul(product, product, NO_EPILOGUE, step) for product in products)
    first.slots = layer.product.slots
    second.slots = DeviceSlots([LayerShape(OUT, (WIDTH,))], 2, 16, torch.float32, torch.device("cpu")).layers[0]
    norm = RMSNorm(WIDTH, 1e-5)
    norm.weight = torch.ones(WIDTH)
    pair = first.paired(second)
    assert pair is not None and first.paired(layer.product) is None and layer.product.paired(second) is None
    Counting.pairs = 0
    plain = pair(norm, layer.x, None)
    assert Counting.pairs == 1
    step.begin(AdapterRows(SLOTS, layer.of_tokens.int()))
    mixed = pair(norm, layer.x, None)
    assert Counting.pairs == 1
    own = layer.of_tokens < 0
    assert torch.equal(mixed[own], plain[own]) and not torch.allclose(mixed[~own], plain[~own])
