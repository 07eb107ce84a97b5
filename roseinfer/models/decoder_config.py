"""Readers of config.json fields that several families share; without torch."""

from collections.abc import Sequence
from typing import Any

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.models.rope_config import read_rope
from roseinfer.models.spec import LayerSpec, ModelSpec, NormSpec, uniform_layers

DTYPES = ("float32", "bfloat16", "float16")

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_dtype(fields: ConfigFields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(key, {name: name for name in DTYPES}, "float32")


def read_heads(
    fields: ConfigFields, *, scale: float | None = None, kv_heads: int | None = None, head_dim: int | None = None
) -> AttentionSpec:
    """Return heads, KV heads and their width, without a window.

    scale: of scores, by default head_dim^-0.5. kv_heads, head_dim: a family's defaults of absent fields. Without one,
    and for null, there are as many KV heads as heads, and the heads divide the hidden size.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = _integer_or_null(fields, "num_key_value_heads", kv_heads, heads)
    width = _integer_or_null(fields, "head_dim", head_dim, hidden // heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}")
    if width % 2:
        fields.refuse("head_dim", width, "rotary embedding needs an even one")
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=width, scale=scale or width**-0.5)


def _integer_or_null(fields: ConfigFields, key: str, absent: int | None, null: int) -> int:
    return fields.integer(key, null if absent is None or key in fields else absent)


def read_decoder(
    fields: ConfigFields,
    architecture: str,
    *,
    windows: Sequence[int | None] = (),
    attention: AttentionSpec | None = None,
    rope: RopeSpec | None = None,
    layers: tuple[LayerSpec, ...] | None = None,
    norm: NormSpec | None = None,
    **options: Any,
) -> ModelSpec:
    """Return the spec of Llama or a relative: rotary positions, grouped KV heads, and by default RMSNorm and a gated
    MLP. What is not given is read from the fields with Llama's names. `layers`: in place of equal ones with `windows`,
    `attention` and `rope`.
    """
    if layers is None:
        attention = attention or read_heads(fields)
        rope = rope or read_rope(fields, attention.head_dim)
        layers = uniform_layers(fields.num_layers(), attention, rope, windows)
    values: dict[str, Any] = {"max_position": fields.integer("max_position_embeddings")}
    if "activation" not in options:
        values["activation"] = fields.choice("hidden_act", ACTIVATIONS, "silu")
    if "tied_embeddings" not in options:
        values["tied_embeddings"] = fields.flag("tie_word_embeddings", False)
    if "intermediate_size" not in options:
        values["intermediate_size"] = fields.integer("intermediate_size")
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden_size=fields.integer("hidden_size"),
        vocab_size=fields.integer("vocab_size"),
        norm=norm or NormSpec(eps=fields.number("rms_norm_eps", 1e-6)),
        dtype=read_dtype(fields),
        **values | options,
    )


def optional_integer(fields: ConfigFields, key: str, default: int | None) -> int | None:
    """Return a number of tokens or layers (at least 0) or null; `default` if the field is missing."""
    value = fields.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        fields.refuse(key, value, "an integer of at least 0, or null, is needed")
    return value
