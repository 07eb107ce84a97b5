"""Ministral 3 (Mistral AI, 2025): Mistral with YaRN, and queries that grow with their position."""

from roseinfer.attention.rope_spec import QueryScale, RopeSpec
from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_one_window
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec

# transformers' default of `rope_parameters`.
_DEFAULT_ROPE = RopeSpec(
    theta=1e6,
    scaling="yarn",
    factor=16.0,
    original_max_position=16384.0,
    query_scale=QueryScale(beta=0.1, original_max_position=16384.0),
)


def read_ministral3(fields: ConfigFields, architecture: str) -> ModelSpec:
    window = optional_integer(fields, "sliding_window", None)
    attention = read_heads(fields, kv_heads=8, head_dim=128)
    return read_decoder(
        fields,
        architecture,
        attention=attention,
        rope=_read_rope(fields, attention.head_dim),
        windows=read_one_window(fields, window, "Ministral 3"),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
    )


def _read_rope(fields: ConfigFields, head_dim: int) -> RopeSpec:
    if not fields.get("rope_parameters") and not fields.get("rope_scaling"):
        fields.only("rope_theta", _DEFAULT_ROPE.theta)  # transformers' default replaces any
        return _DEFAULT_ROPE
    return read_rope(fields, head_dim, scaled_queries=True)


FAMILIES = (ModelFamily(architectures=("Ministral3ForCausalLM",), read=read_ministral3),)
