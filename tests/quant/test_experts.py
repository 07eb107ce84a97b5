"""A layer of experts on a CPU against the formula, token by token and expert by expert in float64."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.kernels.common.clamped_swish import clamped_swish
from roseinfer.layers.experts import RoutedExperts
from roseinfer.layers.norm import RMSNorm
from roseinfer.parallel.group import RankGroup, SingleRank
from roseinfer.quant.base import Build, ExpertNames, ExpertShape, WeightFormat
from roseinfer.quant.experts import route
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.fp8_weight import Fp8Weight
from roseinfer.quant.int8_format import Int8Format
from roseinfer.quant.int8_product import unsupported_reason
from tests.helpers.weights import BUILD, Imagined, Named, build_for

SHAPE = ExpertShape(count=7, top_k=3, hidden=40, width=24, renormalise=True, activation="silu")
NAMES = ExpertNames(router="gate", gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")
EPS = 1e-6


def draw(shape: ExpertShape, *, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator) * 0.3

    tensors = {"norm.weight": 1 + normal(shape.hidden), "moe.gate.weight": normal(shape.count, shape.hidden)}
    for number in range(shape.count):
        for name, size in (("w1", (shape.width, shape.hidden)), ("w3", (shape.width, shape.hidden))):
            tensors[f"moe.experts.{number}.{name}.weight"] = normal(*size)
        tensors[f"moe.experts.{number}.w2.weight"] = normal(shape.hidden, shape.width)
    return tensors


def layer(
    tensors: dict[str, torch.Tensor], shape: ExpertShape = SHAPE, build: Build = BUILD
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return x -> x + the experts' result."""
    norm, experts = RMSNorm(shape.hidden, EPS), RoutedExperts(shape)
    source = Named(tensors, build)
    norm.load(source, "norm")
    experts.load(source, NAMES.under("moe"))
    unread = tensors.keys() - source.asked
    assert not unread
    return lambda x: experts(norm, x, x)


def expected(x: torch.Tensor, tensors: dict[str, torch.Tensor], shape: ExpertShape = SHAPE) -> torch.Tensor:
    """Return the layer's result [T, hidden] in float64, without a residual."""
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    h = x.double()
    h = h / (h.square().mean(-1, keepdim=True) + EPS).sqrt() * wide["norm.weight"]
    total = torch.zeros_like(h)
    for token, row in enumerate(h):
        p = (wide["moe.gate.weight"] @ row + wide.get("moe.gate.bias", 0.0)).softmax(0)
        chosen = sorted(range(shape.count), key=lambda number: (-p[number].item(), number))[: shape.top_k]
        whole = sum(p[number] for number in chosen) if shape.renormalise else 1.0
        for number in chosen:
            w1, w3, w2 = (wide[f"moe.experts.{number}.{name}.weight"] for name in ("w1", "w3", "w2"))
            b1, b3, b2 = (wide.get(f"moe.experts.{number}.{name}.bias", 0.0) for name in ("w1", "w3", "w2"))
            gate, up = w1 @ row + b1, w3 @ row + b3
            clamped = shape.activation == "clamped_swish"
            hidden = clamped_swish(gate, up) if clamped else gate * gate.sigmoid() * up
            total[token] += p[number] / whole * (w2 @ hidden + b2)
    return total


