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
# Values of `layer_types`.
FULL, SLIDING = "full_attention", "sliding_attention"


def read_dtype(fields: ConfigFields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(key, {name: name for name in DTYPES}, "float32")


def read_heads(fields: ConfigFields, *, scale: float | None = None) -> AttentionSpec:
    """Return heads, KV heads and their width, without a window. `scale`: of scores, by default head_dim^-0.5."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}")
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary embedding needs an even one")
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=scale or head_dim**-0.5)


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
        layers = uniform_layers(fields.integer("num_hidden_layers"), attention, rope, windows)
    values: dict[str, Any] = {
        "max_position": fields.integer("max_position_embeddings"),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "silu"),
    }
    if "tied_embeddings" not in options:
        values["tied_embeddings"] = fields.flag("tie_word_embeddings", False)
    return ModelSpec(
        architecture=architecture,
        layers=layers,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm=norm or NormSpec(eps=fields.number("rms_norm_eps", 1e-6)),
        dtype=read_dtype(fields),
        **values | options,
    )


def read_windows(
    fields: ConfigFields, window: int | None, first: int, max_model_len: int | None
) -> tuple[int | None, ...]:
    """Return `ModelSpec.windows`: layers from `first` on have the window, unless `layer_types` lists them.

    A window that covers the whole context in use has no effect and is left out.
    """
    if window == 0:
        fields.refuse("sliding_window", window, "a positive integer or null is needed")
    types = fields.get("layer_types")
    if window is None and not types:
        return ()
    layers = fields.integer("num_hidden_layers")
    types = types or [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    known = (FULL, SLIDING) if window else (FULL,)
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        fields.refuse("layer_types", types, f"a list of {layers} of {', '.join(known)} is needed")
    longest = fields.integer("max_position_embeddings")
    if window is None or window >= min(longest, max_model_len or longest):
        return ()
    windows = tuple(window if kind == SLIDING else None for kind in types)
    return windows if any(windows) else ()


def read_one_window(
    fields: ConfigFields, window: int | None, max_model_len: int | None, family: str
) -> tuple[int | None, ...]:
    """Return `read_windows` of a family whose layers all have the window."""
    windows = read_windows(fields, window, 0, max_model_len)
    if len(set(windows)) > 1:
        fields.refuse("layer_types", fields.get("layer_types"), f"{family}'s layers have one window")
    return windows


def optional_integer(fields: ConfigFields, key: str, default: int | None) -> int | None:
    """Return a number of tokens or layers (at least 0) or null; `default` if the field is missing."""
    value = fields.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        fields.refuse(key, value, "an integer of at least 0, or null, is needed")
    return value
