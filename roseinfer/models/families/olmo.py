"""OLMo 2 and OLMo 3 (Ai2): Llama with norms after its parts and of whole projections; OLMo 3 has windows in three of
four layers.
"""

from typing import Any

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_layers, repeated_types
from roseinfer.models.rope_config import read_layer_ropes
from roseinfer.models.spec import ModelSpec, NormSpec

DEFAULT_OLMO3_THETA = 500_000.0


def read_olmo3(fields: ConfigFields, architecture: str) -> ModelSpec:
    window = optional_integer(fields, "sliding_window", 4096)
    attention = read_heads(fields)
    theta = "rope_theta", DEFAULT_OLMO3_THETA
    ropes = read_layer_ropes(fields, attention.head_dim, full=theta, sliding=theta)
    types = repeated_types(fields, 4)
    layers = read_layers(fields, attention, types, ropes, window=window)
    return read_olmo2(fields, architecture, layers=layers)


def read_olmo2(fields: ConfigFields, architecture: str, **options: Any) -> ModelSpec:
    fields.only("clip_qkv")
    bias = fields.flag("attention_bias", False)
    norm = NormSpec(eps=fields.number("rms_norm_eps", 1e-5))
    return read_decoder(fields, architecture, norm=norm, qkv_bias=bias, o_bias=bias, qk_norm="projection", **options)


# Also of EXAONE 4.
POST_NORM_NAMES = TensorNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
FAMILIES = (
    ModelFamily(architectures=("Olmo2ForCausalLM",), read=read_olmo2, names=POST_NORM_NAMES),
    ModelFamily(architectures=("Olmo3ForCausalLM",), read=read_olmo3, names=POST_NORM_NAMES),
)
