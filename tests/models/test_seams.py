"""Options of a model that no family has in all combinations, against plain formulas."""

import torch
import torch.nn.functional as F

from roseinfer.attention.heads import HeadNorms
from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.norm import RMSNorm
from roseinfer.models.decoder import Decoder
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec
from roseinfer.parallel.group import SingleRank
from roseinfer.quant.base import Build
from roseinfer.quant.plain import PlainFormat
from tests.helpers.batches import HandRow, HandRunner
from tests.helpers.weights import Named

HIDDEN, VOCAB, EPS, TOKENS = 24, 40, 1e-6, 21
ROPE = RopeSpec(theta=100.0)
# Layers that differ in everything: heads, KV heads, size and scale of heads, window, rotation.
LAYERS = (
    LayerSpec(attention=AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=0.3), rope=ROPE),
    LayerSpec(attention=AttentionSpec(heads=3, kv_heads=1, head_dim=12, scale=1.0, window=5)),
    LayerSpec(
        attention=AttentionSpec(heads=2, kv_heads=2, head_dim=16, scale=0.25),
        rope=RopeSpec(theta=50.0, rotary_dim=8, scaling="proportional"),
    ),
)
NAMES = TensorNames(after_attention="after_attention", before_mlp="before_mlp", after_mlp="after_mlp")


def spec(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "architecture": "X",
        "layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 20,
        "vocab_size": VOCAB,
        "max_position": 64,
        "norm": NormSpec(eps=EPS, offset=1.0),
        "activation": "silu",
        "tied_embeddings": True,
        "dtype": "float32",
        "qk_norm": "head",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "logit_multiplier": 0.5,
        "logit_cap": 2.0,
    }
    return ModelSpec(**{**values, **changes})


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(*size: int) -> torch.Tensor:
        return 0.3 * torch.randn(*size, generator=generator)

    found = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN), "model.norm.weight": normal(HIDDEN)}
    for number, layer in enumerate(LAYERS):
        attention, at = layer.attention, f"model.layers.{number}."
        queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        for name in ("input_layernorm", "after_attention", "before_mlp", "after_mlp"):
            found[f"{at}{name}.weight"] = normal(HIDDEN)
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            found[f"{at}self_attn.{name}_proj.weight"] = normal(rows, HIDDEN)
        for name in ("q_norm", "k_norm"):
            found[f"{at}self_attn.{name}.weight"] = normal(attention.head_dim)
        found[f"{at}self_attn.o_proj.weight"] = normal(HIDDEN, queries)
        for name, shape in (("gate", (20, HIDDEN)), ("up", (20, HIDDEN)), ("down", (HIDDEN, 20))):
            found[f"{at}mlp.{name}_proj.weight"] = normal(*shape)
    return found


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + weight)


def rotated(x: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """x: [T, heads, D]."""
    if layer.rope is None:
        return x
    half = x.shape[-1] // 2
    frequencies = layer.rope.theta ** (-torch.arange(half).double() / half)
    frequencies[(layer.rope.rotary_dim or 2 * half) // 2 :] = 0
    angle = torch.arange(len(x))[:, None, None] * frequencies
    low, high = x.chunk(2, -1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def attended(x: torch.Tensor, w: dict[str, torch.Tensor], at: str, layer: LayerSpec) -> torch.Tensor:
    a = layer.attention
    q, k, v = ((x @ w[f"{at}self_attn.{name}_proj.weight"].T).view(len(x), -1, a.head_dim) for name in "qkv")
    q, k = norm(q, w[f"{at}self_attn.q_norm.weight"]), norm(k, w[f"{at}self_attn.k_norm.weight"])
    q, k = rotated(q, layer), rotated(k, layer)
    k, v = (y.repeat_interleave(a.heads // a.kv_heads, 1) for y in (k, v))
    i, j = torch.arange(len(x))[:, None], torch.arange(len(x))[None]
    hidden = (j > i) | (j <= i - (a.window or len(x)))
    p = (torch.einsum("ihd,jhd->hij", q, k) * a.scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, v).flatten(1) @ w[f"{at}self_attn.o_proj.weight"].T


def expected(tokens: list[int]) -> torch.Tensor:
    w = {name: tensor.double() for name, tensor in tensors().items()}
    x = 3.0 * w["model.embed_tokens.weight"][tokens]
    for number, layer in enumerate(LAYERS):
        at = f"model.layers.{number}."
        result = attended(norm(x, w[f"{at}input_layernorm.weight"]), w, at, layer)
        x = x + 0.7 * norm(result, w[f"{at}after_attention.weight"])
        read = norm(x, w[f"{at}before_mlp.weight"])
        gate, up = (read @ w[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + 0.7 * norm((F.silu(gate) * up) @ w[f"{at}mlp.down_proj.weight"].T, w[f"{at}after_mlp.weight"])
    logits = 0.5 * norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T
    return 2.0 * torch.tanh(logits / 2.0)


def test_layers_of_different_heads_and_rotations_with_norms_around_parts() -> None:
    build = Build(torch.float32, torch.device("cpu"), SingleRank(), PlainFormat())
    family = ModelFamily(architectures=("X",), read=lambda *_: spec(), names=NAMES)
    model, source = Decoder(spec(), build, family), Named(tensors(), build)
    model.load(source)
    assert source.asked == tensors().keys()
    tokens = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    runner = HandRunner(model, block_size=4)
    table, found = runner.blocks.table(TOKENS), []
    for start, count in ((0, 9), (9, 1), (10, 1), (11, 8), (19, 2)):
        found += runner.run([HandRow(tokens=tokens, table=table, start=start, count=count)])
    torch.testing.assert_close(torch.cat(found).double(), expected(tokens), rtol=0, atol=1e-4)


def test_an_offset_of_norms_is_added_in_float32() -> None:
    """In bfloat16, 1 + w would lose most bits of a small w."""
    w = torch.full((8,), 0.00390625 * 1.5).to(torch.bfloat16)
    build = Build(torch.bfloat16, torch.device("cpu"), SingleRank(), PlainFormat())
    made = RMSNorm(8, EPS, offset=1.0)
    made.load(Named({"n.weight": w}, build), "n")
    assert torch.equal(made.weight, 1.0 + w.float())
    x = torch.randn(3, 8).to(torch.bfloat16)
    wide = x.float()
    exact = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * (1 + w.float())
    assert torch.equal(made(x), exact.to(torch.bfloat16))


def test_norms_of_heads_with_an_offset_are_rounded_once() -> None:
    """Round the product of norm and 1 + w, and neither factor before, as Gemma does."""
    torch.manual_seed(2)
    build = Build(torch.bfloat16, torch.device("cpu"), SingleRank(), PlainFormat())
    query, key = (torch.randn(8).to(torch.bfloat16) for _ in range(2))
    attention = AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=1.0)
    source = Named({"q.weight": query, "k.weight": key}, build)
    norms = HeadNorms.load(source, ("q", "k"), attention, EPS, offset=1.0)
    x = torch.randn(200, 3, 8).to(torch.bfloat16)
    weights = torch.stack((1 + query.float(), 1 + query.float(), 1 + key.float()))
    exact = F.rms_norm(x.float(), (8,), None, EPS) * weights
    assert torch.equal(norms(x), exact.to(torch.bfloat16))
