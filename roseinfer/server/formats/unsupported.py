"""Fields of requests that the server does not act on.

A field is rejected by name if ignoring it would change the answer. Any other is accepted and named in the warnings.
Null, or a value that has no effect, is accepted silently.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from roseinfer.server.http.errors import ApiError, bad_request

# True if a value has an effect.
HasEffect = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Unsupported:
    """Field that is rejected if `has_effect` is true of its value. `why` completes "`field` is not supported: "."""

    why: str
    has_effect: HasEffect
    code: str = "unsupported_field"

    def check(self, name: str, value: Any) -> None:
        """Raise `ApiError` 400 if field `name` has a value with an effect."""
        if value is not None and self.has_effect(value):
            raise unsupported_error(name, self.why, self.code)


def supported(fields: dict[str, Any], unsupported: Mapping[str, Unsupported]) -> dict[str, Any]:
    """Return the fields that are not `unsupported`. Raises `ApiError` 400 if another one has an effect."""
    for name, value in fields.items():
        if name in unsupported:
            unsupported[name].check(name, value)
    return {name: value for name, value in fields.items() if name not in unsupported}


def unsupported_error(name: str, why: str, code: str = "unsupported_field") -> ApiError:
    return bad_request(f"{name[:100]} is not supported: {why}", name[:100], code)


def always(value: Any) -> bool:
    return True


def never(value: Any) -> bool:
    return False


def if_set(value: Any) -> bool:
    return bool(value)


def unless(*harmless: Any) -> HasEffect:
    return lambda value: all(value != known or type(value) is not type(known) for known in harmless)


_SYNTAX = "constraints are fields of structured_outputs"
_TOOLS = "tools are fields of chat completions"
_REASONING = "completions do not separate reasoning from text"
_DISAGGREGATED = "prefill on another server is not available"
_BEAM = "beam search is not available"
_MEDIA = "input and output are text only"

UNSUPPORTED: dict[str, Unsupported] = {
    "regex": Unsupported(_SYNTAX, always),
    "json_schema": Unsupported(_SYNTAX, always),
    "ebnf": Unsupported(_SYNTAX, always),
    "grammar": Unsupported(_SYNTAX, always),
    "tools": Unsupported(_TOOLS, if_set),
    "tool_choice": Unsupported(_TOOLS, unless("none", "auto")),
    "functions": Unsupported("use tools of chat completions", always),
    "function_call": Unsupported("use tool_choice of chat completions", unless("none")),
    "use_beam_search": Unsupported(_BEAM, unless(False)),
    "length_penalty": Unsupported(_BEAM, unless(1, 1.0)),
    "early_stopping": Unsupported(_BEAM, unless(False)),
    "suffix": Unsupported("infilling is not available", if_set),
    "truncate_prompt_tokens": Unsupported("this route does not truncate prompts", always),  # a field elsewhere
    "truncation_side": Unsupported("prompts are truncated at their start", unless("left")),
    "echo": Unsupported("a chat does not return its messages", unless(False)),
    "documents": Unsupported("documents are not passed to the chat template", if_set),
    "return_prompt_text": Unsupported("the rendered prompt is not returned", unless(False)),
    "reasoning_effort": Unsupported("only chats have a reasoning effort", always),
    "thinking_token_budget": Unsupported(_REASONING, unless(-1)),
    "thinking_budget": Unsupported(_REASONING, unless(-1)),
    "include_reasoning": Unsupported("reasoning is always returned", unless(True)),
    "separate_reasoning": Unsupported("use the server option --no-reasoning", unless(True)),
    "repetition_detection": Unsupported("repetition does not end an output", if_set),
    "stop_regex": Unsupported("use stop or stop_token_ids", if_set),
    "typical_p": Unsupported("typical sampling is not available", unless(1, 1.0)),
    "n_predict": Unsupported("use max_tokens", unless(-1)),
    "num_predict": Unsupported("use max_tokens", unless(-1)),
    "max_new_tokens": Unsupported("use max_tokens", always),
    "min_new_tokens": Unsupported("use min_tokens", unless(0)),
    "no_stop_trim": Unsupported("use include_stop_str_in_output", unless(False)),
    "repeat_penalty": Unsupported("use repetition_penalty", unless(1, 1.0)),
    "mirostat": Unsupported("mirostat sampling is not available", unless(0)),
    "dry_multiplier": Unsupported("DRY sampling is not available", unless(0, 0.0)),
    "xtc_probability": Unsupported("XTC sampling is not available", unless(0, 0.0)),
    "tfs_z": Unsupported("tail-free sampling is not available", unless(1, 1.0)),
    "top_n_sigma": Unsupported("top-n-sigma sampling is not available", unless(-1, -1.0)),
    "watermarking": Unsupported("watermarking is not available", unless(False)),
    "watermark": Unsupported("watermarking is not available", unless(False)),
    "logprob_token_ids": Unsupported("log probabilities are those of the most likely tokens", if_set),
    "logits_processors": Unsupported("requests cannot contain code", if_set),
    "custom_logit_processor": Unsupported("requests cannot contain code", if_set),
    "custom_params": Unsupported("requests cannot contain code", if_set),
    "vllm_xargs": Unsupported("extension arguments are not available", if_set),
    "lora_path": Unsupported("name an adapter as the model", if_set),
    "return_hidden_states": Unsupported("hidden states are not returned", unless(False)),
    "return_routed_experts": Unsupported("routed experts are not returned", unless(False)),
    "kv_transfer_params": Unsupported(_DISAGGREGATED, if_set),
    "ec_transfer_params": Unsupported(_DISAGGREGATED, if_set),
    "moderation": Unsupported("moderation is not available", always),
    "prompt_embeds": Unsupported("prompts are text or token ids", always),
    "chat_template": Unsupported("the server's own template is used", always),
    "modalities": Unsupported(_MEDIA, unless(["text"])),
    "audio": Unsupported(_MEDIA, always),
    "mm_processor_kwargs": Unsupported(_MEDIA, if_set),
    "media_io_kwargs": Unsupported(_MEDIA, if_set),
    "images": Unsupported(_MEDIA, if_set),
    "options": Unsupported("sampling parameters are fields of the request itself", if_set),
    "format": Unsupported("use response_format", if_set),
    "system": Unsupported("use a chat with a message of the role system", if_set),
    "web_search_options": Unsupported("web search is not available", always),
}

_UNKNOWN_GUIDED = Unsupported(_SYNTAX, always)
# Fields that may be ignored, and which of their values have an effect.
HINTS: dict[str, HasEffect] = {
    "parallel_tool_calls": never,
    "best_of": never,  # checked below
    "safety_identifier": never,
    "prompt_cache_key": never,
    "prompt_cache_retention": unless("in_memory"),
    "prompt_cache_options": if_set,
    "prediction": if_set,
    "metadata": if_set,
    "store": if_set,
    "verbosity": unless("medium"),
    "spaces_between_special_tokens": unless(True),
}
# Service tiers that leave the choice to the server.
ANY_TIER = frozenset({None, "auto", "default", "standard_only"})


def check_extras(extras: dict[str, Any], n: int = 1) -> list[str]:
    """Return the names of ignored fields. Raises `ApiError` 400 for fields that must not be ignored. `n`: samples."""
    if not extras:
        return []
    ignored = []
    for name, value in extras.items():
        unsupported = UNSUPPORTED.get(name) or (_UNKNOWN_GUIDED if name.startswith("guided_") else None)
        if unsupported is not None:
            unsupported.check(name, value)
        elif HINTS.get(name, always)(value):
            ignored.append(name[:100])
    _check_best_of(extras.get("best_of"), n)
    return ignored


def _check_best_of(best_of: Any, n: int) -> None:
    if best_of is not None and (type(best_of) is not int or best_of != n):
        message = f"best_of must equal n ({n}): all samples are returned"
        raise bad_request(message, "best_of", "unsupported_field")
