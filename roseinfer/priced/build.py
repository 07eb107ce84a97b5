"""Construction of a priced runner from options and a model's folder, of which only config and tokenizer are read."""

import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from roseinfer.core.adapters import AdapterFiles
from roseinfer.core.clock import SleepingClock
from roseinfer.core.config.adapters import AdapterConfig
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig, ProfileConfig
from roseinfer.core.errors import ConfigError, UnsupportedModelError
from roseinfer.core.plan import StepLimits
from roseinfer.core.runner import Runner, RunnerFacts, StatePool
from roseinfer.models.documents import read_config, text_fields
from roseinfer.models.generation import read_generation_config
from roseinfer.priced.adapters import AdapterMachine, PricedAdapterFiles
from roseinfer.priced.drawn import DrawnRunner, DrawnVocabulary
from roseinfer.priced.machine import Machine, PricedRunner
from roseinfer.sched.cost.file import read_cost
from roseinfer.text.tokenizer import Tokenizer

# The default of `roseinfer simulate`, since there is no memory to measure.
DEFAULT_BLOCKS = 8192
# Fields of config.json for the context length, by kind of model.
_CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
# Options without meaning for a priced engine; values other than the default are an error.
_OF_MODELS = {
    ModelConfig: (
        "runner",
        "pooling",
        "dtype",
        "quantization",
        "lm_head_dtype",
        "load_format",
        "generation_config",
        "override_generation_config",
        "attention_backend",
        "enforce_eager",
        "threads",
    ),
    CacheConfig: (
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "gpu_memory_utilization",
        "enable_window_groups",
        "typical_context",
    ),
    ProfileConfig: ("profile",),
}
_LAYERS, _HEADS = ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head")
_WORD = re.compile(rb" [A-Za-z]{2,12}")
_MIN_WORDS = 64
_CLOSERS = frozenset((b'"', b"}", b"]", b'"}', b'"]', b"}]", b"}}", b"]}", b">", b")"))


def build_priced(config: EngineConfig, folder: Path, tokenizer_folder: Path) -> tuple[Runner, RunnerFacts]:
    """Build the runner. Raise `ConfigError` naming an invalid or meaningless option, or `UnsupportedModelError`."""
    started = time.monotonic()
    check_model_options(config)
    priced = config.priced
    if priced.cost is None:
        raise ConfigError("cost is required with device=priced: a file written by `roseinfer calibrate`")
    if len(priced.slow_list) > 1:
        raise ConfigError(f"slow: got {len(priced.slow_list)} factors for one engine")
    cost = read_cost(priced.cost)
    model = text_fields(read_config(folder))
    blocks = config.cache.num_kv_blocks or DEFAULT_BLOCKS
    max_model_len = _context(config, model, blocks * config.cache.block_size)
    eos_ids = read_generation_config(folder).eos_token_ids
    vocabulary = read_vocabulary(tokenizer_folder, _found(model, "vocab_size"), eos_ids)
    limits = StepLimits.of(config.scheduler, max_model_len, config.max_step_drafts)
    factor = next(iter(priced.slow_list), 1.0)
    lora, slowdown = AdapterMachine.of(config.adapters), ((0.0, factor),) if factor != 1 else ()
    machine = Machine(cost, priced.noise, slowdown=slowdown, adapters=lora)
    drawn = DrawnRunner(vocabulary, priced.mean_output_len, limits)
    host_blocks, block_bytes = _host_blocks(config.cache, model)
    facts = RunnerFacts(
        model_type=_architecture(model),
        max_model_len=max_model_len,
        num_blocks=blocks,
        block_size=config.cache.block_size,
        prefix_caching=config.cache.enable_prefix_caching,
        limits=limits,
        vocab_size=vocabulary.size,
        eos_token_ids=eos_ids,
        dtype="none",
        weights="none",
        device="priced",
        default_sampling={},
        startup_s={"load": time.monotonic() - started},
        num_host_blocks=host_blocks,
        load_s=factor * cost.load_s if host_blocks else 0.0,
        store_s=factor * cost.store_s if host_blocks else 0.0,
        experts=cost.experts,
        reads=cost.reads,
        block_bytes=block_bytes,
        states=None if config.cache.state_slots is None else StatePool(config.cache.state_slots, 0),
        adapters=None if lora is None else lora.pool,
    )
    return PricedRunner(drawn, machine, SleepingClock(), config.model.seed), facts


