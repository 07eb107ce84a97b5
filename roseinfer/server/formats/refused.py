"""Fields that would change the meaning of the answer and that this server cannot honour: asking for them is a 400.

A field is refused only when it asks for something; null or an empty default passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roseinfer.server.http.errors import bad_request

Asks = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`asks` says whether a (non-null) value asks for something; `why` completes "`field` is not supported: "."""

    why: str
    asks: Asks


def _always(value: Any) -> bool:
    return True


def _if_set(value: Any) -> bool:
    return bool(value)


def _unless(*harmless: Any) -> Asks:
    return lambda value: all(value != known or type(value) is not type(known) for known in harmless)


_GUIDED = "constrained output (guided_* fields, now structured_outputs) is not available"
_TOOLS = "tool calling is not available"
_SYNTAX = "constrained output is not available"
_REASONING = "reasoning is not told apart from the rest of the output"
_DISAGGREGATED = "prompts are not computed elsewhere"
_BEAM = "there is no beam search"
_MEDIA = "the server takes and gives text only"

REFUSALS: dict[str, Refusal] = {
    "response_format": Refusal("only {'type': 'text'} is available", _unless({"type": "text"})),
    "structured_outputs": Refusal(_SYNTAX, _always),
    "regex": Refusal(_SYNTAX, _always),
    "json_schema": Refusal(_SYNTAX, _always),
    "ebnf": Refusal(_SYNTAX, _always),
    "grammar": Refusal(_SYNTAX, _always),
    "guided_json": Refusal(_GUIDED, _always),
    "guided_regex": Refusal(_GUIDED, _always),
    "guided_choice": Refusal(_GUIDED, _always),
    "guided_grammar": Refusal(_GUIDED, _always),
    "guided_decoding_backend": Refusal(_GUIDED, _always),
    "guided_whitespace_pattern": Refusal(_GUIDED, _always),
    "tools": Refusal(_TOOLS, _always),
    "tool_choice": Refusal(_TOOLS, _unless("none")),
    "functions": Refusal(_TOOLS, _always),
    "function_call": Refusal(_TOOLS, _unless("none")),
    "use_beam_search": Refusal(_BEAM, _unless(False)),
    "length_penalty": Refusal(_BEAM, _unless(1, 1.0)),
    "early_stopping": Refusal(_BEAM, _unless(False)),
    "suffix": Refusal("text cannot be filled in before a suffix", _if_set),
    "truncate_prompt_tokens": Refusal("this route does not cut prompts", _always),  # those that do have it as a field
    "truncation_side": Refusal("truncate_prompt_tokens cuts prompts at their start", _unless("left")),
    "echo": Refusal("the messages of a chat are not repeated", _unless(False)),
    "documents": Refusal("documents cannot be given beside the messages", _if_set),
    "return_prompt_text": Refusal("the rendered prompt is not returned", _unless(False)),
    "reasoning_effort": Refusal("templates are not told how much to reason", _always),
    "thinking_token_budget": Refusal(_REASONING, _unless(-1)),
    "include_reasoning": Refusal(_REASONING, _unless(True)),
    "verbosity": Refusal("models are not told how much to write", _unless("medium")),
    "repetition_detection": Refusal("repetitions do not end the output", _if_set),
    "stop_regex": Refusal("only strings and token ids end the output", _if_set),
    "typical_p": Refusal("there is no typical sampling", _unless(1, 1.0)),
    "watermarking": Refusal("there is no watermarking", _unless(False)),
    "watermark": Refusal("there is no watermarking", _unless(False)),
    "logprob_token_ids": Refusal("log probabilities are those of the likeliest tokens", _if_set),
    "logits_processors": Refusal("requests bring no code", _if_set),
    "custom_logit_processor": Refusal("requests bring no code", _if_set),
    "custom_params": Refusal("requests bring no code", _if_set),
    "vllm_xargs": Refusal("there are no further arguments", _if_set),
    "lora_path": Refusal("there are no adapters", _if_set),
    "return_hidden_states": Refusal("hidden states are not returned", _unless(False)),
    "return_routed_experts": Refusal("experts are not returned", _unless(False)),
    "kv_transfer_params": Refusal(_DISAGGREGATED, _if_set),
    "ec_transfer_params": Refusal(_DISAGGREGATED, _if_set),
    "moderation": Refusal("answers are not moderated", _always),
    "prompt_embeds": Refusal("prompts are text or token ids", _always),
    "chat_template": Refusal("the server's own template is used", _always),
    "modalities": Refusal(_MEDIA, _unless(["text"])),
    "audio": Refusal(_MEDIA, _always),
    "mm_processor_kwargs": Refusal(_MEDIA, _if_set),
    "media_io_kwargs": Refusal(_MEDIA, _if_set),
    "web_search_options": Refusal("there is no web search", _always),
}

_UNHEARD_OF = Refusal(_GUIDED, _always)
# Known fields that ask for nothing here, whatever their value: no tool is ever called, n samples are all returned.
_INERT = frozenset({"parallel_tool_calls", "best_of"})


def check_extras(extras: dict[str, Any], n: int = 1) -> list[str]:
    """Names of the fields that are ignored. Raises `ApiError` 400 for those that may not be. `n`: samples."""
    ignored = []
    for name, value in extras.items():
        refusal = REFUSALS.get(name) or (_UNHEARD_OF if name.startswith("guided_") else None)
        if refusal is not None and refusal.asks(value):
            raise bad_request(f"{name} is not supported: {refusal.why}", name, "unsupported_field")
        if refusal is None and name not in _INERT:
            ignored.append(name[:100])
    _check_best_of(extras.get("best_of"), n)
    return ignored


def _check_best_of(best_of: Any, n: int) -> None:
    if best_of is not None and (type(best_of) is not int or best_of != n):
        message = f"best_of is not supported beyond n: all samples are returned, so it can only be {n} here"
        raise bad_request(message, "best_of", "unsupported_field")