def inputs(rows: int, hidden: int = SHAPE.hidden) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 50])
def test_weighted_sum_of_the_chosen(rows: int, renormalise: bool) -> None:
    shape = replace(SHAPE, renormalise=renormalise)
    tensors, x = draw(shape), inputs(rows)
    torch.testing.assert_close(
        layer(tensors, shape)(x.clone()).double(), x + expected(x, tensors, shape), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("top_k", [1, SHAPE.count])
def test_one_expert_each_and_all_of_them(top_k: int) -> None:
    shape = replace(SHAPE, top_k=top_k)
    tensors, x = draw(shape), inputs(9)
    torch.testing.assert_close(
        layer(tensors, shape)(x.clone()).double(), x + expected(x, tensors, shape), rtol=0, atol=1e-5
    )


def test_all_tokens_to_the_same_experts_and_none_to_the_others() -> None:
    """Experts with lower numbers are chosen if probabilities are equal."""
    tensors, x = draw(SHAPE), inputs(30)
    tensors["moe.gate.weight"].zero_()
    ids, weights = route(x, tensors["moe.gate.weight"], 3, renormalise=True)
    assert ids.tolist() == [[0, 1, 2]] * 30
    torch.testing.assert_close(weights, torch.full((30, 3), 1 / 3))
    torch.testing.assert_close(layer(tensors)(x.clone()).double(), x + expected(x, tensors), rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    experts, x = layer(draw(SHAPE)), inputs(64)
    together = experts(x.clone())
    for rows in ([5], [63, 5], list(range(0, 64, 3))):
        torch.testing.assert_close(experts(x[rows]), together[rows], rtol=0, atol=1e-5)


def test_bfloat16_sums_in_float32() -> None:
    build = replace(BUILD, dtype=torch.bfloat16)
    tensors = {name: tensor.bfloat16() for name, tensor in draw(SHAPE).items()}
    x = inputs(20).bfloat16()
    result = layer(tensors, build=build)(x.clone())
    assert result.dtype is torch.bfloat16
    wanted = x + expected(x, tensors)
    assert (result - wanted).norm() / wanted.norm() < 0.01


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_add_up_to_the_whole_with_one_residual(size: int) -> None:
    tensors, x = draw(SHAPE), inputs(11)
    parts = [layer(tensors, build=build_for(Imagined(rank, size)))(x.clone()) for rank in range(size)]
    torch.testing.assert_close(sum(parts), layer(tensors)(x.clone()), rtol=0, atol=1e-5)


def test_a_width_that_ranks_cannot_share_is_rejected() -> None:
    with pytest.raises(ConfigError, match="24 columns"):
        layer(draw(SHAPE), build=build_for(Imagined(0, 5)))


BLOCKS = ExpertShape(count=3, top_k=2, hidden=256, width=256, renormalise=False, activation="silu")


def in_blocks(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the experts in FP8 with a scale for each 128 x 128, and the same widened again."""
    narrow, wide = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".experts." in name or ".shared.w" in name]:
        weight = Fp8Weight.of(tensors[name], block=True)
        narrow |= {name: weight.codes, f"{name}_scale_inv": weight.scales}
        wide[name] = weight.widen(torch.float32)
    return narrow, wide


@pytest.mark.skipif(unsupported_reason() is not None, reason=f"int8 is not supported: {unsupported_reason()}")
def test_experts_in_int8() -> None:
    shape = replace(BLOCKS, width=192)
    tensors, x = draw(shape), inputs(12, 256)
    found = layer(tensors, shape, replace(BUILD, weight_format=Int8Format()))(x.clone())
    wanted = x + expected(x, tensors, shape)
    assert 0 < (found - wanted).norm() / wanted.norm() < 0.03


def fp8_build(group: RankGroup) -> Build:
    weight_format: WeightFormat = Fp8Format(Fp8Scheme("block"), rounds=False, widens=True)
    return replace(BUILD, group=group, weight_format=weight_format)


def test_fp8_in_blocks_is_widened_on_a_cpu() -> None:
    narrow, wide = in_blocks(draw(BLOCKS))
    x = inputs(12, 256)
    result = layer(narrow, BLOCKS, fp8_build(SingleRank()))(x.clone())
    torch.testing.assert_close(result, layer(wide, BLOCKS)(x.clone()))


def test_fp8_blocks_are_split_whole_or_rejected() -> None:
    narrow, wide = in_blocks(draw(BLOCKS))
    x = inputs(12, 256)
    parts = [layer(narrow, BLOCKS, fp8_build(Imagined(rank, 2)))(x.clone()) for rank in range(2)]
    torch.testing.assert_close(sum(parts), layer(wide, BLOCKS)(x.clone()), rtol=0, atol=1e-3)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.w1: FP8 in blocks .* cannot be cut at 0 and 64"):
        layer(narrow, BLOCKS, fp8_build(Imagined(0, 4)))
