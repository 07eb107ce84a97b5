"""Messages and tools in the form that gpt-oss' chat template takes.

The template reads reasoning from `thinking`, which must not stand beside text in a message with tool calls. It writes
one call per message, and only a first system message. What it would leave out is moved to where it is written.
"""

import json
from collections.abc import Sequence
from typing import Any

_SYSTEM = frozenset({"system", "developer"})
_WRITTEN = "<|channel|>analysis<|message|>"


def written_by(template: str) -> bool:
    """Return True for a chat template that writes reasoning of earlier turns as harmony."""
    return _WRITTEN in template and "thinking" in template


def fitted(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as the template takes them. Contents are texts."""
    found: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message["role"] == "assistant":
            end = at
            while end < len(messages) and messages[end]["role"] == "tool":
                end += 1
            found += _turn(_with_thinking(message), messages[at:end])
            at = end
        elif message["role"] not in _SYSTEM or not found:
            found.append(message)
        elif len(found) == 1 and found[0]["role"] in _SYSTEM:
            found[0] = {**found[0], "content": _joined(found[0].get("content"), message.get("content"))}
        else:
            found.append({**message, "role": "user"})
    return found


def fitted_tools(tools: Sequence[Any]) -> list[Any]:
    """Return tools with what the template joins to texts: descriptions, and defaults of enumerations."""
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    function = {**function, "description": function.get("description") or ""}
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    if isinstance(parameters, dict) and isinstance(properties, dict):
        shown = {name: _with_text_default(schema) for name, schema in properties.items()}
        function["parameters"] = {**parameters, "properties": shown}
    return {**tool, "function": function}


def _with_text_default(schema: Any) -> Any:
    joined = isinstance(schema, dict) and "default" in schema and ("enum" in schema or "oneOf" in schema)
    if not joined or isinstance(schema["default"], str):
        return schema
    return {**schema, "default": json.dumps(schema["default"])}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the assistant with its reasoning in `thinking`, and with it the text before tool calls."""
    thinking = message.get("thinking") or message.get("reasoning_content")
    if not thinking:
        return message
    if message.get("tool_calls") and message.get("content"):
        return {**message, "thinking": _joined(thinking, message["content"]), "content": ""}
    return {**message, "thinking": thinking}


def _turn(message: dict[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a message with its results, with each of several calls before its own."""
    calls = message.get("tool_calls") or ()
    if len(calls) < 2:
        return [message, *results]
    found: list[dict[str, Any]] = []
    left = list(results)
    for call in calls:
        head = {"role": "assistant", "content": ""} if found else message
        found.append({**head, "tool_calls": [call]})
        if "id" in call:
            own = [result for result in left if result.get("tool_call_id") == call["id"]]
            left = [result for result in left if result.get("tool_call_id") != call["id"]]
        else:  # results come in the order of the calls
            own, left = left[:1], left[1:]
        found += own
    return found + left


def _joined(*texts: Any) -> str:
    return "\n\n".join(text for text in texts if isinstance(text, str) and text)
