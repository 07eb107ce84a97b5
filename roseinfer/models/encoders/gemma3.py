"""Gemma 3 with two-sided attention (EmbeddingGemma): norms before and after each part, norms of queries and keys.

Five of six layers attend locally, with another base of the rotation.
"""

from dataclasses import dataclass, replace

import torch

from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.attention.rope import Rotary
from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.layers.embedding import VocabEmbedding
from roseinfer.layers.feed_forward import FeedForward
from roseinfer.layers.linear import Linear, Split, normed
from roseinfer.layers.norm import RMSNorm
from roseinfer.models.encoders.attention import RowAttention
from roseinfer.models.encoders.base import EncoderNetwork, PackedRows
from roseinfer.models.encoders.config_fields import read_shape
from roseinfer.models.encoders.spec import EncoderSpec
from roseinfer.models.families.gemma3 import read_attention, read_ropes, read_types
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL, SLIDING
from roseinfer.quant.base import Build, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Spec(EncoderSpec):
    """Options of Gemma 3: `local` and `reach` as in `ModernBertSpec`, and the rotation of each kind of layer."""

    attention: AttentionSpec
    local: tuple[bool, ...]
    reach: int
    full_rope: RopeSpec
    local_rope: RopeSpec


# --- config ----------------------------------------------------------------------------------------------------------
def read_spec(fields: ConfigFields, architecture: str) -> Gemma3Spec:
    if not fields.flag("use_bidirectional_attention", False):
        fields.refuse("use_bidirectional_attention", False, "without it, the model is no encoder")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.only(key)
    fields.only("attention_bias", False)
    attention = read_attention(fields)
    shape = read_shape(fields, architecture, "hidden_activation", "gelu_pytorch_tanh")
    window, ropes = fields.integer("sliding_window", 4096), read_ropes(fields, attention.head_dim)
    return Gemma3Spec(
        **{**shape, "head_dim": attention.head_dim},
        max_length=fields.integer("max_position_embeddings"),
        token_types=1,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        head=None,
        attention=attention,
        local=tuple(kind == SLIDING for kind in read_types(fields, window)),
        reach=window // 2,
        full_rope=ropes[FULL],
        local_rope=ropes[SLIDING],
    )


# --- network ---------------------------------------------------------------------------------------------------------
def network(spec: Gemma3Spec, build: Build) -> EncoderNetwork:
    return Gemma3(spec, build)


class Gemma3:
    """Network of Gemma 3, without its output head."""

    ignored: tuple[str, ...] = (r"lm_head\.weight",)

    def __init__(self, spec: Gemma3Spec, build: Build) -> None:
        self._words = VocabEmbedding(spec.vocab_size, spec.hidden_size)
        # transformers rounds it to the dtype of the embedding.
        self._multiplier = torch.tensor(spec.hidden_size**0.5, dtype=build.dtype).item()
        rotary = {
            local: Rotary.of(rope, spec.head_dim, spec.max_length, build.device)
            for local, rope in ((False, spec.full_rope), (True, spec.local_rope))
        }
        self._blocks = [Gemma3Block(spec, rotary[local], local) for local in spec.local]
        self._norm = new_norm(spec)

    def load(self, source: WeightSource) -> None:
        prefix = "model." if "model.embed_tokens.weight" in source else ""
        self._words.load(source, f"{prefix}embed_tokens")
        for layer, block in enumerate(self._blocks):
            block.load(source, f"{prefix}layers.{layer}")
        self._norm.load(source, f"{prefix}norm")

    def forward(self, rows: PackedRows) -> torch.Tensor:
        x = self._words(rows.input_ids) * self._multiplier
        attention = RowAttention(rows)
        for block in self._blocks:
            x = block(x, attention)
        return self._norm(x)

    def scores(self, pooled: torch.Tensor) -> torch.Tensor:
        raise AssertionError("this model has no head")


class Gemma3Block:
    """x + norm(attention(norm(x))), then x + norm(feed_forward(norm(x)))."""

    def __init__(self, spec: Gemma3Spec, rotary: Rotary, local: bool) -> None:
        hidden, attention = spec.hidden_size, spec.attention
        self._heads = HeadTransform(attention, rotary=rotary)
        self._reach = spec.reach if local else None
        self._eps = spec.norm_eps
        q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        self._qkv = Linear(hidden, q, kv, kv, split=Split.OUTPUTS)
        self._out = Linear(q, hidden, split=Split.INPUTS)
        self._feed_forward = FeedForward(hidden, spec.intermediate_size, spec.activation)
        self._before, self._after = new_norm(spec), new_norm(spec)
        self._before_feed_forward, self._after_feed_forward = new_norm(spec), new_norm(spec)

    def load(self, source: WeightSource, prefix: str) -> None:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._before.load(source, f"{prefix}.input_layernorm")
        self._qkv.load(source, *(f"{attention}.{part}_proj" for part in "qkv"))
        names = (f"{attention}.q_norm", f"{attention}.k_norm")
        norms = HeadNorms.load(source, names, self._heads.spec, self._eps, offset=1.0)
        self._heads = replace(self._heads, norms=norms)
        self._out.load(source, f"{attention}.o_proj")
        self._after.load(source, f"{prefix}.post_attention_layernorm")
        self._before_feed_forward.load(source, f"{prefix}.pre_feedforward_layernorm")
        self._feed_forward.load(source, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], f"{mlp}.down_proj")
        self._after_feed_forward.load(source, f"{prefix}.post_feedforward_layernorm")

    def __call__(self, x: torch.Tensor, attention: RowAttention) -> torch.Tensor:
        """Return the next hidden states. x: [T, hidden], which may be overwritten."""
        attended = attention(normed(self._qkv, self._before, x), self._heads, self._reach)
        x = self._after.added(self._out(attended), x)
        return self._after_feed_forward.added(self._feed_forward(self._before_feed_forward, x, None), x)


def new_norm(spec: Gemma3Spec) -> RMSNorm:
    """Return a norm of the hidden states. The checkpoint stores its weights minus one, as those of all norms."""
    return RMSNorm(spec.hidden_size, spec.norm_eps, offset=1.0)
