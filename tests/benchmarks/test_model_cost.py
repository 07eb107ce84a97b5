"""Work counted from a shape, against sums by hand."""

from dataclasses import replace

from benchmarks.model_cost import Chunk, ModelCost, WindowCost, Work
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.spec import ExpertsSpec, LayerSpec, ModelSpec, NormSpec, uniform_layers
from roseinfer.state.delta_spec import DeltaSpec

HEADS = AttentionSpec(heads=4, kv_heads=2, head_dim=3, scale=1.0)
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "vocab_size": 10,
    "max_position": 64,
    "norm": NormSpec(eps=1e-5),
    "tied_embeddings": True,
    "dtype": "bfloat16",
}
GATED = ModelSpec(architecture="LlamaForCausalLM", activation="silu", layers=uniform_layers(2, HEADS, None), **SHAPE)
PLAIN = ModelSpec(
    architecture="GPT2LMHeadModel", activation="gelu_tanh", layers=uniform_layers(2, HEADS, None), gated=False, **SHAPE
)


def test_shape():
    cost = ModelCost.of(GATED, 2)
    # qkv 8 x (12 + 6 + 6), out 12 x 8, gate, up and down 3 x 8 x 16
    assert cost.layer_weights == 2 * (192 + 96 + 384) and cost.head_weights == 80
    assert cost.kv_token_bytes == 2 * 2 * 6 * 2 and cost.attention_width == 2 * 12
    assert ModelCost.of(PLAIN, 4).layer_weights == 2 * (192 + 96 + 256)
    assert ModelCost.of(PLAIN, 4).kv_token_bytes == 2 * cost.kv_token_bytes


def test_experts_are_read_by_those_who_choose_them() -> None:
    experts = ExpertsSpec(count=4, top_k=2, width=5, renormalise=True, dense_layers=(0,))
    mixed = replace(GATED, architecture="Qwen3MoeForCausalLM", experts=experts)
    cost = ModelCost.of(mixed, 2)
    # Attention in both layers; gate, up and down in the first; a router in the second.
    assert (cost.layer_weights, cost.router_weights, cost.expert_weights) == (2 * (192 + 96) + 384, 8 * 4, 3 * 8 * 5)
    dense = cost.layer_weights + cost.router_weights
    one, two = cost.work([Chunk(0, 1, 0)]), cost.work([Chunk(0, 1, 0), Chunk(3, 1, 0)])
    assert one.weight_bytes == 2 * (dense + 2 * 120) and two.weight_bytes == 2 * (dense + 3 * 120)
    assert two.linear_flops == 2 * one.linear_flops == 4 * (dense + 2 * 120)
    assert (two.expert_bytes, two.expert_flops) == (2 * 3 * 120, 4 * 2 * 120)


def test_routers_and_the_head_keep_their_width_beside_codes() -> None:
    experts = ExpertsSpec(count=4, top_k=2, width=5, renormalise=True)
    cost = ModelCost.of(replace(GATED, experts=experts), 2, layer_itemsize=1, kv_itemsize=1)
    work = cost.work([Chunk(0, 1)])
    assert work.weight_bytes == cost.layer_weights + 2 * cost.expert_weights + 2 * (cost.router_weights + 80)
    assert cost.kv_token_bytes == 2 * 2 * 6
    packed = ModelCost.of(replace(GATED, experts=experts), 2, expert_itemsize=0.5).work([Chunk(0, 1)])
    assert packed.expert_bytes == cost.expert_weights and packed.weight_bytes > work.weight_bytes
    assert ModelCost.of(GATED, 4, layer_itemsize=1, head_itemsize=1).work([Chunk(0, 1)]).weight_bytes == 1344 + 80


def test_layers_with_windows():
    whole = ModelCost.of(GATED, 2)
    cost = ModelCost.of(replace(GATED, layers=uniform_layers(2, HEADS, None, windows=(None, 4))), 2)
    assert cost.kinds == (None, 4) and cost.whole_kv_token_bytes == whole.kv_token_bytes == 2 * cost.kv_token_bytes
    assert cost.windows == (WindowCost(4, cost.kv_token_bytes, cost.attention_width),)
    # Within the window all is the same. The query at position 6 sees 4 of 7 tokens; those at 2, 3 and 4 see 3, 4 and 4.
    assert cost.work([Chunk(1, 3), Chunk(0, 2)]) == whole.work([Chunk(1, 3), Chunk(0, 2)])
    work = cost.work([Chunk(6, 1), Chunk(2, 3, 0)])
    assert work.kv_bytes == cost.kv_token_bytes * ((7 + 1 + 5 + 3) + (4 + 1 + 5 + 3))
    assert work.attention_flops == 4 * cost.attention_width * ((7 + 12) + (4 + 11))


def test_layers_with_states():
    delta = DeltaSpec(key_heads=1, value_heads=2, key_dim=4, value_dim=5, taps=4)
    layers = (LayerSpec(delta=delta), *uniform_layers(1, HEADS, None))
    cost = ModelCost.of(replace(GATED, layers=layers, output_gate=True), 2)
    # Queries, keys and values 4 + 4 + 10, z and out 10 each, two gates of 2 heads; in the other layer a gate more.
    assert cost.layer_weights == 8 * (18 + 20 + 4) + (192 + 96 + 8 * 12) + 2 * 384
    assert (cost.state_bytes, cost.state_width) == (4 * 2 * 4 * 5 + 2 * 4 * 18, 2 * 4 * 5)
    work = cost.work([Chunk(6, 1), Chunk(2, 3, 0)])
    assert work.kv_bytes == cost.kv_token_bytes * (7 + 1 + 5 + 3) + 2 * 2 * cost.state_bytes
    assert work.attention_flops == 4 * cost.attention_width * (7 + 12) + 6 * 40 * 4


def test_a_step():
    cost = ModelCost(layer_weights=100, head_weights=10, weight_itemsize=2, kv_token_bytes=8, attention_width=5)
    # A decode at position 6 reads and attends to 7 tokens and writes one; 3 prompt tokens from position 2 read 5, write
    # 3 and attend to 3 + 4 + 5.
    work = cost.work([Chunk(6, 1), Chunk(2, 3, 0)])
    assert work == Work(4, 220, 8 * (7 + 1 + 5 + 3), 2 * (100 * 4 + 10), 4 * 5 * (7 + 12))
    assert (work.bytes, work.flops) == (220 + 128, 820 + 380)
    assert cost.work([Chunk(0, 3, 0)]).weight_bytes == 200
    assert cost.work([]) == Work()
    assert work + work == Work(8, 440, 256, 1640, 760)
