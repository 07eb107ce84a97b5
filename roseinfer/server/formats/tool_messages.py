"""Messages with tool calls, tool results or reasoning, in the form of chat templates."""

from typing import Any

from roseinfer.server.formats.schemas import ChatMessage
from roseinfer.server.http.errors import bad_request
from roseinfer.text.call_arguments import plain_arguments


def fields(message: ChatMessage, place: str, warnings: dict[str, None]) -> dict[str, Any]:
    """Return the template's fields besides role and content. `warnings`: names of unused fields.

    Raises `ApiError` 400 for incomplete messages.
    """
    found: dict[str, Any] = {}
    if message.tool_calls:
        found["tool_calls"] = _calls(message, place, warnings)
    if message.role == "tool":
        if not message.tool_call_id:
            raise bad_request(f"{place}.tool_call_id is required in a tool's message", "messages")
        found["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        warnings["messages.tool_call_id"] = None
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning:
        found["reasoning_content"] = reasoning
    if message.refusal and message.role == "assistant" and message.content is None:
        found["content"] = message.refusal
    elif message.refusal:
        warnings["messages.refusal"] = None
    return found


def _calls(message: ChatMessage, place: str, warnings: dict[str, None]) -> list[dict[str, Any]]:
    if message.role != "assistant":
        raise bad_request(f"{place}.tool_calls: only an assistant's message may have them", "messages")
    assert message.tool_calls is not None
    return [_call(call, f"{place}.tool_calls.{i}", warnings) for i, call in enumerate(message.tool_calls)]


def _call(call: dict[str, Any], place: str, warnings: dict[str, None]) -> dict[str, Any]:
    kind, function = call.get("type", "function"), call.get("function")
    if kind != "function":
        message = f"{place}: calls of type {str(kind)[:40]!r} are not supported, only 'function'"
        raise bad_request(message, "messages", "unsupported_field")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise bad_request(f"{place}.function.name is missing", "messages")
    plain: dict[str, Any] = {"type": "function"}
    if isinstance(call.get("id"), str):
        plain["id"] = call["id"]
    return plain | {"function": {"name": name, "arguments": _arguments(function.get("arguments"), place, warnings)}}


def _arguments(given: Any, place: str, warnings: dict[str, None]) -> Any:
    """Return the template's arguments. Malformed ones are a warning only, so that later turns do not fail."""
    arguments = plain_arguments(given)
    if isinstance(arguments, dict):
        return arguments
    warnings[f"{place}.function.arguments is no JSON object"[:100]] = None
    return arguments if isinstance(arguments, str) else {}
