"""Qwen2, Qwen3 and Qwen3-MoE: Llama with biases or norms of heads, and windows in the later layers."""

from typing import Any

from roseinfer.models.decoder_config import optional_integer, read_decoder
from roseinfer.models.families.experts_config import read_dense_layers, read_experts
from roseinfer.models.families.family import STORED_FREQUENCIES, ModelFamily, TensorNames
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import read_one_window, read_windows
from roseinfer.models.spec import ModelSpec
from roseinfer.quant.expert_names import ExpertNames


def read_qwen2(fields: ConfigFields, architecture: str) -> ModelSpec:
    return read_decoder(fields, architecture, windows=_qwen_windows(fields), qkv_bias=True)


def read_qwen3(fields: ConfigFields, architecture: str) -> ModelSpec:
    bias = fields.flag("attention_bias", False)
    windows = _qwen_windows(fields)
    return read_decoder(fields, architecture, windows=windows, qkv_bias=bias, o_bias=bias, qk_norm="head")


def _qwen_windows(fields: ConfigFields) -> tuple[int | None, ...]:
    """Return the windows of a Qwen model: none if `use_sliding_window` is false, else those of the later layers."""
    window = optional_integer(fields, "sliding_window", 4096)
    first = optional_integer(fields, "max_window_layers", 28) or 0
    return read_windows(fields, window if fields.flag("use_sliding_window", False) else None, first)


def read_qwen3_moe(fields: ConfigFields, architecture: str) -> ModelSpec:
    fields.need("num_key_value_heads")  # transformers defaults to 4
    fields.only("use_qk_norm", True)
    fields.only("qkv_bias", False, hint="attention_bias says whether there are biases")
    bias = fields.flag("attention_bias", False)
    window = optional_integer(fields, "sliding_window", 4096)
    optional_integer(fields, "max_window_layers", 0)  # either all layers have the window or none
    window = window if fields.flag("use_sliding_window", False) else None
    windows = read_one_window(fields, window, "Qwen3-MoE")
    experts = read_experts(
        fields,
        width=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", False),
        dense_layers=read_dense_layers(fields),
    )
    options: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": "head", "experts": experts}
    return read_decoder(fields, architecture, windows=windows, **options)


_MOE_NAMES = TensorNames(
    experts=ExpertNames(
        router="mlp.gate",
        gate="mlp.experts.{}.gate_proj",
        up="mlp.experts.{}.up_proj",
        down="mlp.experts.{}.down_proj",
    )
)
FAMILIES = (
    ModelFamily(architectures=("Qwen2ForCausalLM",), read=read_qwen2, ignored=STORED_FREQUENCIES),
    ModelFamily(architectures=("Qwen3ForCausalLM",), read=read_qwen3, ignored=STORED_FREQUENCIES),
    ModelFamily(
        architectures=("Qwen3MoeForCausalLM",), read=read_qwen3_moe, names=_MOE_NAMES, ignored=STORED_FREQUENCIES
    ),
)
