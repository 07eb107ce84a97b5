"""A layer of experts for few tokens against float64; the interpreter multiplies FP8 without pairs of float16."""

import itertools

import pytest
import torch

from roseinfer.kernels.experts.few_tokens import (
    MAX_TOKENS,
    ExpertWeights,
    experts_few,
    experts_reference,
    few_pays,
    few_supports,
)
from roseinfer.kernels.experts.few_tokens_configs import DownConfig, FewConfig, GateUpConfig, choose_few_config
from tests.helpers.cases import each_value
from tests.helpers.expert_layers import exact_experts, expert_weights, router_case
from tests.helpers.skinny import assert_close

CONFIGS = {
    "one tile": FewConfig(GateUpConfig(32, 1, 128, 1), DownConfig(32, 2, 32, 1), evict_first=True),
    "tiles in turn, masked columns": FewConfig(GateUpConfig(8, 3, 256, 2, 2, lanes=8), DownConfig(16, 0, 64, 2)),
}
SMALL = CONFIGS["one tile"]


def layer(device, tokens, experts, hidden, width, dtype, scaled="none"):
    inputs = router_case(device, tokens, experts, hidden, dtype)
    return inputs | {"weights": expert_weights(device, experts, hidden, width, dtype, scaled)}


LAYERS = {
    "bfloat16": (1, 8, 2, 128, 64, torch.bfloat16, "none"),
    "float16, masked": (3, 12, 3, 200, 40, torch.float16, "none"),
    "channels": (2, 5, 2, 144, 48, torch.bfloat16, "channel"),
    "blocks in float16": (2, 6, 2, 256, 128, torch.float16, "block"),
    "blocks in bfloat16": (1, 6, 3, 384, 128, torch.bfloat16, "block"),
    "int4": (2, 8, 2, 256, 64, torch.bfloat16, "int4"),
    "int4, masked": (3, 6, 3, 96, 160, torch.bfloat16, "int4"),
    "nvfp4": (2, 8, 2, 256, 64, torch.bfloat16, "nvfp4"),
    "nvfp4, masked": (3, 6, 3, 96, 160, torch.bfloat16, "nvfp4"),
}


@each_value(sizes=LAYERS, config=CONFIGS)
def test_layers(device, config, sizes):
    tokens, experts, top_k, hidden, width, dtype, scaled = sizes
    inputs = layer(device, tokens, experts, hidden, width, dtype, scaled)
    options = {"top_k": top_k, "renormalise": tokens > 1}
    out = experts_few(**inputs, **options, config=config)
    assert_close(out, exact_experts(**inputs, **options))


@each_value(sizes=LAYERS, config=CONFIGS)
def test_a_shared_expert_is_one_more_of_every_token(device, config, sizes):
    tokens, experts, top_k, hidden, width, dtype, scaled = sizes
    inputs = layer(device, tokens, experts, hidden, width, dtype, scaled)
    options = {"top_k": top_k, "renormalise": tokens > 1, "residual": inputs["x"], "shared": True}
    out = experts_few(**inputs, **options, config=config)
    expected = exact_experts(**inputs, **options)
    assert_close(out, expected)
    assert_close(experts_reference(**inputs, **options), expected)


