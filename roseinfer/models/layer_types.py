"""Readers of layers of several types: windows, and rotations that differ; without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from roseinfer.attention.rope_spec import RopeSpec
from roseinfer.attention.spec import AttentionSpec
from roseinfer.models.fields import ConfigFields
from roseinfer.models.spec import LayerSpec

# Values of `layer_types`.
FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(fields: ConfigFields, window: int | None, first: int) -> tuple[int | None, ...]:
    """Return `ModelSpec.windows`: layers from `first` on have the window, unless `layer_types` lists them.

    A window that covers the whole context in use has no effect and is left out.
    """
    if window is None and not fields.get("layer_types"):
        return ()
    layers = fields.num_layers()
    default = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return windows_of_types(fields, window, read_layer_types(fields, default, window))


def read_layer_types(fields: ConfigFields, default: Sequence[str], window: int | None) -> list[str]:
    """Return `layer_types`, one for each layer, by default `default`. Sliding layers need a window."""
    if window == 0:
        fields.refuse("sliding_window", window, "a positive integer or null is needed")
    types, layers = fields.get("layer_types") or list(default), fields.num_layers()
    known = (FULL,) if window is None else (FULL, SLIDING)
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        fields.refuse("layer_types", types, f"a list of {layers} of {', '.join(known)} is needed")
    return types


def repeated_types(fields: ConfigFields, pattern: int) -> list[str]:
    """Return types of layers of which each `pattern`-th is a full one, and the others have a window."""
    layers = fields.num_layers()
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]


def read_layers(
    fields: ConfigFields,
    attention: AttentionSpec,
    default_types: Sequence[str],
    ropes: Mapping[str, RopeSpec | None],
    *,
    window: int | None,
) -> tuple[LayerSpec, ...]:
    """Return layers of the types that the config lists. Each type has its rotation; sliding layers have the window."""
    types = read_layer_types(fields, default_types, window)
    windows = windows_of_types(fields, window, types) or (None,) * len(types)
    return tuple(
        LayerSpec(attention=replace(attention, window=width), rope=ropes[kind])
        for kind, width in zip(types, windows, strict=True)
    )


def windows_of_types(fields: ConfigFields, window: int | None, types: Sequence[str]) -> tuple[int | None, ...]:
    """Return the window of each layer, None for full attention; nothing if no layer has a window with an effect."""
    longest = fields.integer("max_position_embeddings")
    if window is None or window >= min(longest, fields.max_model_len or longest):
        return ()
    windows = tuple(window if kind == SLIDING else None for kind in types)
    return windows if any(windows) else ()


def read_one_window(fields: ConfigFields, window: int | None, family: str) -> tuple[int | None, ...]:
    """Return `read_windows` of a family whose layers all have the window."""
    windows = read_windows(fields, window, 0)
    if len(set(windows)) > 1:
        fields.refuse("layer_types", fields.get("layer_types"), f"{family}'s layers have one window")
    return windows
