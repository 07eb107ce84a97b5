"""SmolLM3 (Hugging Face, 2025): Llama without rotation in every fourth layer (Yang et al., 2025)."""

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL, SLIDING, read_layer_types, windows_of_types
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, uniform_layers


def read_smollm3(fields: ConfigFields, architecture: str) -> ModelSpec:
    optional_integer(fields, "max_window_layers", None)  # unused by the architecture
    unrotated = _read_unrotated(fields)
    window = optional_integer(fields, "sliding_window", None)
    window = window if fields.flag("use_sliding_window", False) else None
    default = [SLIDING if window and layer in unrotated else FULL for layer in range(fields.num_layers())]
    attention = read_heads(fields, kv_heads=4)
    rope = read_rope(fields, attention.head_dim, theta=2e6)
    windows = windows_of_types(fields, window, read_layer_types(fields, default, window))
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        layers=uniform_layers(len(default), attention, rope, windows, without_rope=unrotated),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _read_unrotated(fields: ConfigFields) -> tuple[int, ...]:
    """Return the layers without rotation: those with a 0 in `no_rope_layers`, or every so many-th."""
    layers, interval = fields.num_layers(), fields.integer("no_rope_layer_interval", 4)
    rotated = fields.get("no_rope_layers")
    if rotated is None:
        return tuple(range(interval - 1, layers, interval))
    if not isinstance(rotated, list) or len(rotated) < layers or any(flag not in (0, 1) for flag in rotated):
        fields.refuse("no_rope_layers", rotated, f"a list of 0 or 1 for each of {layers} layers is needed")
    return tuple(layer for layer in range(layers) if not rotated[layer])


FAMILIES = (ModelFamily(architectures=("SmolLM3ForCausalLM",), read=read_smollm3),)
