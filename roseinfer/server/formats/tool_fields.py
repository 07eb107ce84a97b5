"""Tool fields of a request, checked: the tools, which may be called, and how often."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from orjson import JSONEncodeError, dumps

from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import MAX_BYTES, check_depth
from roseinfer.server.formats.schemas import ChatRequest
from roseinfer.server.formats.unsupported import Unsupported
from roseinfer.server.http.errors import ApiError, bad_request
from roseinfer.text.tools.base import MAX_CALLS, Tool

MAX_NAME_CHARS = 64
# Field of Responses' and Messages' tools.
ALLOWED_CALLERS = Unsupported(
    "only the model itself calls tools", lambda callers: not isinstance(callers, list) or "direct" not in callers
)
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")


class Calls(StrEnum):
    """Mode of tool calls in an answer."""

    NEVER = "none"
    PERHAPS = "auto"
    ALWAYS = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Tools of a request. `described`: as written, for the template. `callable`: those that may be called.

    `most`: maximum calls of one answer, None = unlimited.
    """

    described: list[dict[str, Any]]
    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    calls: Calls
    most: int | None = None

    @classmethod
    def of(cls, request: ChatRequest) -> "ToolUse | None":
        """Return the tools of a request, None without any. Raises `ApiError` 400 naming the field."""
        if not request.tools:
            if request.tool_choice not in (None, Calls.NEVER, Calls.PERHAPS):
                raise bad_request("tool_choice requires a tool, but tools is empty", "tool_choice")
            return None
        tools = checked_tools(request.tools)
        calls, names = _choice(request.tool_choice)
        unknown = next((name for name in names or () if name not in tools), None)
        if unknown is not None:
            raise bad_request(f"tool_choice names the unknown tool {unknown[:64]!r}", "tool_choice")
        single = request.parallel_tool_calls is False or _names_one(request.tool_choice)
        return cls(
            described=request.tools,
            tools=tuple(tools.values()),
            callable=tuple(tool for tool in tools.values() if names is None or tool.name in names),
            calls=calls,
            most=1 if single else MAX_CALLS if calls is Calls.ALWAYS else None,
        )


# --- tools --------------------------------------------------------------------------------------------------------
def check_template(variables: frozenset[str]) -> None:
    """Raise `ApiError` 400 unless the chat template reads `tools`. `variables`: those it reads."""
    if "tools" not in variables:
        message = "The model's chat template does not take tools: start the server with one that does (--chat-template)"
        raise bad_request(message, "tools", "unsupported_field")


def checked_tools(given: list[dict[str, Any]]) -> dict[str, Tool]:
    """Return the tools by name. Raises `ApiError` 400 naming the place."""
    check_bytes(given)
    _check_depth(given)
    tools: dict[str, Tool] = {}
    for position, entry in enumerate(given):
        tool = _tool(entry, f"tools.{position}")
        if tool.name in tools:
            raise bad_request(f"tools.{position}.function.name: duplicate name {tool.name!r}", "tools")
        tools[tool.name] = tool
    return tools


def check_bytes(given: list[dict[str, Any]]) -> None:
    """Raise `ApiError` 400 for too many bytes of tools. Comes first: other checks take half a second per megabyte."""
    try:
        if len(dumps(given)) > MAX_BYTES:
            raise bad_request(f"tools have more than {MAX_BYTES} bytes", "tools", "grammar_too_complex")
    except JSONEncodeError:  # nested too deep, reported later
        pass


def _check_depth(given: list[dict[str, Any]]) -> None:
    try:
        check_depth(given)
    except GrammarError as error:
        raise bad_request(f"tools: {error.message}", "tools", error.code) from error


def _tool(entry: dict[str, Any], place: str) -> Tool:
    kind, function = entry.get("type"), entry.get("function")
    if kind != "function":
        message = f"{place}: tools of type {str(kind)[:40]!r} are not supported, only 'function'"
        raise bad_request(message, "tools", "unsupported_field")
    if not isinstance(function, dict):
        raise bad_request(f"{place}.function must be an object", "tools")
    return read_function(function, f"{place}.function")


def read_function(function: dict[str, Any], place: str, schema: str = "parameters") -> Tool:
    """Return the function that a request describes at `place`. `schema`: the name of its parameters there.

    Raises `ApiError` 400.
    """
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = f"must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '-' and '.'"
        raise bad_request(f"{place}.name {why}", "tools")
    if not isinstance(function.get("description"), str | None):
        raise bad_request(f"{place}.description must be text", "tools")
    if not isinstance(parameters, dict | None):
        raise bad_request(f"{place}.{schema} must be a JSON schema, an object", "tools")
    if parameters and parameters.get("type", "object") != "object":
        raise bad_request(f"{place}.{schema} must be a JSON schema of type 'object'", "tools")
    if not isinstance(strict, bool | None):
        raise bad_request(f"{place}.strict must be true or false", "tools")
    return Tool(name, parameters, bool(strict))


# --- tool_choice --------------------------------------------------------------------------------------------------
def _choice(choice: str | dict[str, Any] | None) -> tuple[Calls, dict[str, None] | None]:
    """Return the mode, and the names that may be called (None = all)."""
    if choice is None:
        return Calls.PERHAPS, None
    if isinstance(choice, str):
        if choice not in list(Calls):
            raise _wrong_choice()
        return Calls(choice), None
    kind = choice.get("type")
    if kind == "function":
        return Calls.ALWAYS, {_name(choice): None}
    if kind != "allowed_tools":
        raise _wrong_choice()
    allowed = choice.get("allowed_tools")
    mode = allowed.get("mode") if isinstance(allowed, dict) else None
    entries = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in (Calls.PERHAPS, Calls.ALWAYS) or not isinstance(entries, list) or not entries:
        message = "tool_choice.allowed_tools needs a mode, 'auto' or 'required', and tools"
        raise bad_request(message, "tool_choice")
    return Calls(mode), dict.fromkeys(_names(entries))


def _names(entries: Iterable[Any]) -> Iterable[str]:
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("type") != "function":
            raise bad_request("tool_choice.allowed_tools.tools: only tools of type 'function'", "tool_choice")
        yield _name(entry)


def _name(entry: dict[str, Any]) -> str:
    function = entry.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice: a function needs its name, {'function': {'name': ...}}", "tool_choice")
    return name


def _names_one(choice: str | dict[str, Any] | None) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


def _wrong_choice() -> ApiError:
    known = "'none', 'auto', 'required', {'type': 'function', ...} or {'type': 'allowed_tools', ...}"
    return bad_request(f"tool_choice must be {known}", "tool_choice")
