"""Readers of config.json of models with experts, Qwen3-MoE and Mixtral; without torch."""

from typing import Any

from roseinfer.models.decoder_config import optional_integer, read_decoder, read_one_window
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ExpertsSpec, ModelSpec


def read_qwen3_moe(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    fields.need("num_key_value_heads")  # transformers defaults to 4
    fields.only("use_qk_norm", True)
    fields.only("qkv_bias", False, hint="attention_bias says whether there are biases")
    bias = fields.flag("attention_bias", False)
    window = optional_integer(fields, "sliding_window", 4096)
    optional_integer(fields, "max_window_layers", 0)  # either all layers have the window or none
    window = window if fields.flag("use_sliding_window", False) else None
    windows = read_one_window(fields, window, max_model_len, "Qwen3-MoE")
    experts = _read_experts(
        fields,
        width=fields.integer("moe_intermediate_size"),
        renormalise=fields.flag("norm_topk_prob", False),
        dense_layers=_read_dense_layers(fields),
    )
    options: dict[str, Any] = {"qkv_bias": bias, "o_bias": bias, "qk_norm": True, "experts": experts}
    return read_decoder(fields, architecture, windows, **options)


def read_mixtral(fields: ConfigFields, architecture: str, max_model_len: int | None) -> ModelSpec:
    # Their defaults differ from those of related models.
    fields.need("num_key_value_heads", "rms_norm_eps")
    if fields.get("rope_parameters") is None:
        fields.need("rope_theta")
    windows = read_one_window(fields, optional_integer(fields, "sliding_window", None), max_model_len, "Mixtral")
    experts = _read_experts(fields, width=fields.integer("intermediate_size"), renormalise=True, dense_layers=())
    return read_decoder(fields, architecture, windows, experts=experts)


def _read_experts(
    fields: ConfigFields, *, width: int, renormalise: bool, dense_layers: tuple[int, ...]
) -> ExpertsSpec | None:
    """Return the experts of the model; None if all layers are dense."""
    older, newer = fields.get("num_experts"), fields.get("num_local_experts")
    if None not in (older, newer) and older != newer:
        fields.refuse("num_local_experts", newer, f"num_experts = {older}")
    count = fields.integer("num_experts" if newer is None else "num_local_experts")
    top_k = fields.integer("num_experts_per_tok")
    if top_k > count:
        fields.refuse("num_experts_per_tok", top_k, f"there are {count} experts")
    if len(dense_layers) == fields.integer("num_hidden_layers"):
        return None
    return ExpertsSpec(count=count, top_k=top_k, width=width, renormalise=renormalise, dense_layers=dense_layers)


def _read_dense_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Return the layers without experts: those that are listed, and all but every `decoder_sparse_step`-th."""
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    named = fields.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in named):
        fields.refuse("mlp_only_layers", named, f"a list of numbers of the {layers} layers is needed")
    dense = set(named)
    return tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % step)
