"""Input items of a response as messages of a chat.

Clients also send items of other servers' histories. Their readable parts are shown to the model. Items without content
for the model are left out, with a warning. Items with content that only their own server can read are refused.
"""

from collections.abc import Callable
from typing import Any

from orjson import dumps

from roseinfer.server.formats.chat_builder import ChatBuilder, check_nesting, text_field, texts_of
from roseinfer.server.formats.responses.tool_kinds import ToolKind, call_id_of
from roseinfer.server.formats.responses.tools import KINDS, OfferedTools
from roseinfer.server.http.errors import ApiError, bad_request

_USER_PARTS = {"input_text": "text"}
_ASSISTANT_PARTS = {"output_text": "text", "refusal": "refusal", "input_text": "text"}
_REASONING_PARTS = {"reasoning_text": "text", "text": "text"}
_SUMMARY_PARTS = {"summary_text": "text"}
# Calls of tools that are offered to models here.
_CALLS = {kind.item: kind for kind in KINDS.values()}
# Calls of other servers' tools -> the field that holds what they were called with.
_FOREIGN_CALLS = {
    "program": "code",
    "mcp_call": "arguments",
    "code_interpreter_call": "code",
    "file_search_call": "queries",
}
# Results of either, as items of their own -> the field with the result.
_RESULTS = {
    "local_shell_call_output": "output",
    "shell_call_output": "output",
    "apply_patch_call_output": "output",
    "program_output": "result",
}
# Calls that hold their result themselves -> its field.
_ENCLOSED = {"mcp_call": "output", "code_interpreter_call": "outputs", "file_search_call": "results"}
# Items without content for the model. The text that follows a search has what it found.
_LEFT_OUT = frozenset(
    {
        "web_search_call",
        "tool_search_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
    }
)
# Items that bring tools: see `tools_within`.
_WITH_TOOLS = frozenset({"additional_tools", "tool_search_output"})
# Item that changes settings of the request: see `request.configured`.
CONFIGURATION = "configuration_update"
_ENCRYPTED = "it can only be read by the server that made it"
_REFUSED = {
    "compaction": _ENCRYPTED,
    "compaction_summary": _ENCRYPTED,
    "context_compaction": _ENCRYPTED,
    "compaction_trigger": "inputs are not compacted here",
    "image_generation_call": "the model takes text only",
    "computer_call": "the model takes text only",
    "computer_call_output": "the model takes text only",
}


def tools_within(items: str | list[dict[str, Any]], place_of: Callable[[int], str], offered: OfferedTools) -> None:
    """Offer the tools that items bring. `place_of` names an item by its index. Raises `ApiError` 400."""
    if isinstance(items, str):
        return
    for index, item in enumerate(items):
        kind = item.get("type")
        if isinstance(kind, str) and kind in _WITH_TOOLS:
            tools = item.get("tools")
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise bad_request(f"{place_of(index)}.tools must be a list of tools", "input")
            offered.add(tools, f"{place_of(index)}.tools", again=True)


