"""ModernBERT (Warner et al., 2024): norms without bias before each part, rotary positions, gated feed-forward.

Two of three layers attend locally, with another base of the rotation. The first layer has no norm before attention.
"""

from dataclasses import dataclass
from typing import Any

import torch

from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.rope import Rotary, default_frequencies
from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.embedding import VocabEmbedding
from roseinfer.layers.linear import Linear, Split
from roseinfer.layers.norm import LayerNorm
from roseinfer.models.decoder_config import ACTIVATIONS
from roseinfer.models.encoders.attention import RowAttention
from roseinfer.models.encoders.base import EncoderNetwork, PackedRows
from roseinfer.models.encoders.config_fields import read_score_head, read_shape
from roseinfer.models.encoders.layers import Dense, HeadNorm
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.quant.base import Build, Epilogue, WeightSource
from roseinfer.quant.cpu_matmul import activate

_FULL, _LOCAL = "full_attention", "sliding_attention"


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
    if shape["hidden_size"] // shape["num_heads"] % 2:
        fields.refuse("num_attention_heads", shape["num_heads"], "rotary positions need heads of an even width")
    # Names of old configs that the network never had a use for, and settings of training and of the masked head.
    for key in ("layer_norm_eps", "position_embedding_type", "reference_compile", "deterministic_flash_attn"):
        fields.get(key)
    for key in ("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "repad_logits_with_grad"):
        fields.get(key)
    local = _local_layers(fields, shape["num_layers"])
    full_theta, local_theta = _thetas(fields)
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


def _local_layers(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    """Read `layer_types`, or the older `global_attn_every_n_layers`."""
    every = fields.integer("global_attn_every_n_layers", 3)
    types = fields.get("layer_types")
    if types is None:
        return tuple(layer % every != 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers or any(kind not in (_FULL, _LOCAL) for kind in types):
        fields.refuse("layer_types", types, f"a list of {layers} of {_FULL}, {_LOCAL} is needed")
    return tuple(kind == _LOCAL for kind in types)


def _thetas(fields: ConfigFields) -> tuple[float, float]:
    """Read `rope_parameters` by kind of layer (transformers 5), or the two older fields."""
    found = {_FULL: _theta(fields, "global_rope_theta", 160000.0), _LOCAL: _theta(fields, "local_rope_theta", 10000.0)}
    fields.only("rope_scaling", {}, hint="only unscaled rotation is")
    parameters = fields.inner("rope_parameters")
    if parameters is not None:
        for kind, default in found.items():
            rope = parameters.inner(kind)
            if rope is not None:
                rope.only("rope_type", "default", hint="only unscaled rotation is")
                found[kind] = _theta(rope, "rope_theta", default)
                rope.refuse_unread()
        parameters.refuse_unread()
    return found[_FULL], found[_LOCAL]


def _theta(fields: ConfigFields, key: str, default: float) -> float:
    theta = fields.number(key, default)
    # Versions disagree on a null: the other kind's theta, or an error.
    if theta < 1.0 or (key in fields and fields.get(key) is None):
        fields.refuse(key, fields.get(key), "a number of 1 or more is needed")
    return theta


# --- network ---------------------------------------------------------------------------------------------------------
def network(spec: ModernBertSpec, build: Build) -> EncoderNetwork:
    return ModernBert(spec, build)


class ModernBert:
    """Network of ModernBERT."""

    ignored: tuple[str, ...] = (r"(head|decoder|classifier)\..*",)

    def __init__(self, spec: ModernBertSpec, build: Build) -> None:
        self._spec = spec
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
        hidden, heads, width = spec.hidden_size, spec.num_heads, spec.intermediate_size
        attention = AttentionSpec(heads=heads, kv_heads=heads, head_dim=spec.head_dim, scale=spec.head_dim**-0.5)
        self._heads = HeadTransform(attention, rotary=rotary)
        self._reach = spec.reach if spec.local[layer] else None
        self._attention_norm = new_norm(spec) if layer > 0 else None
        bias = spec.attention_bias
        self._qkv = Linear(hidden, hidden, hidden, hidden, split=Split.OUTPUTS, bias=bias)
        self._out = Linear(hidden, hidden, split=Split.INPUTS, bias=bias)
        self._norm = new_norm(spec)
        options: Any = {"bias": spec.mlp_bias, "activation": spec.activation, "gated": True}
        self._up = Linear(hidden, width, width, split=Split.OUTPUTS, **options)
        self._down = Linear(width, hidden, split=Split.INPUTS, bias=spec.mlp_bias)

    def load(self, source: WeightSource, prefix: str) -> None:
        if self._attention_norm is not None:
            self._attention_norm.load(source, f"{prefix}.attn_norm")
        self._qkv.load(source, f"{prefix}.attn.Wqkv")
        self._out.load(source, f"{prefix}.attn.Wo")
        self._norm.load(source, f"{prefix}.mlp_norm")
        self._up.load(source, f"{prefix}.mlp.Wi")
        self._down.load(source, f"{prefix}.mlp.Wo")

    def __call__(self, x: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        """Return the next hidden states. x: [T, hidden], which may be overwritten."""
        qkv = self._qkv(x) if self._attention_norm is None else self._qkv.matmul.after(self._attention_norm, x)
        x = self._out(attention(qkv, self._heads, self._reach), x)
        return self._down(self._up.matmul.after(self._norm, x), x)


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
