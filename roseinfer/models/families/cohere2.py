"""Cohere2 (Command R7B, Command A): parallel blocks, windows in layers that rotate, full attention in others."""

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL, SLIDING, read_layers, repeated_types
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec

# Configs on the hub describe the architecture in words too.
_ONLY = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def read_cohere2(fields: ConfigFields, architecture: str) -> ModelSpec:
    for key, value in _ONLY.items():
        fields.only(key, value)
    fields.ignore("cache_implementation", "use_parallel_embedding")
    window = optional_integer(fields, "sliding_window", 4096)
    if window is None:
        fields.refuse("sliding_window", window, "a positive integer is needed")
    attention = read_heads(fields)
    ropes = {SLIDING: read_rope(fields, attention.head_dim, interleaved=True), FULL: None}
    types = _default_types(fields)
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        layers=read_layers(fields, attention, types, ropes, window=window),
        norm=NormSpec(eps=fields.number("layer_norm_eps", 1e-5), kind="layer", bias=False),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        parallel=True,
        qkv_bias=bias,
        o_bias=bias,
        logit_multiplier=fields.number("logit_scale", 0.0625),
    )


def _default_types(fields: ConfigFields) -> list[str]:
    """Return the types of layers of configs that do not list them: every fourth is full, or another period."""
    period = fields.integer("sliding_window_pattern", 4)
    fields.only("layer_switch", period, hint=f"sliding_window_pattern = {period}")
    return repeated_types(fields, period)


_NAMES = TensorNames(before_mlp=None)
FAMILIES = (ModelFamily(architectures=("Cohere2ForCausalLM",), read=read_cohere2, names=_NAMES),)
