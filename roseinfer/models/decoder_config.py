"""Readers of config.json fields that several families share; without torch."""

from typing import Any

from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import ModelSpec, RopeSpec

DTYPES = ("float32", "bfloat16", "float16")

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Values of `layer_types`.
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_FIELDS = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
}


def read_dtype(fields: ConfigFields) -> str:
    key = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    return fields.choice(key, {name: name for name in DTYPES}, "float32")


def read_decoder(fields: ConfigFields, architecture: str, windows: tuple[int | None, ...], **options: Any) -> ModelSpec:
    """Return the spec of Llama or a relative: RMSNorm, rotary positions, gated MLP, grouped KV heads."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    head_dim = fields.integer("head_dim", hidden // heads)
    if heads % kv_heads:
        fields.refuse("num_key_value_heads", kv_heads, f"it does not divide num_attention_heads = {heads}")
    if head_dim % 2:
        fields.refuse("head_dim", head_dim, "rotary embedding needs an even one")
    return ModelSpec(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        rope=_rope(fields),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        dtype=read_dtype(fields),
        windows=windows,
        **options,
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
    types = types or [_SLIDING if window and layer >= first else _FULL for layer in range(layers)]
    known = (_FULL, _SLIDING) if window else (_FULL,)
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        fields.refuse("layer_types", types, f"a list of {layers} of {', '.join(known)} is needed")
    longest = fields.integer("max_position_embeddings")
    if window is None or window >= min(longest, max_model_len or longest):
        return ()
    windows = tuple(window if kind == _SLIDING else None for kind in types)
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


def _rope(fields: ConfigFields) -> RopeSpec:
    """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (earlier versions)."""
    theta = fields.number("rope_theta", 10000.0)
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    data = fields.get(key) or {}
    if not isinstance(data, dict):
        fields.refuse(key, data)
    inner = ConfigFields(data, f"{fields.where} {key}")
    # `type` is the older name; transformers keeps it when it adds the newer one.
    older = inner.get("type")
    kind = inner.get("rope_type") or older or "default"
    if kind not in list(_ROPE_FIELDS):
        inner.refuse("rope_type", kind, f"known: {', '.join(_ROPE_FIELDS)}")
    if older not in (None, kind):
        inner.refuse("type", older, f"rope_type is {kind}")
    for holder in (fields, inner):
        if holder.get("partial_rotary_factor") not in (None, 1.0):
            holder.refuse("partial_rotary_factor", holder.get("partial_rotary_factor"))
    values = {ours: inner.number(theirs) for theirs, ours in _ROPE_FIELDS[kind].items()}
    spec = RopeSpec(theta=inner.number("rope_theta", theta), scaling=kind, **values)
    if spec.theta < 1.0:
        (inner if "rope_theta" in inner else fields).refuse("rope_theta", spec.theta, "a number of 1 or more is needed")
    if kind == "llama3" and spec.high_freq_factor <= spec.low_freq_factor:
        hint = f"more than low_freq_factor = {spec.low_freq_factor} is needed"
        inner.refuse("high_freq_factor", spec.high_freq_factor, hint)
    inner.refuse_unread()
    return spec
