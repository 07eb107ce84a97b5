"""Requests as coding agents write them: structure and names of fields are theirs, the texts are not.

`benchmarks/clients` runs the agents themselves. When one of them sends something new, its request belongs here.
"""

import json
from typing import Any

import httpx
import pytest

from tests.server.live import PATIENCE_S
from tests.server.scripted_server import ScriptedServer

SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": {}}
SHELL = {**SCHEMA, "properties": {"command": {"type": "string"}}, "required": ["command"]}
CACHED = {"cache_control": {"type": "ephemeral"}}


# --- Codex CLI 0.169 ----------------------------------------------------------------------------------------------
def codex_says(role: str, *texts: str) -> dict[str, Any]:
    parts = [{"type": "input_text", "text": text} for text in texts]
    return {"type": "message", "id": f"msg_{role}", "role": role, "content": parts}


CODEX: dict[str, Any] = {
    "model": "fake",
    "stream": True,
    "input": [
        codex_says("developer", "You write code."),
        codex_says("developer", "Skills.", "Permissions."),
        codex_says("user", "<environment_context></environment_context>"),
        codex_says("user", "What is the goal?"),
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "Run.", "strict": False, "parameters": SHELL},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "Other agents.",
            "tools": [
                {"type": "function", "name": "close_agent", "description": "", "strict": False, "parameters": SHELL}
            ],
        },
        {"type": "function", "name": "get_goal", "description": "The goal.", "strict": False, "parameters": SCHEMA},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20ba0",
    "client_metadata": {"session_id": "01a20ba0", "x-codex-turn-metadata": "{}"},
}
CODEX_RESULT = [
    {
        "type": "function_call",
        "status": "completed",
        "id": "fc_1",
        "name": "get_goal",
        "arguments": "{}",
        "call_id": "call_1",
    },
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": '{"goal": null}'},
]

# --- opencode 1.18 ------------------------------------------------------------------------------------------------
READ = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "filePath": {"type": "string"},
        "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
    },
    "required": ["filePath"],
}
OPENCODE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32000,
    "messages": [{"role": "system", "content": "You write code."}, {"role": "user", "content": '"What is in it?"'}],
    "tools": [{"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": READ}}],
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
OPENCODE_CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"filePath": "/x"}'}}
OPENCODE_RESULT = [
    {"role": "assistant", "content": "", "tool_calls": [OPENCODE_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "<content>1: x</content>"},
]

# --- Claude Code 2.1 ----------------------------------------------------------------------------------------------
BILLING = "x-anthropic-billing-header: cc_version=2.1.330.{}; cc_entrypoint=sdk-cli;"
CLAUDE: dict[str, Any] = {
    "model": "fake",
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Today.</system-reminder>"},
                {"type": "text", "text": "What is the time?", **CACHED},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "# Environment", **CACHED}]},
    ],
    "system": [
        {"type": "text", "text": BILLING.format("572")},
        {"type": "text", "text": "You are an agent.", **CACHED},
        {"type": "text", "text": "You write code.", **CACHED},
    ],
    "tools": [
        {"name": "Bash", "description": "Run.", "input_schema": SHELL},
        {"name": "ToolSearch", "description": "Find tools.", "input_schema": SHELL},
        {"name": "WebFetch", "description": "Fetch.", "input_schema": SHELL, "defer_loading": True},
    ],
    "metadata": {"user_id": '{"device_id": "f8c0", "session_id": "01a2"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


def claude_result(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "tool_use", "id": "call_1", "name": "ToolSearch", "input": {"query": "select:WebFetch"}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": list(parts), **CACHED}
    return [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]


TEXT_RESULT = claude_result({"type": "text", "text": "None."})
TOOL_FOUND = claude_result({"type": "tool_reference", "tool_name": "WebFetch"})


def answered(server: ScriptedServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of the answer."""
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    lines = (line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("more", [[], CODEX_RESULT], ids=["first", "continuation"])
def test_codex(scripted: ScriptedServer, more: list[dict[str, Any]]) -> None:
    events = answered(scripted, "/v1/responses", {**CODEX, "input": CODEX["input"] + more})
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("more", [[], OPENCODE_RESULT], ids=["first", "continuation"])
def test_opencode(scripted: ScriptedServer, more: list[dict[str, Any]]) -> None:
    events = answered(scripted, "/v1/chat/completions", {**OPENCODE, "messages": OPENCODE["messages"] + more})
    assert events[-2]["choices"][0]["finish_reason"] == "stop" and events[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("more", [[], TEXT_RESULT, TOOL_FOUND], ids=["first", "continuation", "tool found"])
def test_claude_code(scripted: ScriptedServer, more: list[dict[str, Any]]) -> None:
    body = {**CLAUDE, "messages": CLAUDE["messages"] + more}
    events = answered(scripted, "/v1/messages?beta=true", body)
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2]["delta"]["stop_reason"] == "end_turn"
    counted = {name: body[name] for name in ("model", "messages", "system", "tools")}
    answer = httpx.post(f"{scripted.url}/v1/messages/count_tokens?beta=true", json=counted, timeout=PATIENCE_S)
    assert answer.json()["input_tokens"] > 0


def test_claude_code_finds_its_prefix_in_another_session(scripted: ScriptedServer) -> None:
    """The block that differs in each session is no part of the prompt."""

    def usage(session: str) -> dict[str, int]:
        system = [{"type": "text", "text": BILLING.format(session)}, *CLAUDE["system"][1:]]
        body = {**CLAUDE, "system": system, "stream": False}
        answer = httpx.post(f"{scripted.url}/v1/messages?beta=true", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, int] = answer.json()["usage"]
        return found

    usage("2d8")
    again = usage("407")
    assert again["cache_read_input_tokens"] > 0.95 * (again["input_tokens"] + again["cache_read_input_tokens"]) - 16
