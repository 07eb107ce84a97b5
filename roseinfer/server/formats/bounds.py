"""The bounds of request fields as JSON Schema, for the OpenAPI document: those that are enforced, wherever that is.

Types alone come from the schemas of the bodies. Numbers here are those of `SamplingParams`, of the server's `Limits`,
and constants of the checks; a test holds the document against the server.
"""

from collections.abc import Mapping
from typing import Any

from roseinfer.core.sampling import INT64_MAX, INT64_MIN, RANGES
from roseinfer.grammar.limits import MAX_CHOICES, MAX_REGEX_BYTES
from roseinfer.server.formats.planning import MAX_SALT_CHARS
from roseinfer.server.http.limits import Limits
from roseinfer.server.http.middleware import MAX_ID_CHARS
from roseinfer.server.request.objectives import MAX_PREDICTED_LEN

Schema = dict[str, Any]
# Kind of a value -> what to add to its schema; kinds are JSON's, an array's is named with that of its items.
Bound = Mapping[str, Schema]

_INT64 = {"minimum": INT64_MIN, "maximum": INT64_MAX}
_POSITIVE: Bound = {"number": {"exclusiveMinimum": 0}}
_CHOICE: Bound = {"array of string": {"minItems": 1, "maxItems": MAX_CHOICES}}
_REGEX: Bound = {"string": {"maxLength": MAX_REGEX_BYTES}}
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")


def constrain(schema: Schema, limits: Limits) -> None:
    """Add the bounds of its fields to the schema of a body (`title`: its name), and of what its fields refer to."""
    bounds = {**_bounds(limits), **_ONLY_ON.get(schema["title"], {})}
    for part in (schema, *schema.get("$defs", {}).values()):
        for name, field in part.get("properties", {}).items():
            for branch in field.get("anyOf", [field]):
                _merge(branch, bounds.get(name, {}).get(_kind(branch), {}))


_ONLY_ON: dict[str, dict[str, Bound]] = {
    "CompletionRequest": {"max_tokens": {"integer": {"minimum": 0, "description": "0 only with echo"}}},
    "ChatRequest": {"max_tokens": {"integer": {"minimum": 1}}},
    "MessagesRequest": {"max_tokens": {"integer": {"minimum": 1}}},
    # It has but one prompt, and no ids make an empty text.
    "TokenizeRequest": {"prompt": {}},
    "DetokenizeRequest": {"tokens": {"array of integer": {"items": {"minimum": 0}}}},
}


def _bounds(limits: Limits) -> dict[str, Bound]:
    top_k = {"minimum": -1, "maximum": INT64_MAX}
    logprobs = {"minimum": -1} if limits.max_logprobs == -1 else {"minimum": 0, "maximum": limits.max_logprobs}
    stop = {"minLength": 1, "maxLength": limits.max_stop_chars}
    low, high = RANGES["logit_bias"].low, RANGES["logit_bias"].high
    ids = {"minItems": 1, "items": {"minimum": 0}}
    budget: Bound = {"integer": {"minimum": -1}}
    prompts = {"minItems": 1, "maxItems": limits.max_prompts}
    return {
        **{name: {"number": _range(name)} for name in _FLOATS},
        "prompt": {
            "array of integer": ids,
            "array of string": prompts,
            "array of array of integer": {**prompts, "items": ids},
        },
        "messages": {"array": {"minItems": 1}},
        "input": {"array of object": {"minItems": 1}},
        "max_completion_tokens": {"integer": {"minimum": 1}},
        "max_output_tokens": {"integer": {"minimum": 1}},
        "min_tokens": {"integer": {"minimum": 0}},
        "top_k": {"integer": top_k},
        "seed": {"integer": _INT64},
        "n": {"integer": {"minimum": 1, "maximum": limits.max_choices}},
        "stop": {"string": stop, "array of string": {"maxItems": limits.max_stop_strings, "items": stop}},
        "stop_sequences": {"array of string": {"maxItems": limits.max_stop_strings, "items": stop}},
        "stop_token_ids": {"array of integer": {"maxItems": limits.max_stop_token_ids, "items": {"minimum": 0}}},
        "logit_bias": {
            "object": {
                "maxProperties": limits.max_logit_bias,
                "additionalProperties": {"minimum": low, "maximum": high},
                "propertyNames": {"pattern": "^[0-9]{1,12}$"},
            }
        },
        "bad_words": {"array of string": {"maxItems": limits.max_bad_words, "items": {"minLength": 1}}},
        "allowed_token_ids": {"array of integer": {**ids, "maxItems": limits.max_allowed_token_ids}},
        "truncate_prompt_tokens": {"integer": {"minimum": -1, "not": {"const": 0}}},
        "logprobs": {"integer": logprobs},
        "top_logprobs": {"integer": logprobs},
        "prompt_logprobs": {"integer": logprobs},
        "stream_interval": {"integer": {"minimum": 1}},
        "cache_salt": {"string": {"minLength": 1, "maxLength": MAX_SALT_CHARS, "pattern": r"^[^@/\\\u0000]*$"}},
        "request_id": {"string": {"minLength": 1, "maxLength": MAX_ID_CHARS, "pattern": "^[!-~]*$"}},
        "priority": {"integer": _INT64},
        **dict.fromkeys(("choice", "guided_choice"), _CHOICE),
        **dict.fromkeys(("regex", "guided_regex"), _REGEX),
        "thinking_token_budget": budget,
        "thinking_budget": budget,
        "pred_output_len": {"integer": {"minimum": 1, "maximum": MAX_PREDICTED_LEN}},
        **dict.fromkeys(("ttft", "tpot", "ttft_ms", "tpot_ms", "e2e_ms", "timeout_s", "deadline_ms"), _POSITIVE),
    }


def _range(name: str) -> Schema:
    found = RANGES[name]
    low = {"exclusiveMinimum" if found.above else "minimum": found.low}
    return {**low, "maximum": found.high}


def _kind(schema: Schema) -> str:
    kind = schema.get("type", "")
    items = _kind(schema["items"]) if kind == "array" else ""
    return f"array of {items}" if items else kind


def _merge(schema: Schema, more: Schema) -> None:
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(schema.get(name), dict):
            _merge(schema[name], value)
        else:
            schema[name] = value
