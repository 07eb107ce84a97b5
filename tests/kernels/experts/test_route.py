"""The router against float64: experts and weights."""

import pytest
import torch

from roseinfer.kernels.experts import route as route_module
from roseinfer.kernels.experts.route import MIN_PROGRAM_TOKENS, route_reference, router_logits
from roseinfer.kernels.experts.route_terms import split_router
from roseinfer.kernels.linear.fp8_rows import Fp8Rows, normed_rows_reference
from roseinfer.kernels.linear.skinny import SkinnyNorm
from tests.helpers.cases import cases, each_value
from tests.helpers.expert_layers import exact_routes, router_case
from tests.helpers.interpreter import round_codes


def arrived_of(tokens, device):
    return torch.zeros(-(-tokens // MIN_PROGRAM_TOKENS), dtype=torch.int32, device=device)


def route(x, norm, router, **options):
    return route_module.route(x, norm, split_router(norm, router), **options)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden"),
    [(1, 8, 2, 64), (19, 20, 3, 72), (5, 128, 8, 136), (65, 40, 2, 136), (3, 150, 8, 136), (33, 150, 3, 136)],
)
def test_the_largest_and_their_weights(device, tokens, experts, top_k, hidden, renormalise):
    inputs = router_case(device, tokens, experts, hidden, torch.bfloat16)
    arrived = arrived_of(tokens, device)
    normed = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
    for routed in (
        route(**inputs, top_k=top_k, renormalise=renormalise, arrived=arrived, normed=normed),
        route_reference(**inputs, top_k=top_k, renormalise=renormalise),
    ):
        ids, weights = exact_routes(**inputs, top_k=top_k, renormalise=renormalise)
        assert torch.equal(routed.ids, ids.int())
        assert torch.allclose(routed.weights.double(), weights, rtol=1e-5, atol=1e-7)
    norm = inputs["norm"]
    expected = torch.nn.functional.rms_norm(inputs["x"].double(), (hidden,), norm.weight.double(), norm.eps)
    assert torch.allclose(normed.double(), expected, rtol=8e-3, atol=1e-6)
    assert not arrived.any()  # the next launch counts from zero


def test_a_bias_is_part_of_the_logits(device):
    """Check a bias that decides, of few tokens and of many."""
    for tokens in (3, 70):
        inputs = router_case(device, tokens, 20, 72, torch.bfloat16)
        bias = torch.randn(20, device=device) * 2
        routed = route(**inputs, top_k=4, renormalise=True, arrived=arrived_of(tokens, device), bias=bias)
        ids, weights = exact_routes(**inputs, top_k=4, renormalise=True, bias=bias)
        assert torch.equal(routed.ids, ids.int())
        assert torch.allclose(routed.weights.double(), weights, rtol=1e-5, atol=1e-7)
    logits, _ = router_logits(**inputs, bias=bias)
    plain, _ = router_logits(**inputs)
    assert torch.allclose(logits - plain, bias.expand_as(logits), atol=1e-5)


CONFIGS = [
    route_module.RouteConfig(16, 16, 3, 32, 2, 4),  # the last split has fewer columns
    route_module.RouteConfig(32, 64, 1, 64, 2, 4),
    route_module.RouteConfig(64, 32, 2, 64, 3, 8),  # chooses in two parts
    route_module.RouteConfig(32, 32, 2, 32, 2, 4, rows=4),  # as two launches
]


@each_value(config=CONFIGS, tokens=[3, 67])
def test_a_shared_expert_follows_the_chosen_ones(device, config, tokens):
    """Check it where a tile of the router holds no other expert."""
    inputs = router_case(device, tokens, 65, 160, torch.bfloat16)
    inputs["router"][-1] *= 3  # it would be chosen often
    options = {"top_k": 5, "renormalise": True, "shared": True}
    ids, weights = exact_routes(**inputs, **options)
    arrived = arrived_of(tokens, device)
    for routed in (route(**inputs, **options, arrived=arrived, config=config), route_reference(**inputs, **options)):
        assert torch.equal(routed.ids, ids.int())
        assert torch.allclose(routed.weights.double(), weights, rtol=1e-5, atol=1e-7)
    assert not arrived.any()


@each_value(config=CONFIGS, dtype=[torch.float16, torch.bfloat16])
def test_every_config(device, config, dtype):
    """Experts and columns are no multiple of anything, with more than one tile of them and of tokens."""
    tokens, experts, hidden = 67, 85, 160
    inputs = router_case(device, tokens, experts, hidden, dtype)
    arrived = arrived_of(tokens, device)
    normed = torch.empty(tokens, hidden, dtype=dtype, device=device)
    routed = route(**inputs, top_k=5, renormalise=True, arrived=arrived, normed=normed, config=config)
    ids, weights = exact_routes(**inputs, top_k=5, renormalise=True)
    assert torch.equal(routed.ids, ids.int())
    assert torch.allclose(routed.weights.double(), weights, rtol=1e-5, atol=1e-7)
    norm = inputs["norm"]
    expected = torch.nn.functional.rms_norm(inputs["x"].double(), (hidden,), norm.weight.double(), norm.eps)
    assert torch.allclose(normed.double(), expected, rtol=8e-3, atol=1e-6)
    assert not arrived.any()


@cases("tokens", [129, 257], exhaustive=[513, 1025, 4097])
def test_configs_of_larger_steps(device, tokens):
    """Most rows repeat a few, so that they are quickly compared."""
    inputs = router_case(device, 40, 6, 32, torch.bfloat16)
    place = torch.arange(tokens, device=device) % 40
    inputs["x"] = inputs["x"][place]
    routed = route(**inputs, top_k=2, renormalise=False, arrived=arrived_of(tokens, device))
    ids, weights = exact_routes(**inputs, top_k=2, renormalise=False)
    assert torch.equal(routed.ids, ids.int())
    assert torch.allclose(routed.weights.double(), weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_terms_are_the_router_with_the_norm(device, dtype):
    norm, router = (router_case(device, 1, 9, 500, dtype)[name] for name in ("norm", "router"))
    router[3] *= 300
    router[4] *= 1e-3
    router[5] = 0
    terms = split_router(norm, router)
    scale = terms.scale.double().item()
    assert terms.values.dtype is dtype and scale.hex().startswith("0x1.0000000000000p")
    high, low = terms.values.double()
    exact = router.double() * norm.weight.double() * scale
    assert 2**13 <= exact.abs().max() < 2**14
    off = (high + low - exact).abs().max()
    assert off == 0 if dtype is torch.bfloat16 else off <= 2.0**-25
    assert split_router(norm, torch.zeros_like(router)).values.eq(0).all()


@pytest.mark.parametrize("config", [None, CONFIGS[-1]], ids=["one launch", "two"])
def test_the_normed_input_as_codes(config, device):
    round_codes()
    inputs = router_case(device, 19, 20, 384, torch.float16)
    rounded = Fp8Rows.empty(19, 384, True, device)
    arrived = arrived_of(19, device)
    routed = route(**inputs, top_k=3, renormalise=True, arrived=arrived, normed=rounded, config=config)
    assert torch.equal(routed.ids, route(**inputs, top_k=3, renormalise=True, arrived=arrived).ids)
    norm = inputs["norm"]
    expected = normed_rows_reference(inputs["x"], norm.weight, None, norm.eps, grouped=True)
    assert torch.allclose(rounded.scales[:19], expected.scales[:19], rtol=1e-5)
    # A number near the middle between two codes may become either.
    assert ((rounded.widen() - expected.widen()).abs() > 1e-3 * expected.widen().abs()).float().mean() < 1e-3


def test_rows_that_lie_apart(device):
    inputs = router_case(device, 3, 8, 64, torch.float16)
    wide = torch.randn(3, 100, dtype=torch.float16, device=device)
    wide[:, 20:84] = inputs["x"]
    inputs["x"] = wide[:, 20:84]
    routed = route(**inputs, top_k=2, renormalise=True, arrived=arrived_of(3, device))
    assert torch.equal(routed.ids, exact_routes(**inputs, top_k=2, renormalise=True)[0].int())


def test_equal_ones_in_the_order_of_their_numbers(device):
    inputs = router_case(device, 2, 12, 64, torch.bfloat16)
    inputs["router"][3:9] = inputs["router"][3]
    inputs["x"][0] = 0  # all are equal
    routed = route(**inputs, top_k=8, renormalise=True, arrived=arrived_of(2, device))
    assert routed.ids[0].tolist() == list(range(8))
    assert routed.weights[0].tolist() == pytest.approx([1 / 8] * 8)
    place = routed.ids[1].tolist().index(3)
    assert routed.ids[1].tolist()[place : place + 6] == list(range(3, 9))[: 8 - place]


def test_no_tokens(device):
    inputs = router_case(device, 0, 8, 64, torch.bfloat16)
    assert route(**inputs, top_k=2, renormalise=True, arrived=arrived_of(0, device)).ids.shape == (0, 2)


def test_nan_chooses_existing_experts(device):
    inputs = router_case(device, 2, 12, 64, torch.bfloat16)
    expected = route(**inputs, top_k=3, renormalise=True, arrived=arrived_of(2, device))
    inputs["x"][0, 5] = torch.nan
    routed = route(**inputs, top_k=3, renormalise=True, arrived=arrived_of(2, device))
    assert ((routed.ids >= 0) & (routed.ids < 12)).all() and routed.weights[0].isnan().all()
    assert torch.equal(routed.ids[1], expected.ids[1]) and torch.equal(routed.weights[1], expected.weights[1])


@pytest.mark.parametrize(("tokens", "experts", "hidden"), [(1, 9, 72), (3, 128, 64)])
def test_logits(device, tokens, experts, hidden):
    inputs = router_case(device, tokens, experts, hidden, torch.bfloat16)
    logits, rstd = router_logits(**inputs)
    norm: SkinnyNorm = inputs["norm"]
    wide = inputs["x"].double()
    expected_rstd = (wide.square().mean(-1) + norm.eps).rsqrt()
    expected = (wide * expected_rstd[:, None] * norm.weight.double()) @ inputs["router"].double().T
    assert torch.allclose(rstd.double(), expected_rstd, rtol=1e-6)
    assert torch.allclose(logits.double(), expected, rtol=1e-5, atol=1e-5)
