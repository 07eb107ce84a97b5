"""Gemma 3 (Google, 2025) without its vision tower: norms before and after each part, and of heads.

Five of six layers have a window, and rotate by another theta.
"""

from dataclasses import replace

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.decoder_config import ACTIVATIONS, optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_layer_types, read_layers, repeated_types
from roseinfer.models.rope_config import read_layer_ropes
from roseinfer.models.spec import VISION_TOWER, ModelSpec, NormSpec
from roseinfer.models.text_config import read_text_config

# transformers' defaults. Published configs leave out many fields.
_DEFAULTS = {
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "vocab_size": 262208,
}
_VISION = (
    "vision_config",
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "image_token_id",
    "image_token_index",
    "mm_tokens_per_image",
)


def read_attention(fields: ConfigFields) -> AttentionSpec:
    """Return heads and scale, without a window. Fields that are read later have transformers' defaults from now on."""
    fields.assume(**_DEFAULTS)
    return read_heads(fields, scale=fields.number("query_pre_attn_scalar") ** -0.5)


def read_types(fields: ConfigFields, window: int | None) -> list[str]:
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    return read_layer_types(fields, repeated_types(fields, pattern), window)


def read_ropes(fields: ConfigFields, head_dim: int) -> dict[str, RopeSpec]:
    """Return the rotation of each type of layer."""
    return read_layer_ropes(fields, head_dim, full=("rope_theta", 1e6), sliding=("rope_local_base_freq", 1e4))


def read_gemma3(fields: ConfigFields, architecture: str) -> ModelSpec:
    attention = read_attention(fields)
    ropes = read_ropes(fields, attention.head_dim)
    fields.ignore("cache_implementation")
    fields.only("attn_logit_softcapping", hint="no attention backend caps scores")
    fields.only("use_bidirectional_attention", False, hint="such models are encoders")
    window = optional_integer(fields, "sliding_window", 4096)
    types = read_types(fields, window)
    bias = fields.flag("attention_bias", False)
    capped = fields.get("final_logit_softcapping") is not None
    return read_decoder(
        fields,
        architecture,
        layers=read_layers(fields, attention, types, ropes, window=window),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        activation=fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        embedding_multiplier_rounded=True,
        logit_cap=fields.number("final_logit_softcapping") if capped else None,
        tied_embeddings=fields.flag("tie_word_embeddings", True),
        overflows_float16=True,
    )


def read_gemma3_with_vision(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.ignore(*_VISION)
    spec = read_text_config(
        fields,
        architecture,
        readers={"gemma3_text": read_gemma3},
        default="gemma3_text",
        left_out=(VISION_TOWER,),
    )
    if "tie_word_embeddings" in fields:  # otherwise the text model's counts
        spec = replace(spec, tied_embeddings=fields.flag("tie_word_embeddings", True))
    if spec.logit_cap is not None:  # transformers ignores it in these models
        fields.refuse("final_logit_softcapping", spec.logit_cap)
    return spec


_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
FAMILIES = (
    ModelFamily(architectures=("Gemma3ForCausalLM",), read=read_gemma3, names=_NAMES),
    ModelFamily(
        architectures=("Gemma3ForConditionalGeneration",),
        read=read_gemma3_with_vision,
        names=_NAMES,
        prefixes=("model.language_model.", "language_model.model."),
        heads=("lm_head", "language_model.lm_head"),
        ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    ),
)