def priced_adapter_files(config: AdapterConfig) -> AdapterFiles | None:
    """Return the reader of adapters of a priced engine; None without adapters. No file is opened."""
    machine = AdapterMachine.of(config)
    return None if machine is None else PricedAdapterFiles(machine, SleepingClock(), config.named)


def check_model_options(config: EngineConfig) -> None:
    """Raise `ConfigError` for an option that would be ignored."""
    for part in (config.model, config.cache, config.profile):
        for f in fields(part):
            if f.name in _OF_MODELS[type(part)] and getattr(part, f.name) != f.default:
                raise ConfigError(f"{f.name} is not supported with device=priced, which has no model")


def read_vocabulary(folder: Path, size: int | None, eos_ids: tuple[int, ...]) -> DrawnVocabulary:
    """Read the words of a tokenizer: tokens of a space and letters, or all printable ones if these are too few.

    `size`: size of the model's vocabulary; by default the tokenizer's. Raise `UnsupportedModelError`.
    """
    tokenizer = Tokenizer.from_folder(folder)
    size = size or tokenizer.vocab_size
    never = tokenizer.special_ids | set(eos_ids)
    texts = {id: tokenizer.token_bytes(id) for id in range(min(size, tokenizer.vocab_size)) if id not in never}
    words = [id for id, text in texts.items() if _WORD.fullmatch(text)]
    if len(words) < _MIN_WORDS:
        words = [id for id, text in texts.items() if text and text.decode("utf-8", "replace").isprintable()]
    if not words:
        raise UnsupportedModelError(f"{folder}: the tokenizer has no printable token")
    closers = [id for id, text in texts.items() if text in _CLOSERS]
    return DrawnVocabulary(size, words, closers, eos_ids)


def _found(model: dict[str, Any], *names: str) -> int | None:
    """Return the first of these numbers that a config has; multimodal models have them in `text_config`."""
    inner = model.get("text_config")
    for part in (model, inner if isinstance(inner, dict) else {}):
        for name in names:
            value = part.get(name)
            if type(value) is int and value > 0:
                return value
    return None


def _context(config: EngineConfig, model: dict[str, Any], cache_tokens: int) -> int:
    """Return `max_model_len`, which may exceed the model's; by default the model's, bounded by the cache."""
    wanted = config.model.max_model_len
    if wanted is None:
        return min(_found(model, *_CONTEXTS) or cache_tokens, cache_tokens)
    if wanted > cache_tokens:
        raise ConfigError(
            f"max_model_len is {wanted}, but the KV cache holds {cache_tokens} tokens; raise num_kv_blocks"
        )
    return wanted


def _host_blocks(cache: CacheConfig, model: dict[str, Any]) -> tuple[int, int]:
    """Return the KV blocks (K and V in 16 bits) that `kv_offloading_size` holds, and the bytes of one.

    No memory is allocated.
    """
    if not cache.kv_offloading_size:
        return 0, 0
    layers, heads = (_found(model, *names) for names in (_LAYERS, _HEADS))
    kv_heads, width = _found(model, "num_key_value_heads") or heads, _found(model, "hidden_size", "n_embd")
    head_dim = _found(model, "head_dim") or (width // heads if width and heads else None)
    if not (layers and kv_heads and head_dim):
        raise ConfigError("kv_offloading_size: the model's config lacks the size of a KV block")
    block_bytes = layers * 2 * cache.block_size * kv_heads * head_dim * 2
    blocks = int(cache.kv_offloading_size * 2**30) // block_bytes
    if not blocks:
        size = f"{cache.kv_offloading_size:g} GiB"
        raise ConfigError(f"kv_offloading_size is {size}, less than a KV block of {block_bytes} bytes")
    return blocks, block_bytes


def _architecture(model: dict[str, Any]) -> str:
    names = model.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "unknown"