class InputItems:
    """Reader of input items into the messages of a chat. `warnings`: items that are left out."""

    def __init__(self, chat: ChatBuilder, offered: OfferedTools) -> None:
        self.warnings: dict[str, None] = {}
        self._chat = chat
        self._offered = offered

    def add(self, item: dict[str, Any], place: str) -> None:
        """Add the item at `place`. Raises `ApiError` 400 that names the place."""
        kind = item.get("type") or "message"
        if kind == "message":
            self._message(item, place)
        elif isinstance(kind, str) and kind in _CALLS:
            self._call(_CALLS[kind], item, place)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            texts = texts_of(item.get("output"), _USER_PARTS, f"{place}.output", "input")
            self._chat.add_result(text_field(item, "call_id", place, "input"), texts)
        elif kind == "reasoning":
            self._reasoning(item, place)
        elif kind == "agent_message":
            self._chat.add_text("user", texts_of(item.get("content"), _USER_PARTS, f"{place}.content", "input"))
        else:
            self._other(kind, item, place)

    def _other(self, kind: Any, item: dict[str, Any], place: str) -> None:
        if not isinstance(kind, str) or kind in _REFUSED:
            raise _unsupported(kind, place)
        if kind in _LEFT_OUT:
            self.warnings[f"input: items of type {kind!r} are left out"] = None
        elif kind in _RESULTS:
            self._chat.add_result(call_id_of(item, place), _outcome(item, _RESULTS[kind], place))
        elif kind in _FOREIGN_CALLS:
            self._foreign_call(kind, item, place)
        elif kind not in _WITH_TOOLS and kind != CONFIGURATION:
            raise _unsupported(kind, place)

    def _message(self, item: dict[str, Any], place: str) -> None:
        role = text_field(item, "role", place, "input")
        parts = _ASSISTANT_PARTS if role == "assistant" else _USER_PARTS
        texts = texts_of(item.get("content"), parts, f"{place}.content", "input")
        if role == "assistant":
            self._chat.add_answer(texts)
        elif role in ("user", "system", "developer"):
            self._chat.add_text(role, texts)
        else:
            raise bad_request(f"{place}.role is not known: {role[:40]!r}", "input")

    def _reasoning(self, item: dict[str, Any], place: str) -> None:
        """Add the reasoning, or its summary if there is no more."""
        texts = texts_of(item.get("content") or [], _REASONING_PARTS, f"{place}.content", "input")
        texts = texts or texts_of(item.get("summary") or [], _SUMMARY_PARTS, f"{place}.summary", "input")
        if texts:
            self._chat.add_reasoning("\n".join(texts))
        elif item.get("encrypted_content"):
            self.warnings["input: encrypted reasoning is left out"] = None

    def _call(self, kind: ToolKind, item: dict[str, Any], place: str) -> None:
        arguments = kind.arguments(item, place)
        name, namespace = kind.name(item, place, "input"), item.get("namespace")
        offered = self._offered.name_of(name, namespace if isinstance(namespace, str) else None)
        self._chat.add_call(kind.call_id(item, place), offered, arguments)

    def _foreign_call(self, kind: str, item: dict[str, Any], place: str) -> None:
        """Add a call of another server's tool as a call of a function."""
        field = _FOREIGN_CALLS[kind]
        given = item.get(field)
        call_id, name = call_id_of(item, place), item.get("name")
        name = name if isinstance(name, str) else kind.removesuffix("_call")
        check_nesting(given, "input")
        whole = isinstance(given, dict) or (isinstance(given, str) and field == "arguments")
        arguments: Any = given if whole else {field: given}
        self._chat.add_call(call_id, name, arguments)
        result = item.get(_ENCLOSED.get(kind, ""))
        if result is not None:
            self._chat.add_result(call_id, _result(result, place))


def _unsupported(kind: Any, place: str) -> ApiError:
    why = _REFUSED.get(kind) if isinstance(kind, str) else None
    message = f"{place}: items of type {str(kind)[:40]!r} are not supported" + (f": {why}" if why else "")
    return bad_request(message, "input", "unsupported_field")


def _outcome(item: dict[str, Any], field: str, place: str) -> list[str]:
    """Return the texts of a result. Its status is shown if it says more than the output."""
    value, status = item.get(field), item.get("status")
    if value is None and isinstance(status, str):
        return [status]
    texts = _result(value, f"{place}.{field}")
    return [f"{status}\n{text}" for text in texts] if status == "failed" else texts


def _result(value: Any, place: str) -> list[str]:
    """Return the texts of another server's result. Lists and objects are shown as JSON."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list | dict):
        raise bad_request(f"{place} must be a string, a list or an object", "input")
    check_nesting(value, "input")
    if isinstance(value, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in value):
        raise bad_request(f"{place}: parts of type 'image' are not supported", "input", "unsupported_content")
    return [dumps(value).decode()]
