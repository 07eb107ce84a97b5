"""vLLM's `--speculative-config` as our option `speculation`: fields that count, are ignored, or are refused by name."""

import json
from collections.abc import Mapping
from typing import Any

from roseinfer.core.config.speculation import MAX_DRAFTS, MAX_MATCH_TOKENS
from roseinfer.core.errors import ConfigError

_METHODS = {
    "ngram": "ngram",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "suffix",
    "mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
    "eagle3": "eagle3",
}
# Fields of each method -> the value of ours that they set.
_VALUES = {
    "ngram": {"prompt_lookup_min": "min", "prompt_lookup_max": "max"},
    "suffix": {
        "suffix_decoding_max_spec_factor": "factor",
        "suffix_decoding_min_token_prob": "chance",
        "suffix_decoding_corpus_tokens": "corpus",
    },
    "mtp": {},
    "eagle3": {},
}
_CACHED = "suffix_decoding_max_cached_requests"
_PRICED = "each step verifies as many drafts as pay"
_HEADS = "it tunes draft models"
_IGNORED = {
    **dict.fromkeys(
        ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "disable_by_batch_size"), _PRICED
    ),
    **dict.fromkeys(
        (
            "draft_tensor_parallel_size",
            "max_model_len",
            "quantization",
            "attention_backend",
            "kv_cache_dtype",
            "disable_eagle_block_drop",
            "disable_padded_drafter_batch",
            "draft_sample_method",
            "enforce_eager",
            "moe_backend",
            "revision",
        ),
        _HEADS,
    ),
    "disable_log_stats": "metrics are always on",
}
# vLLM's own names of n-grams in place of a model.
_NO_MODELS = (None, "ngram", "[ngram]")


def speculation_of(config: Any, shown: str) -> tuple[str, list[str]]:
    """Return the text of our option, and a line about each field that is ignored or changed.

    `shown`: the option's name in messages. Raise `ConfigError` for methods and fields that are not supported.
    """
    fields = {name: value for name, value in _fields(config, shown).items() if value is not None}
    notes: list[str] = []
    name = str(fields.pop("method", None) or ("ngram" if fields.get("model") in _NO_MODELS[1:] else ""))
    method = _METHODS.get(name)
    if method is None:
        raise ConfigError(f"{shown}: method {name!r} is not supported (expected {', '.join(_VALUES)})")
    model = fields.pop("model", None)
    if method != "eagle3" and model not in _NO_MODELS:
        raise ConfigError(f"{shown}: method {name!r} has no model, got {model!r}")
    values = _tokens(method, fields, notes, shown)
    for field, value in fields.items():
        if field in _VALUES[method]:
            values[_VALUES[method][field]] = value
        elif field == _CACHED:
            if value == 0:
                values["corpus"] = 0
            else:
                notes.append(f"{shown}: {field} is ignored: finished outputs are bounded by their tokens")
        elif field in _IGNORED:
            notes.append(f"{shown}: {field} is ignored: {_IGNORED[field]}")
        elif field == "rejection_sample_method" and value != "synthetic":
            notes.append(f"{shown}: {field} is ignored: outputs are what they are without drafts")
        elif any(field in own for own in _VALUES.values()):
            notes.append(f"{shown}: {field} is ignored: it has no effect on method {name!r}")
        else:
            raise ConfigError(f"{shown}: {field} is not supported")
    _bound_matches(values, notes, shown)
    path = f":{model}" if method == "eagle3" else ""
    return ",".join([method + path, *(f"{key}={value}" for key, value in values.items())]), notes


def _fields(config: Any, shown: str) -> Mapping[str, Any]:
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError:
            config = None
    if not isinstance(config, dict):
        raise ConfigError(f'{shown} must be a JSON object, such as {{"method": "ngram"}}')
    return config


def _tokens(method: str, fields: dict[str, Any], notes: list[str], shown: str) -> dict[str, Any]:
    """Take the fields that bound the drafts of a step."""
    names = ["num_speculative_tokens"] + (["suffix_decoding_max_tree_depth"] if method == "suffix" else [])
    given = [_count(name, fields.pop(name), shown) for name in names if name in fields]
    if not given:
        return {}
    if min(given) > MAX_DRAFTS:
        notes.append(f"{shown}: at most {MAX_DRAFTS} tokens are guessed for a request in a step, not {min(given)}")
    return {"tokens": min(*given, MAX_DRAFTS)}


def _count(name: str, value: Any, shown: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{shown}: {name} must be a positive integer, got {value!r}")
    return value


def _bound_matches(values: dict[str, Any], notes: list[str], shown: str) -> None:
    """Bring the lengths of matches into our bounds. One given length holds for both, as in vLLM."""
    for name, other in (("min", "max"), ("max", "min")):
        if name in values:
            asked = _count(f"prompt_lookup_{name}", values[name], shown)
            values[name] = min(max(asked, 2), MAX_MATCH_TOKENS)
            if values[name] != asked:
                notes.append(f"{shown}: prompt_lookup_{name} is {values[name]}, not {asked}")
            values.setdefault(other, values[name])
