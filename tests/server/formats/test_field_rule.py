"""Outcome of each field of the APIs: accepted, accepted with a warning, or rejected by name.

A field without effect on the answer is accepted with a warning. A field that would change the answer unnoticed is
rejected by name. The fields are those of OpenAI's and Anthropic's APIs (openai 3.57 and anthropic 2.14, with beta
fields) and of vLLM's.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.formats.test_tool_fields import live
from tests.server.live import LiveServer, events
from tests.text.tokenizers import tool_caller

ACCEPTED, WARNED, REFUSED = "accepted", "warned", "refused"
HI = [{"role": "user", "content": "hello"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "x"}),
    "chat": ("/v1/chat/completions", {"messages": HI}),
    "responses": ("/v1/responses", {"input": "x"}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 9}),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FUNCTION = {"name": "look", "parameters": SCHEMA}
TOOLS: dict[str, Any] = {
    "completions": [],
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    "messages": [{"name": "look", "input_schema": SCHEMA}, {"type": "web_search_20260209", "name": "web_search"}],
}
DOCUMENT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
# What fields need beside them, by the first part of their name.
BESIDE: dict[str, dict[str, Any]] = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
ALL = tuple(BODIES)
OPENAI = ("completions", "chat")

# (apis, field, value, what becomes of it); a field with dots is within another.
Row = tuple[tuple[str, ...], str, Any, str]
ROWS: list[Row] = [
    # --- how tokens are drawn and answers are sent ---
    (ALL, "model", "fake", ACCEPTED),
    (ALL, "stream", True, ACCEPTED),
    (ALL, "temperature", 0.5, ACCEPTED),
    (ALL, "top_p", 0.5, ACCEPTED),
    (ALL, "top_k", 5, ACCEPTED),
    (ALL, "min_p", 0.1, ACCEPTED),
    (ALL, "frequency_penalty", 0.5, ACCEPTED),
    (ALL, "presence_penalty", 0.5, ACCEPTED),
    (ALL, "repetition_penalty", 1.1, ACCEPTED),
    (ALL, "seed", 5, ACCEPTED),
    (ALL, "logit_bias", {"5": 1}, ACCEPTED),
    (ALL, "stop_token_ids", [5], ACCEPTED),
    (ALL, "min_tokens", 1, ACCEPTED),
    (ALL, "bad_words", ["x"], ACCEPTED),
    (ALL, "allowed_token_ids", [5, 6], ACCEPTED),
    (ALL, "truncate_prompt_tokens", 5, ACCEPTED),
    (ALL, "cache_salt", "s", ACCEPTED),
    (ALL, "request_id", "r", ACCEPTED),
    (ALL, "priority", 1, ACCEPTED),
    (ALL, "add_special_tokens", False, ACCEPTED),
    (ALL, "skip_special_tokens", False, ACCEPTED),
    (ALL, "spaces_between_special_tokens", True, ACCEPTED),
    (ALL, "spaces_between_special_tokens", False, WARNED),
    (ALL, "service_tier", "auto", ACCEPTED),
    (ALL, "service_tier", "flex", WARNED),
    (ALL, "user", "me", ACCEPTED),
    (ALL, "unheard_of", 1, WARNED),
    (("chat", "completions", "responses"), "stop", ["x"], ACCEPTED),
    (("messages",), "stop", ["x"], REFUSED),
    (("messages",), "stop_sequences", ["x"], ACCEPTED),
    (OPENAI, "max_tokens", 5, ACCEPTED),
    (OPENAI, "max_tokens", 1_000_000, ACCEPTED),
    (("chat",), "max_completion_tokens", 1_000_000, ACCEPTED),
    (("responses",), "max_output_tokens", 1_000_000, ACCEPTED),
    (("messages",), "max_tokens", 1_000_000, ACCEPTED),
    (("responses", "messages"), "max_completion_tokens", 5, REFUSED),
    (("responses",), "max_tokens", 5, REFUSED),
    (OPENAI, "n", 2, ACCEPTED),
    (("responses", "messages"), "n", 2, REFUSED),
    (OPENAI, "best_of", 1, ACCEPTED),
    (OPENAI, "best_of", 2, REFUSED),
    (("completions",), "logprobs", 2, ACCEPTED),
    (("chat",), "logprobs", True, ACCEPTED),
    (("chat",), "top_logprobs", 2, ACCEPTED),
    (("responses", "messages"), "logprobs", True, REFUSED),
    (("responses", "messages"), "top_logprobs", 2, REFUSED),
    (OPENAI, "prompt_logprobs", 1, ACCEPTED),
    (OPENAI, "return_token_ids", True, ACCEPTED),
    (OPENAI, "return_tokens_as_token_ids", True, ACCEPTED),
    (("completions",), "echo", True, ACCEPTED),
    (("chat",), "echo", True, REFUSED),
    (("completions",), "suffix", "x", REFUSED),
    (OPENAI, "stream_options.include_usage", True, ACCEPTED),
    (OPENAI, "stream_options.include_obfuscation", False, ACCEPTED),
    (OPENAI, "stream_options.include_obfuscation", True, WARNED),
    (("responses",), "stream_options.include_usage", True, ACCEPTED),
    (("responses",), "stream_options.include_obfuscation", False, ACCEPTED),
    (("responses",), "stream_options.include_obfuscation", True, WARNED),
    (OPENAI, "use_beam_search", True, REFUSED),
    (OPENAI, "length_penalty", 0.5, REFUSED),
    (OPENAI, "repeat_penalty", 1.0, ACCEPTED),
    (OPENAI, "repeat_penalty", 1.1, REFUSED),
    (OPENAI, "n_predict", 5, REFUSED),
    (OPENAI, "num_predict", 5, REFUSED),
    (OPENAI, "num_predict", -1, ACCEPTED),
    (OPENAI, "system", "Be brief.", REFUSED),
    (OPENAI, "system", "", ACCEPTED),
    (ALL, "mirostat", 2, REFUSED),
    (OPENAI, "logits_processors", ["x"], REFUSED),
    (OPENAI, "vllm_xargs", {"a": 1}, REFUSED),
    (OPENAI, "kv_transfer_params", {"a": 1}, REFUSED),
    (OPENAI, "prompt_embeds", "x", REFUSED),
    (OPENAI, "separate_reasoning", False, REFUSED),
    (OPENAI, "include_reasoning", False, REFUSED),
    (("chat",), "documents", [{"text": "x"}], REFUSED),
    (("chat",), "chat_template", "x", REFUSED),
    (("chat",), "mm_processor_kwargs", {"a": 1}, REFUSED),
    (("chat",), "add_generation_prompt", False, ACCEPTED),
    # --- hints ---
    (("completions", "chat", "responses"), "safety_identifier", "s", ACCEPTED),
    (("completions", "chat", "responses"), "prompt_cache_key", "k", ACCEPTED),
    (("chat", "responses"), "prompt_cache_retention", "in_memory", ACCEPTED),
    (("chat", "responses"), "prompt_cache_retention", "24h", WARNED),
    (("chat", "responses"), "prompt_cache_options", {"mode": "explicit"}, WARNED),
    (("responses",), "prompt_cache_options", {"prewarm": True}, REFUSED),
    (("responses",), "generate", False, REFUSED),
    (("responses",), "generate", True, ACCEPTED),
    (("responses",), "access_programs", {"cyber": "standard"}, WARNED),
    (("responses",), "background_options", {"completion_window": "2h"}, WARNED),
    (("responses",), "image", {"context_compression": "auto"}, WARNED),
    (("chat",), "prediction", {"type": "content", "content": "x"}, ACCEPTED),
    (("chat",), "prediction", {"type": "other", "content": "x"}, REFUSED),
    (("completions",), "prediction", {"type": "content", "content": "x"}, WARNED),
    (("chat",), "store", False, ACCEPTED),
    (("chat",), "store", True, WARNED),
    (("chat",), "metadata", {"a": "b"}, WARNED),
    (("responses", "messages"), "metadata", {"user_id": "b"}, ACCEPTED),
    (("chat",), "verbosity", "medium", ACCEPTED),
    (("chat",), "verbosity", "low", WARNED),
    (("responses",), "text.verbosity", "medium", ACCEPTED),
    (("responses",), "text.verbosity", "low", WARNED),
    (("responses",), "context_management", [{"type": "compaction", "compact_threshold": 9}], WARNED),
    (("responses",), "truncation", "disabled", ACCEPTED),
    (("responses",), "truncation", "auto", WARNED),
    (("responses",), "max_tool_calls", 3, ACCEPTED),
    (("responses",), "include", ["reasoning.encrypted_content"], WARNED),
    (("responses",), "include", ["message.output_text.logprobs"], REFUSED),
    (("responses",), "client_metadata", {"a": "b"}, WARNED),
    (("messages",), "cache_control", {"type": "ephemeral"}, ACCEPTED),
    (("messages",), "context_management", {"edits": []}, ACCEPTED),
    (("messages",), "context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, ACCEPTED),
    (("messages",), "context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}, WARNED),
    (("messages",), "compaction", {"type": "summarize"}, REFUSED),
    (("messages",), "speed", "standard", ACCEPTED),
    (("messages",), "speed", "fast", WARNED),
    (("messages",), "inference_geo", "us", WARNED),
    (("messages",), "mcp_servers", [], ACCEPTED),
    (("messages",), "mcp_servers", [{"type": "url", "name": "x", "url": "x"}], WARNED),
    (("messages",), "billing_policy", {"type": "billing_policy"}, WARNED),
    (("messages",), "diagnostics", {"previous_message_id": "x"}, WARNED),
    (("messages",), "fallbacks", "default", WARNED),
    (("messages",), "fallback_credit_token", "x", WARNED),
    (("messages",), "betas", ["x"], WARNED),
    (("messages",), "user_profile_id", "x", WARNED),
    (("messages",), "workspace_id", "x", WARNED),
    (("responses",), "store", False, ACCEPTED),
    (("responses",), "background", False, ACCEPTED),
    # --- what only another server has ---
    (("responses",), "conversation", "conv_x", REFUSED),
    (("messages",), "container", "x", REFUSED),
    (("messages",), "thread", {"type": "create"}, REFUSED),
    (("responses",), "prompt", {"id": "x"}, REFUSED),
    (("chat", "responses"), "moderation", {"model": "x"}, REFUSED),
    (("chat",), "modalities", ["text"], ACCEPTED),
    (("chat",), "modalities", ["text", "audio"], REFUSED),
    (("chat",), "audio", {"voice": "x", "format": "wav"}, REFUSED),
    (("chat",), "web_search_options", {}, REFUSED),
    (("chat", "completions"), "options", {"num_predict": 5}, REFUSED),
    (("chat", "completions"), "format", "json", REFUSED),
    (("chat", "completions"), "images", ["aGk="], REFUSED),
    (("chat", "completions"), "keep_alive", "5m", WARNED),
    # --- tools ---
    (ALL, "tools", [], ACCEPTED),
    (("chat",), "tools", TOOLS["chat"], ACCEPTED),
    (("completions",), "tools", TOOLS["chat"], REFUSED),
    (("chat",), "tools", [{"type": "custom", "custom": {"name": "x"}}], REFUSED),
    (("responses", "messages"), "tools", [TOOLS["responses"][1]], WARNED),
    (("responses",), "tools", [TOOLS["responses"][0] | {"defer_loading": True}], ACCEPTED),
    (("responses",), "tools", [{"type": "custom", "name": "x"}], ACCEPTED),
    (("responses",), "tools", [{"type": "namespace", "name": "x", "tools": TOOLS["responses"][:1]}], ACCEPTED),
    (("messages",), "tools", [TOOLS["messages"][0] | {"defer_loading": True}], ACCEPTED),
    (("messages",), "tools", [TOOLS["messages"][0] | {"cache_control": {"type": "ephemeral"}}], ACCEPTED),
    (("messages",), "tools", [TOOLS["messages"][0] | {"input_examples": [{}]}], WARNED),
    (("messages",), "tools", [TOOLS["messages"][0] | {"allowed_callers": ["code_execution_20260521"]}], REFUSED),
    (("chat", "responses"), "tool_choice", "auto", ACCEPTED),
    (("chat", "responses"), "tool_choice", "required", ACCEPTED),
    (("chat",), "tool_choice", {"type": "function", "function": {"name": "look"}}, ACCEPTED),
    (("responses",), "tool_choice", {"type": "function", "name": "look"}, ACCEPTED),
    (("responses",), "tool_choice", {"type": "web_search"}, REFUSED),
    (("messages",), "tool_choice", {"type": "any"}, ACCEPTED),
    (("messages",), "tool_choice", {"type": "tool", "name": "look"}, ACCEPTED),
    (("messages",), "tool_choice", {"type": "tool", "name": "web_search"}, REFUSED),
    (("chat", "responses"), "parallel_tool_calls", False, ACCEPTED),
    (("chat",), "functions", [FUNCTION], REFUSED),
    (("chat",), "function_call", "auto", REFUSED),
    # --- thinking ---
    (("chat",), "reasoning_effort", "high", WARNED),
    (("completions",), "reasoning_effort", "high", REFUSED),
    (("chat",), "thinking_token_budget", 5, WARNED),
    (("completions",), "thinking_token_budget", 5, REFUSED),
    (("responses",), "reasoning.effort", "high", WARNED),
    (("responses",), "reasoning.summary", "auto", WARNED),
    (("responses",), "reasoning.generate_summary", "auto", WARNED),
    (("messages",), "thinking", {"type": "adaptive"}, ACCEPTED),
    (("messages",), "thinking", {"type": "enabled", "budget_tokens": 5}, WARNED),
    (("messages",), "thinking", {"type": "adaptive", "display": "omitted"}, WARNED),
    (("messages",), "output_config.effort", "high", WARNED),
    (("messages",), "output_config.task_budget", {"type": "tokens", "total": 9}, WARNED),
    # --- formats ---
    (OPENAI, "response_format", DOCUMENT, ACCEPTED),
    (("responses", "messages"), "response_format", DOCUMENT, REFUSED),
    (("responses",), "text.format", {"type": "json_schema", "name": "n", "schema": SCHEMA}, ACCEPTED),
    (("messages",), "output_config.format", {"type": "json_schema", "schema": SCHEMA}, ACCEPTED),
    (("messages",), "output_format", {"type": "json_schema", "schema": SCHEMA}, ACCEPTED),
    (OPENAI, "structured_outputs", {"json": SCHEMA}, ACCEPTED),
    (OPENAI, "guided_json", SCHEMA, ACCEPTED),
    (OPENAI, "guided_regex", "a+", ACCEPTED),
    (OPENAI, "guided_choice", ["a", "b"], ACCEPTED),
    (OPENAI, "guided_grammar", 'start: "a"', ACCEPTED),
    (OPENAI, "guided_decoding_backend", "x", WARNED),
    (OPENAI, "guided_unheard_of", "x", REFUSED),
    (("responses", "messages"), "guided_json", SCHEMA, REFUSED),
    # --- what is said ---
    (("responses",), "instructions", "x", ACCEPTED),
    (("responses",), "input", [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, *HI], WARNED),
    (("responses",), "input", [{"type": "web_search_call", "id": "x"}, *HI], WARNED),
    (("responses",), "input", [*HI, {"type": "configuration_update", "text": {"format": {"type": "text"}}}], ACCEPTED),
    (("responses",), "input", [{"type": "compaction", "encrypted_content": "x"}, *HI], REFUSED),
    (("messages",), "system", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], ACCEPTED),
    (("messages",), "messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], REFUSED),
    (("messages",), "messages", [*HI, {"role": "system", "content": "x", "clear_at": "next_user_message"}], ACCEPTED),
    (("messages",), "messages", [*HI, {"role": "system", "output_config": {"effort": "low"}}], WARNED),
]  # fmt: skip


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    with live(tool_caller()) as server:
        yield server


def body_of(api: str, field: str, value: Any) -> dict[str, Any]:
    outer, _, inner = field.partition(".")
    beside = BESIDE.get(outer, {}) if api in OPENAI else {}
    if outer == "tool_choice":
        beside = {"tools": TOOLS[api]}
    return BODIES[api][1] | beside | {outer: {inner: value} if inner else value}


def warnings_of(text: str, body: Any) -> list[str]:
    """Return the warnings of a whole answer or of a stream's events."""
    for said in [body] if body is not None else events(text):
        for part in (said, said.get("response"), said.get("message")) if isinstance(said, dict) else ():
            if isinstance(part, dict) and "warnings" in part:
                found: list[str] = part["warnings"]
                return found
    return []


CASES = [(api, field, value, verdict) for apis, field, value, verdict in ROWS for api in apis]


@pytest.mark.parametrize(("api", "field", "value", "verdict"), CASES)
def test_what_becomes_of_a_field(running: LiveServer, api: str, field: str, value: Any, verdict: str) -> None:
    running.call(running.engine.reset)
    answer = running.post(BODIES[api][0], body_of(api, field, value))
    if verdict == REFUSED:
        error = answer.json()["error"]
        details = error.get("details", error)
        assert answer.status_code == 400, answer.text
        assert details["param"].startswith(field) and field in error["message"]
        assert not running.engine.requests
        return
    assert answer.status_code == 200, answer.text
    whole = answer.headers["content-type"].startswith("application/json")
    warnings = warnings_of(answer.text, answer.json() if whole else None)
    if field == "tool_choice":  # the tool that is left out is named too
        warnings = [name for name in warnings if not name.startswith("tools")]
    named = [name for name in warnings if name.startswith(field.partition(".")[0])]
    assert warnings == named and bool(named) is (verdict == WARNED), warnings
    assert all(part in named[0] for part in field.split(".")) if named else True