@each_value(sizes=[(1, 8, 2, 128, 64), (3, 12, 3, 288, 96), (2, 6, 4, 96, 32)], config=CONFIGS)
def test_mxfp4_with_biases(device, config, sizes):
    """Widths include an odd number of blocks of 32, as in gpt-oss."""
    tokens, experts, top_k, hidden, width = sizes
    inputs = router_case(device, tokens, experts, hidden, torch.bfloat16)
    weights = expert_weights(device, experts, hidden, width, torch.bfloat16, "mxfp4", biased=True)
    inputs |= {"weights": weights, "router_bias": torch.randn(experts, device=device)}
    options = {"top_k": top_k, "renormalise": True, "activation": "clamped_swish"}
    expected = exact_experts(**inputs, **options)
    assert_close(experts_few(**inputs, **options, config=config), expected)
    assert_close(experts_reference(**inputs, **options), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes minutes in the interpreter")
@pytest.mark.parametrize("scaled", ["none", "channel", "block", "mxfp4", "int4", "nvfp4"])
def test_default_configs_at_real_sizes(device, scaled):
    """A compiler may arrange large blocks unlike small ones."""
    hidden, width = (2880, 2880) if scaled in ("mxfp4", "int4", "nvfp4") else (2048, 768)
    for tokens, shared in itertools.product((1, 2, 4), (False, True)):
        inputs = layer(device, tokens, 8, hidden, width, torch.bfloat16, scaled)
        options = {"top_k": 4, "renormalise": True, "shared": shared}
        assert_close(experts_few(**inputs, **options), exact_experts(**inputs, **options))


def test_biases_in_16_bits(device):
    inputs = router_case(device, 3, 8, 128, torch.bfloat16)
    weights = expert_weights(device, 8, 128, 72, torch.bfloat16, biased=True)
    inputs |= {"weights": weights, "router_bias": torch.randn(8, device=device), "residual": inputs["x"]}
    options = {"top_k": 2, "renormalise": True, "activation": "clamped_swish"}
    assert_close(experts_few(**inputs, **options, config=SMALL), exact_experts(**inputs, **options))


def test_the_reference(device):
    inputs = layer(device, 3, 8, 128, 128, torch.bfloat16, "block")
    options = {"top_k": 2, "renormalise": False, "activation": "gelu_tanh", "residual": inputs["x"]}
    expected = exact_experts(**inputs, **options)
    assert_close(experts_reference(**inputs, **options), expected)
    assert_close(experts_few(**inputs, **options, config=SMALL), expected)
    assert few_supports(3, expert_weights(device, 8, 96, 64, torch.bfloat16, "int4"))
    assert few_supports(3, expert_weights(device, 8, 96, 64, torch.bfloat16, "nvfp4"))


def test_the_residual_stream_in_place(device):
    inputs = layer(device, 3, 8, 128, 64, torch.bfloat16)
    wide = torch.randn(3, 200, dtype=torch.bfloat16, device=device)
    wide[:, 40:168] = inputs["x"]
    x, before = wide[:, 40:168], wide.clone()
    inputs |= {"x": x, "residual": x, "top_k": 2, "renormalise": True}
    expected = exact_experts(**inputs)
    assert experts_few(**inputs, out=x, config=SMALL) is x
    assert_close(x, expected)
    assert torch.equal(wide[:, :40], before[:, :40]) and torch.equal(wide[:, 168:], before[:, 168:])


def test_all_tokens_to_one_expert(device):
    inputs = layer(device, 4, 8, 128, 64, torch.float16)
    inputs["x"] = inputs["x"].abs()
    inputs["router"][5] = 4.0  # far above all others
    options = {"top_k": 1, "renormalise": False}
    assert_close(experts_few(**inputs, **options, config=SMALL), exact_experts(**inputs, **options))


@pytest.mark.parametrize("shared", [False, True])
def test_very_many_experts(device, shared):
    inputs = layer(device, 2, 150, 64, 32, torch.float16)
    options = {"top_k": 6, "renormalise": True, "shared": shared}
    assert_close(experts_few(**inputs, **options, config=SMALL), exact_experts(**inputs, **options))


def test_as_many_experts_as_there_are(device):
    inputs = layer(device, 2, 3, 128, 64, torch.float16)
    options = {"top_k": 3, "renormalise": False}
    assert_close(experts_few(**inputs, **options, config=SMALL), exact_experts(**inputs, **options))


@pytest.mark.parametrize("scaled", ["none", "block"])
def test_a_token_does_not_depend_on_the_others(device, scaled):
    inputs = layer(device, 3, 8, 128, 128, torch.bfloat16, scaled)
    options = {"top_k": 2, "renormalise": True, "config": SMALL}
    together = experts_few(**inputs, **options)
    alone = experts_few(**inputs | {"x": inputs["x"][2:3]}, **options)
    inputs["x"][1] = torch.nan
    beside = experts_few(**inputs, **options)
    assert torch.equal(alone[0], together[2]) and torch.equal(beside[2:], together[2:])
    assert beside[1].isnan().all()


def test_what_is_supported(device):
    weights = expert_weights(device, 4, 256, 128, torch.bfloat16, "block")
    assert few_supports(1, weights) and few_supports(MAX_TOKENS, weights)
    assert not few_supports(MAX_TOKENS + 1, weights) and not few_supports(0, weights)
    assert few_pays(1, weights, 2) and not few_pays(2, weights, 2)  # four pairs for four experts
    in_four_bits = expert_weights(device, 4, 256, 128, torch.bfloat16, "int4")
    assert few_pays(1, in_four_bits, 1) and not few_pays(1, in_four_bits, 2), "tiles pay earlier"
    many = [expert_weights(device, 256, 128, 128, torch.bfloat16, scaled) for scaled in ("none", "block")]
    assert [few_pays(14, each, 8) for each in many] == [True, True]
    assert [few_pays(16, each, 8) for each in many] == [True, False]
    plain = expert_weights(device, 4, 64, 36, torch.bfloat16)
    assert not few_supports(1, plain)  # rows of 72 bytes
    wide = ExpertWeights(plain.gate_up.float(), plain.down.float())
    assert not few_supports(1, wide)


def test_programs_of_the_default_config():
    """Qwen3-30B-A3B, whole and a half of it, Qwen3.6-35B-A3B and Mixtral: nothing is read twice, and enough run at
    once.
    """
    for top_k, hidden, width in ((8, 2048, 768), (8, 2048, 384), (8, 2048, 512), (2, 4096, 14336)):
        for tokens, scaled in itertools.product((1, 2, 8), ("none", "block")):
            config = choose_few_config(tokens, top_k, hidden, width, scaled)
            assert width % (config.gate_up.block_n * config.gate_up.tiles) == 0 and width % config.down.block_k == 0
            assert tokens * top_k * width // (config.gate_up.block_n * config.gate_up.tiles) >= 256


@pytest.mark.parametrize(
    ("scaled", "tiles"), [("none", [(2, 3), (2, 6), (4, 6), (4, 6)]), ("block", [(8, 1), (8, 3), (8, 6), (16, 6)])]
)
def test_the_default_config_is_the_fastest_measured_one(scaled, tiles):
    cuts = [choose_few_config(tokens, 8, 2048, 768, scaled).gate_up for tokens in (1, 2, 4, 8)]
    assert [(cut.block_n, cut.tiles) for cut in cuts] == tiles
    cut = choose_few_config(1, 8, 2048, 512, "block").gate_up
    assert (cut.block_n, cut.tiles, cut.warps, cut.lanes) == (16, 1, 8, 8)


def test_the_default_cuts_of_mxfp4_are_those_measured():
    """Check gpt-oss-20b at 1, 2, 3, 4 and 8 tokens; a program holds whole tiles."""
    found = [choose_few_config(tokens, 4, 2880, 2880, "mxfp4") for tokens in (1, 2, 3, 4, 8)]
    gate_up = [(config.gate_up.block_n, config.gate_up.tiles, config.gate_up.warps) for config in found]
    assert gate_up == [(16, 3, 8), (16, 6, 8), *[(8, 3, 4)] * 3]
    assert [config.down.ahead for config in found] == [2, 2, 1, 1, 1]
    assert all(2880 % (block_n * tiles) == 0 for block_n, tiles, _ in gate_up)
