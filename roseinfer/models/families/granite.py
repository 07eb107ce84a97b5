"""Granite 3 and 4 (IBM), dense: Llama with constant multipliers."""

from typing import Any

from roseinfer.models.decoder_config import read_decoder, read_heads
from roseinfer.models.families.family import ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import ModelSpec, uniform_layers


def read_granite(fields: ConfigFields, architecture: str) -> ModelSpec:
    return _read_granite(fields, architecture, mlp_bias=fields.flag("mlp_bias", False))


def read_granite_hybrid(fields: ConfigFields, architecture: str) -> ModelSpec:
    """Read Granite 4 if no layer has experts or a state: its feed-forward network is then the "shared" one."""
    experts = fields.get("num_local_experts", 8)
    if experts != 0:
        fields.refuse("num_local_experts", experts, "Granite 4 is supported without experts")
    for key in _UNUSED:
        fields.get(key)
    layers = fields.num_layers()
    types = fields.get("layer_types") or fields.get("layers_block_type")
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("attention", FULL) for kind in types):
        fields.refuse("layer_types", types, f"Granite 4 is supported with attention in each of its {layers} layers")
    fields.only("layers_block_type", types)
    rotated = fields.choice("position_embedding_type", {"rope": "rope", "nope": "nope"}, "nope") == "rope"
    width = fields.integer("shared_intermediate_size", 1024)
    fields.get("intermediate_size")  # of experts
    return _read_granite(fields, architecture, rotated=rotated, intermediate_size=width)


def _read_granite(fields: ConfigFields, architecture: str, *, rotated: bool = True, **options: Any) -> ModelSpec:
    attention = read_heads(fields, scale=fields.number("attention_multiplier", 1.0))
    rope = read_rope(fields, attention.head_dim)
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        layers=uniform_layers(fields.num_layers(), attention, rope if rotated else None),
        qkv_bias=bias,
        o_bias=bias,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logit_multiplier=1.0 / fields.number("logits_scaling", 1.0),
        **options,
    )


# Fields of layers that these models do not have.
_UNUSED = (
    "num_experts_per_tok",
    "mamba_n_heads",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_head",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_chunk_size",
    "mamba_conv_bias",
    "mamba_proj_bias",
    "time_step_limit",
)
_HYBRID_NAMES = TensorNames(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")
FAMILIES = (
    ModelFamily(architectures=("GraniteForCausalLM",), read=read_granite),
    ModelFamily(architectures=("GraniteMoeHybridForCausalLM",), read=read_granite_hybrid, names=_HYBRID_NAMES),
)
