"""Limits of the loaded model that its user should know, for the log of the start."""

from collections.abc import Iterator

from roseinfer.models.spec import ModelSpec


def start_notes(spec: ModelSpec, max_model_len: int) -> Iterator[str]:
    """Yield a sentence for each limit. `max_model_len`: longest context in tokens."""
    for part in spec.left_out:
        yield f"the checkpoint's {part} is left out: requests with images are rejected"
    share = share_beyond_windows(spec, max_model_len)
    if share:
        windowed = sum(window is not None for window in spec.windows)
        yield (
            f"{windowed} of {spec.num_layers} layers attend to a window only, but keep K and V of all tokens: "
            f"in a context of {max_model_len} tokens, {share:.0%} of the KV memory is beyond the windows"
        )


def share_beyond_windows(spec: ModelSpec, context: int) -> float:
    """Return the share of a context's KV memory that no later token reads, since it is beyond a layer's window."""
    kept = [layer.kv_heads * layer.head_dim for layer in spec.attention]
    beyond = (
        width * max(0, context - layer.window)
        for width, layer in zip(kept, spec.attention, strict=True)
        if layer.window is not None
    )
    return sum(beyond) / (sum(kept) * context)
