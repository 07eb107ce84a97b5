"""Experts' products at a model's size, in every default config, against float32: a compiler may arrange large blocks
unlike small ones, and what overlaps only there may go wrong only there.
"""

import pytest
import torch
import torch.nn.functional as F

from roseinfer.kernels.experts.pair_order import order_pairs
from roseinfer.kernels.experts.tile_configs import choose_experts_config
from roseinfer.kernels.experts.tiles import Stack, add_experts, down_product, gate_up_product, spread
from tests.helpers.expert_layers import expert_weights

TOP_K, EXPERTS = 4, 32
# Hidden and expert width, as in gpt-oss-20b.
WIDTH = 2880

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


def exact_experts(x, gate_up, down, ids, weights):
    """Return the sums over each token's experts in float32, with a hidden layer in 16 bits as the kernels have it."""
    out = torch.zeros(x.shape, device=x.device)
    for expert in range(EXPERTS):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up[expert].T).chunk(2, -1)
        hidden = (F.silu(gate) * up).to(x.dtype).float()
        out.index_add_(0, tokens, hidden @ down[expert].T * weights[tokens, places, None])
    return out


@pytest.fixture(scope="module", params=["none", "mxfp4", "int4", "nvfp4"])
def layer(request):
    """Return a layer's matrices in 16 or in four bits, and their numbers in float32."""
    weights = expert_weights(torch.device("cpu"), EXPERTS, WIDTH, WIDTH, torch.bfloat16, request.param)
    parts = (
        (weights.gate_up, weights.gate_up_scales, None, weights.gate_up_factors),
        (weights.down, weights.down_scales, None, weights.down_factors),
    )
    stacks = [Stack(*(None if part is None else part.cuda() for part in each)) for each in parts]
    return request.param, *stacks, *(part.cuda() for part in weights.widened(torch.float32))


@pytest.mark.parametrize("tokens", [8, 64, 160, 512, 2048, 4096])
def test_default_configs(layer, tokens):
    scaled, gate_up, down, *exact = layer
    four_bits = "" if scaled == "none" else scaled
    config = choose_experts_config(tokens, TOP_K, EXPERTS, WIDTH, codes=False, four_bits=four_bits)
    x = torch.randn(tokens, WIDTH, device="cuda").bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K).indices.int()
    weights = torch.rand(tokens, TOP_K, device="cuda")

    def run():
        order = order_pairs(ids, EXPERTS, config.tile)
        rows = spread(x, order, TOP_K) if config.spread else x
        h = gate_up_product(rows, gate_up, order, TOP_K, "silu", config)
        return add_experts(down_product(h, down, order, weights, config, x.dtype), TOP_K, None)

    found = run()
    expected = exact_experts(x, *exact, ids, weights)
    error = (found.float() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (error < 0.01).all(), error.max()
    assert all(torch.equal(run(), found) for _ in range(5))
