"""Reader of rotary position embedding in config.json; without torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roseinfer.attention.rope_spec import QueryScale, RopeSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.models.layer_types import FULL, SLIDING


def read_rope(
    fields: ConfigFields,
    head_dim: int,
    *,
    theta: float = 10000.0,
    theta_key: str = "rope_theta",
    interleaved: bool = False,
    partial: float | None = None,
    layer_type: str | None = None,
    aliases: Mapping[str, str] | None = None,
    scaled_queries: bool = False,
    without_effect: Sequence[str] = (),
) -> RopeSpec:
    """Read `rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (earlier versions).

    theta, partial: defaults of `rope_theta` and `partial_rotary_factor`. A family that gives no `partial` rotates whole
    heads. theta_key: the earlier versions' name of `rope_theta`. layer_type: entry of `rope_parameters` that has one
    for each type of layer; a type without one has the defaults, and `rope_scaling` is that of full layers. aliases:
    other names of scalings in a family's configs. scaled_queries: read `llama_4_scaling_beta`. without_effect: further
    fields of `rope_parameters`, which change nothing for texts.
    """
    inner, theta = _scaling_fields(fields, layer_type), fields.number(theta_key, theta)
    inner.ignore(*without_effect)
    kind = _kind(inner, aliases or {})
    width = _rotated_width(inner, fields, head_dim, partial)
    spec = RopeSpec(
        theta=inner.number("rope_theta", theta),
        scaling=kind,
        interleaved=interleaved,
        rotary_dim=None if width == head_dim else width,
        query_scale=_query_scale(inner, fields) if scaled_queries else None,
        **_READERS[kind](inner, fields),
    )
    if spec.theta < 1.0 or (kind == "yarn" and spec.theta == 1.0):  # YaRN divides by its logarithm
        holder, key = (inner, "rope_theta") if "rope_theta" in inner else (fields, theta_key)
        holder.refuse(key, spec.theta, "a number above 1 is needed")
    if kind == "longrope" and len(spec.divisors) != width // 2:
        inner.refuse("short_factor", len(spec.divisors), f"{width // 2} factors are needed, and as many in long_factor")
    inner.refuse_unread()
    return spec


def read_layer_ropes(
    fields: ConfigFields, head_dim: int, *, full: tuple[str, float], sliding: tuple[str, float]
) -> dict[str, RopeSpec]:
    """Return the rotation of each type of layer. full, sliding: earlier name of its theta, and the default."""
    found = {
        kind: read_rope(fields, head_dim, theta_key=key, theta=default, layer_type=kind)
        for kind, (key, default) in ((FULL, full), (SLIDING, sliding))
    }
    given = fields.get("rope_parameters")
    if given and FULL not in given and SLIDING not in given:
        fields.refuse("rope_parameters", given, f"an object each for {FULL} and {SLIDING} is needed")
    return found


def _query_scale(inner: ConfigFields, fields: ConfigFields) -> QueryScale | None:
    inner.ignore("max_position_embeddings")  # a copy of the field outside
    if inner.get("llama_4_scaling_beta") is None:
        return None
    beta = inner.number("llama_4_scaling_beta")
    return QueryScale(beta=beta, original_max_position=_original_context(inner, fields))


def _kind(inner: ConfigFields, aliases: Mapping[str, str]) -> str:
    # `type` is the older name; transformers keeps it when it adds the newer one.
    older, newer = inner.get("type"), inner.get("rope_type")
    found = newer or older or "default"
    kind = aliases.get(found, found) if isinstance(found, str) else None
    if kind is None or kind not in _READERS:
        inner.refuse("rope_type", found, f"known: {', '.join((*_READERS, *aliases))}")
    if older is not None and (not isinstance(older, str) or aliases.get(older, older) != kind):
        inner.refuse("type", older, f"rope_type is {found}")
    return kind


def _rotated_width(inner: ConfigFields, fields: ConfigFields, head_dim: int, default: float | None) -> int:
    key = "partial_rotary_factor"
    fields.get(key)  # transformers 5 writes it in both places, and reads the inner one
    holder = inner if inner.get(key) is not None else fields
    if default is None:
        holder.only(key, 1.0)
        return head_dim
    share = holder.number(key, default)
    width = int(head_dim * share)
    if share > 1.0 or width < 2 or width % 2:
        holder.refuse(key, share, f"it rotates {width} of a head's {head_dim} numbers")
    return width


def _scaling_fields(fields: ConfigFields, layer_type: str | None) -> ConfigFields:
    key = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    data = fields.get(key) or {}
    if not isinstance(data, dict):
        fields.refuse(key, data)
    inner = ConfigFields(data, f"{fields.where} {key}")
    if layer_type is not None and key == "rope_scaling":
        return inner if layer_type == FULL else ConfigFields({}, inner.where)
    if layer_type is None or not any(isinstance(value, dict) for value in data.values()):
        return inner
    for kind, value in data.items():
        if not isinstance(value, dict | None):
            inner.refuse(kind, value, "an object for each type of layer is needed")
    return ConfigFields(data.get(layer_type) or {}, f"{fields.where} {key} {layer_type}")


def _default(inner: ConfigFields, fields: ConfigFields) -> dict[str, Any]:
    return {}


def _linear(inner: ConfigFields, fields: ConfigFields) -> dict[str, Any]:
    return {"factor": inner.number("factor")}


def _llama3(inner: ConfigFields, fields: ConfigFields) -> dict[str, Any]:
    low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
    if high <= low:
        inner.refuse("high_freq_factor", high, f"more than low_freq_factor = {low} is needed")
    original = inner.number("original_max_position_embeddings")
    return {
        "factor": inner.number("factor"),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position": original,
    }


def _yarn(inner: ConfigFields, fields: ConfigFields) -> dict[str, Any]:
    """Read YaRN. The magnitude is `attention_factor`, or follows from the factor: 0.1 * mscale * ln(factor) + 1."""
    original = _original_context(inner, fields)
    factor = inner.number("factor", fields.integer("max_position_embeddings") / original)
    found, whole = inner.get("mscale"), inner.get("mscale_all_dim")
    magnitude = _mscale(factor)
    if found and whole:
        magnitude = _mscale(factor, inner.number("mscale")) / _mscale(factor, inner.number("mscale_all_dim"))
    fast, slow = inner.number("beta_fast", 32.0), inner.number("beta_slow", 1.0)
    if fast < slow:
        inner.refuse("beta_fast", fast, f"at least beta_slow = {slow} is needed")
    return {
        "factor": factor,
        "original_max_position": original,
        "magnitude": inner.number("attention_factor", magnitude),
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": inner.flag("truncate", True),
    }


def _ntk_alpha(inner: ConfigFields, fields: ConfigFields) -> dict[str, Any]:
    """Read Hunyuan's "dynamic" scaling, whose `alpha` makes it the same for all lengths and all else ineffective."""
    if inner.get("alpha") is None:
        inner.refuse("rope_type", "dynamic", "without alpha it depends on the length, which would spoil cached keys")
    inner.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return {"factor": inner.number("alpha")}


def _mscale(factor: float, multiplier: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(inner: ConfigFields, fields: ConfigFields) -> dict[str, Any]:
    """Read LongRoPE (Ding et al., 2024). The context in use chooses between short and long factors, once: choosing by
    the length of each sequence would spoil its cached keys.
    """
    original, longest = _original_context(inner, fields), fields.integer("max_position_embeddings")
    if original <= 1.0:
        inner.refuse("original_max_position_embeddings", original, "more than 1 is needed")
    factor = inner.number("factor", longest / original)
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(original))
    short, long = _divisors(inner, "short_factor"), _divisors(inner, "long_factor")
    if len(short) != len(long):
        inner.refuse("long_factor", len(long), f"as many as in short_factor are needed: {len(short)}")
    return {
        "divisors": long if (fields.max_model_len or longest) > original else short,
        "magnitude": inner.number("attention_factor", magnitude),
        "factor": factor,
        "original_max_position": original,
    }


def _original_context(inner: ConfigFields, fields: ConfigFields) -> float:
    key = "original_max_position_embeddings"
    outer = fields.integer(key, fields.integer("max_position_embeddings"))
    return inner.number(key, outer)


def _divisors(inner: ConfigFields, key: str) -> tuple[float, ...]:
    values = inner.get(key)
    if not isinstance(values, list) or not values or not all(_is_positive(value) for value in values):
        inner.refuse(key, values, "a list of positive numbers is needed")
    return tuple(float(value) for value in values)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 < value < math.inf


_READERS: dict[str, Callable[[ConfigFields, ConfigFields], dict[str, Any]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "ntk_alpha": _ntk_alpha,
    "proportional": lambda inner, fields: {"factor": inner.number("factor", 1.0)},
}
