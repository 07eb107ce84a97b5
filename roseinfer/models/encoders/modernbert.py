"""ModernBERT (Warner et al., 2024): norms without bias before each part, rotary positions, gated feed-forward.

Two of three layers attend locally, with another base of the rotation. The first layer has no norm before attention.
"""

from dataclasses import dataclass

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.rope import Rotary, default_frequencies
from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.embedding import VocabEmbedding
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.linear import Linear, Split, normed
from roseinfer.layers.norm import LayerNorm
from roseinfer.models.decoder_config import ACTIVATIONS
from roseinfer.models.encoders.attention import RowAttention
from roseinfer.models.encoders.base import EncoderNetwork, PackedRows
from roseinfer.models.encoders.config_fields import (
    check_rotated,
    read_local_layers,
    read_score_head,
    read_shape,
    read_thetas,
)
from roseinfer.models.encoders.layers import Dense, HeadNorm
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.quant.base import Build, Epilogue, WeightSource
from roseinfer.quant.cpu_matmul import activate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModernBertSpec(EncoderSpec):
    """Options of ModernBERT.

    local: for each layer, whether it attends locally. reach: the farthest that a local layer's token sees, in tokens.
    full_theta, local_theta: bases of the rotation. The biases are those of norms, of attention, of the feed-forward
    network, and of the head. head_activation: as `activation`.
    """

    local: tuple[bool, ...]
    reach: int
    full_theta: float
    local_theta: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    head_bias: bool
    head_activation: str


# --- config ----------------------------------------------------------------------------------------------------------
def read_spec(fields: ConfigFields, architecture: str) -> ModernBertSpec:
    shape = read_shape(fields, architecture, "hidden_activation")
    check_rotated(fields, "num_attention_heads", shape["head_dim"])
    # Names of old configs that the network never had a use for, and settings of training and of the masked head.
    for key in ("layer_norm_eps", "position_embedding_type", "reference_compile", "deterministic_flash_attn"):
        fields.get(key)
    for key in ("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad"):
        fields.get(key)
    every = fields.integer("global_attn_every_n_layers", 3)
    local = read_local_layers(fields, [layer % every != 0 for layer in range(shape["num_layers"])])
    full_theta, local_theta = read_thetas(fields, ("global_rope_theta", 160000.0), ("local_rope_theta", 10000.0))
    pooling = fields.choice("classifier_pooling", {"cls": "cls", "mean": "mean"}, "cls")
    return ModernBertSpec(
        **shape,
        max_length=fields.integer("max_position_embeddings", 8192),
        token_types=1,
        norm_eps=fields.number("norm_eps", 1e-5),
        head=read_score_head(fields, architecture, pooling),
        local=local,
        reach=fields.integer("local_attention", 128) // 2,
        full_theta=full_theta,
        local_theta=local_theta,
        norm_bias=fields.flag("norm_bias", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        head_bias=fields.flag("classifier_bias", False),
        head_activation=fields.choice("classifier_activation", ACTIVATIONS, "gelu"),
    )


# --- network ---------------------------------------------------------------------------------------------------------
def network(spec: ModernBertSpec, build: Build) -> EncoderNetwork:
    return ModernBert(spec, build)


class ModernBert:
    """Network of ModernBERT."""

    ignored: tuple[str, ...] = (r"(head|decoder|classifier)\..*",)

    def __init__(self, spec: ModernBertSpec, build: Build) -> None:
        self._words = VocabEmbedding(spec.vocab_size, spec.hidden_size)
        self._embedding_norm = new_norm(spec)
        rotary = {
            local: Rotary(default_frequencies(spec.head_dim, theta).to(build.device), spec.max_length)
            for local, theta in ((False, spec.full_theta), (True, spec.local_theta))
        }
        self._blocks = [ModernBertBlock(spec, layer, rotary[local]) for layer, local in enumerate(spec.local)]
        self._norm = new_norm(spec)
        self._head = None if spec.head is None else PredictionHead(spec, spec.head.labels)

    def load(self, source: WeightSource) -> None:
        prefix = "model." if "model.embeddings.tok_embeddings.weight" in source else ""
        self._words.load(source, f"{prefix}embeddings.tok_embeddings")
        self._embedding_norm.load(source, f"{prefix}embeddings.norm")
        for layer, block in enumerate(self._blocks):
            block.load(source, f"{prefix}layers.{layer}")
        self._norm.load(source, f"{prefix}final_norm")
        if self._head is not None:
            self._head.load(source)

    def forward(self, rows: PackedRows) -> torch.Tensor:
        x = self._embedding_norm(self._words(rows.input_ids))
        attention = RowAttention(rows)
        for block in self._blocks:
            x = block(x, attention)
        return self._norm(x)

    def scores(self, pooled: torch.Tensor) -> torch.Tensor:
        assert self._head is not None, "this model has no head"
        return self._head(pooled)


class ModernBertBlock:
    """x + attention(norm(x)), then x + down(activation(input) * gate)."""

    def __init__(self, spec: ModernBertSpec, layer: int, rotary: Rotary) -> None:
        hidden, heads = spec.hidden_size, spec.num_heads
        attention = AttentionSpec(heads=heads, kv_heads=heads, head_dim=spec.head_dim, scale=spec.head_dim**-0.5)
        self._heads = HeadTransform(attention, rotary=rotary)
        self._reach = spec.reach if spec.local[layer] else None
        self._attention_norm = new_norm(spec) if layer > 0 else None
        bias = spec.attention_bias
        self._qkv = Linear(hidden, hidden, hidden, hidden, split=Split.OUTPUTS, bias=bias)
        self._out = Linear(hidden, hidden, split=Split.INPUTS, bias=bias)
        self._norm = new_norm(spec)
        self._feed_forward = FeedForward(hidden, spec.intermediate_size, spec.activation, bias=spec.mlp_bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        if self._attention_norm is not None:
            self._attention_norm.load(source, f"{prefix}.attn_norm")
        self._qkv.load(source, f"{prefix}.attn.Wqkv")
        self._out.load(source, f"{prefix}.attn.Wo")
        self._norm.load(source, f"{prefix}.mlp_norm")
        self._feed_forward.load(source, [f"{prefix}.mlp.Wi"], f"{prefix}.mlp.Wo")

    def __call__(self, x: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        """Return the next hidden states. x: [T, hidden], which may be overwritten."""
        qkv = normed(self._qkv, self._attention_norm, x)
        x = self._out(attention(qkv, self._heads, self._reach), x)
        return self._feed_forward(self._norm, x, x)


class PredictionHead:
    """classifier(norm(activation(dense(x)))): scores [R, labels] of pooled rows [R, hidden]."""

    def __init__(self, spec: ModernBertSpec, labels: int) -> None:
        self._activation = Epilogue(spec.head_activation)
        self._dense = Dense(spec.hidden_size, spec.hidden_size, bias=spec.head_bias)
        self._norm = HeadNorm(spec.hidden_size, spec.norm_eps, bias=spec.norm_bias)
        self._out = Dense(spec.hidden_size, labels)

    def load(self, source: WeightSource) -> None:
        self._dense.load(source, "head.dense")
        self._norm.load(source, "head.norm")
        self._out.load(source, "classifier")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._out(self._norm(activate(self._dense(x), self._activation)))


def new_norm(spec: ModernBertSpec) -> LayerNorm:
    """Return a norm of the hidden states."""
    return LayerNorm(spec.hidden_size, spec.norm_eps, bias=spec.norm_bias)
