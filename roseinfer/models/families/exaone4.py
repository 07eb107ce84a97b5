"""EXAONE 4 (LG AI Research, 2025): norms after its parts and of heads. Layers with a window rotate, full layers do not.

The smaller model (1.2B) has no windows, and all of its layers rotate.
"""

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.families.olmo import POST_NORM_NAMES
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL, SLIDING, read_layers, repeated_types
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, NormSpec


def read_exaone4(fields: ConfigFields, architecture: str) -> ModelSpec:
    window = optional_integer(fields, "sliding_window", 4096)
    types = _default_types(fields, window)
    attention = read_heads(fields, kv_heads=32)
    rope = read_rope(fields, attention.head_dim)
    ropes = {FULL: rope if window is None else None, SLIDING: rope}
    return read_decoder(
        fields,
        architecture,
        layers=read_layers(fields, attention, types, ropes, window=window),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-5)),
        qk_norm="head",
    )


def _default_types(fields: ConfigFields, window: int | None) -> list[str]:
    """Return the types of layers without `layer_types`: each `sliding_window_pattern`-th is a full one."""
    pattern = fields.get("sliding_window_pattern", 4)
    if window is None or fields.get("layer_types"):
        return [FULL] * fields.num_layers()
    if isinstance(pattern, str):  # transformers describes texts like "LLLG", and fails on them
        fields.refuse("sliding_window_pattern", pattern, "layer_types is needed")
    return repeated_types(fields, fields.integer("sliding_window_pattern", 4))


FAMILIES = (ModelFamily(architectures=("Exaone4ForCausalLM",), read=read_exaone4, names=POST_NORM_NAMES),)
