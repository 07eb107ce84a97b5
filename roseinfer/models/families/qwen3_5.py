"""Qwen3-Next, and Qwen3.5, 3.6 and 3.8 (Alibaba, 2025 and 2026) without vision tower: in three of four layers gated
DeltaNet, in the fourth attention with a gate of its output.
"""

from dataclasses import replace
from typing import Any

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.decoder_config import read_decoder, read_heads
from roseinfer.models.families.experts_config import read_dense_layers, read_experts
from roseinfer.models.families.family import DeltaNames, ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import MTP_HEAD, VISION_TOWER, ExpertsSpec, LayerSpec, ModelSpec, NormSpec
from roseinfer.models.text_config import read_text_config
from roseinfer.quant.expert_names import ExpertNames, SharedExpertNames, StackedExpertNames
from roseinfer.state.delta_spec import DeltaSpec

LINEAR = "linear_attention"
# transformers' defaults, which are those of the 9B model.
_DEFAULTS = {
    "head_dim": 256,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}
_MOE_DEFAULTS = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
_VISION = (
    "vision_config",
    "image_token_id",
    "language_model_only",
    "video_token_id",
    "vision_end_token_id",
    "vision_start_token_id",
)
# Positions of a text are the same in all three sections, so that their order has no effect.
_SECTIONS = ("mrope_section", "mrope_interleaved")


def read_qwen3_5(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.assume(**_DEFAULTS)
    return read_hybrid(fields, architecture)


def read_qwen3_5_moe(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.assume(**_MOE_DEFAULTS)  # no layer has the `intermediate_size` of dense ones
    fields.only("norm_topk_prob", True)
    return read_hybrid(fields, architecture, experts=_read_experts(fields, renormalise=True, dense_layers=()))


def read_qwen3_next(fields: ConfigFields, architecture: str) -> ModelSpec:
    renormalise = fields.flag("norm_topk_prob", True)
    experts = _read_experts(fields, renormalise=renormalise, dense_layers=read_dense_layers(fields))
    return read_hybrid(fields, architecture, experts=experts)


def _read_experts(fields: ConfigFields, *, renormalise: bool, dense_layers: tuple[int, ...]) -> ExpertsSpec | None:
    return read_experts(
        fields,
        width=fields.integer("moe_intermediate_size"),
        renormalise=renormalise,
        dense_layers=dense_layers,
        shared_width=fields.integer("shared_expert_intermediate_size"),
    )


def read_hybrid(fields: ConfigFields, architecture: str, **options: Any) -> ModelSpec:
    """Return the spec of a model whose layers have gated DeltaNet or gated attention."""
    fields.only("attn_output_gate", True)
    fields.only("mamba_ssm_dtype", "float32", hint="states are kept in float32")
    fields.only("hidden_act", "silu", "swish", hint="the convolution's activation is SiLU")
    fields.only("output_gate_type", "silu", "swish", hint="the gate of linear attention is SiLU")
    attention = read_heads(fields)
    rope = read_rope(fields, attention.head_dim, partial=0.25, without_effect=_SECTIONS)
    bias = fields.flag("attention_bias", False)
    return read_decoder(
        fields,
        architecture,
        layers=_read_layers(fields, attention, rope),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        output_gate=True,
        left_out=_read_left_out(fields),
        **options,
    )


def _read_layers(fields: ConfigFields, attention: AttentionSpec, rope: RopeSpec) -> tuple[LayerSpec, ...]:
    count, interval = fields.num_layers(), fields.integer("full_attention_interval", 4)
    default = [LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    types = fields.get("layer_types") or default
    if not isinstance(types, list) or len(types) != count or any(kind not in (LINEAR, FULL) for kind in types):
        fields.refuse("layer_types", types, f"a list of {count} of {LINEAR}, {FULL} is needed")
    if FULL not in types:
        fields.refuse("layer_types", types, f"at least one layer has {FULL}")
    delta = _read_delta(fields)
    kinds = {LINEAR: LayerSpec(delta=delta), FULL: LayerSpec(attention=attention, rope=rope)}
    return tuple(kinds[kind] for kind in types)


def _read_delta(fields: ConfigFields) -> DeltaSpec:
    keys, values = fields.integer("linear_num_key_heads", 16), fields.integer("linear_num_value_heads", 32)
    if values % keys:
        fields.refuse("linear_num_value_heads", values, f"linear_num_key_heads = {keys} does not divide it")
    return DeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        taps=fields.integer("linear_conv_kernel_dim", 4),
    )


def _read_left_out(fields: ConfigFields) -> tuple[str, ...]:
    fields.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    return (MTP_HEAD,) if fields.get("mtp_num_hidden_layers") else ()


def read_with_vision(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.ignore(*_VISION)
    # Of the two fields for ties, published configs set one or the other, so that the checkpoint decides.
    fields.ignore("tie_word_embeddings")
    kind = "qwen3_5_moe_text" if "Moe" in architecture else "qwen3_5_text"
    readers = {kind: read_qwen3_5_moe if "Moe" in architecture else read_qwen3_5}
    spec = read_text_config(fields, architecture, readers=readers, default=kind, tied_embeddings=None)
    return replace(spec, left_out=(VISION_TOWER, *spec.left_out))


_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    stacked=StackedExpertNames(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", halves=True),
    shared=SharedExpertNames(),
)
_NAMES = TensorNames(delta=DeltaNames(), experts=_EXPERTS)
_QKVZ, _BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
_NEXT_NAMES = replace(_NAMES, delta=DeltaNames(qkv=_QKVZ, z=_QKVZ, b=_BA, a=_BA))
_IGNORED = (r"mtp\..*",)
FAMILIES = (
    ModelFamily(architectures=("Qwen3_5ForCausalLM",), read=read_qwen3_5, names=_NAMES, ignored=_IGNORED, has_mtp=True),
    ModelFamily(
        architectures=("Qwen3_5MoeForCausalLM",), read=read_qwen3_5_moe, names=_NAMES, ignored=_IGNORED, has_mtp=True
    ),
    ModelFamily(
        architectures=("Qwen3NextForCausalLM",), read=read_qwen3_next, names=_NEXT_NAMES, ignored=_IGNORED, has_mtp=True
    ),
    ModelFamily(
        architectures=("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        read=read_with_vision,
        names=_NAMES,
        prefixes=("model.language_model.", "model."),
        ignored=(*_IGNORED, r"(model\.)?visual\..*"),
        has_mtp=True,
    ),
)
