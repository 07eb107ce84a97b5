"""Limits of the loaded model that its user should know, for the log of the start."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from roseinfer.attention.groups import KVGroups
from roseinfer.core.config.engine import CacheConfig, ModelConfig
from roseinfer.models.documents import find_unrecorded_window
from roseinfer.models.spec import VISION_TOWER, ModelSpec

log = logging.getLogger(__name__)


def log_start_notes(
    spec: ModelSpec,
    model: Path,
    max_model_len: int,
    groups: KVGroups,
    num_blocks: Sequence[int],
    num_slots: int,
    *,
    hosted: bool,
) -> None:
    """Log all that is known of a model. `model`: its folder or file. `num_blocks`: of each KV group. `num_slots`: of
    recurrent states. `hosted`: there are blocks in host memory.
    """
    if num_slots:
        log.info("there are %d slots for recurrent states, of running requests and of cached prefixes", num_slots)
    for note in start_notes(spec, max_model_len, groups, num_blocks, hosted=hosted):
        log.info("%s", note)
    warning = window_warning(model, max_model_len)
    if warning is not None:
        log.warning("%s", warning)


def warn_of_unused_sizes(cache: CacheConfig, groups: KVGroups, num_slots: int) -> None:
    """Log options of the cache that change nothing for this model. `num_slots`: of recurrent states."""
    if cache.state_slots is not None and not num_slots:
        log.warning("state_slots is ignored: the model has no recurrent states")
    if cache.typical_context is not None and not groups.windows and not num_slots:
        log.warning("typical_context is ignored: the model has neither KV groups for windows nor recurrent states")


def warn_of_small_cache(wanted: int | None, model_context: int, cache_tokens: int) -> None:
    """Log that the KV cache shortens the context. `wanted`: the context that was asked for."""
    if wanted is None and cache_tokens < model_context:
        log.warning(
            "the context is %d tokens instead of the model's %d: the KV cache has no room for more "
            "(num_kv_blocks, kv_cache_memory_bytes or gpu_memory_utilization set its size)",
            cache_tokens,
            model_context,
        )


def without_head(model: ModelConfig) -> ModelConfig:
    """Return the options of a model whose output head is not used. Log an option for it, which changes nothing."""
    if model.lm_head_dtype == "auto":
        return model
    log.warning("lm_head_dtype is ignored: the model has no output head")
    return replace(model, lm_head_dtype="auto")


def start_notes(
    spec: ModelSpec, max_model_len: int, groups: KVGroups, num_blocks: Sequence[int], *, hosted: bool = False
) -> Iterator[str]:
    """Yield a sentence for each limit. `max_model_len`: longest context in tokens."""
    for part in spec.left_out:
        rejected = ": requests with images are rejected" if part == VISION_TOWER else ""
        yield f"the checkpoint's {part} is left out{rejected}"
    share = share_beyond_windows(spec, max_model_len)
    windowed = sum(window is not None for window in spec.windows)
    if groups.windows:
        pools = ", ".join(
            f"{blocks} for windows of {window} tokens"
            for blocks, window in zip(num_blocks[1:], groups.windows, strict=True)
        )
        yield (
            f"{windowed} of {spec.num_layers} layers keep K and V of their window only: KV blocks are {num_blocks[0]} "
            f"for all tokens, {pools}. In a context of {max_model_len} tokens this saves {share:.0%} of the KV memory"
        )
    elif share:
        why = ", as blocks in host memory hold all layers" if hosted and None in spec.windows else ""
        yield (
            f"{windowed} of {spec.num_layers} layers attend to a window only, but keep K and V of all tokens{why}: "
            f"in a context of {max_model_len} tokens, {share:.0%} of the KV memory is beyond the windows"
        )


def window_warning(model: Path, max_model_len: int) -> str | None:
    """Return a warning if contexts exceed a window that the model's file does not record."""
    missing = find_unrecorded_window(model)
    if missing is None or max_model_len <= missing.tokens:
        return None
    return (
        f"{missing.model} has a window of {missing.tokens} tokens, which its GGUF file does not record: tokens beyond "
        f"it are read too, and long contexts differ from the original's (to avoid it: --max-model-len {missing.tokens})"
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
