"""Tools of messages as functions of a chat. Messages may add tools to those of the request, and remove some."""

from typing import Any

from roseinfer.server.formats.as_chat import ignored_in_tools
from roseinfer.server.formats.chat_builder import text_field
from roseinfer.server.formats.tool_fields import ALLOWED_CALLERS, check_bytes, read_function
from roseinfer.server.http.errors import bad_request

_ADDITION = "tool_addition"
CHANGES = frozenset({_ADDITION, "tool_removal"})
# Fields of a tool that need no warning. All tools are shown, deferred ones too.
_TOOL_FIELDS = {
    "type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming", "defer_loading",
    "allowed_callers",
}  # fmt: skip


class MessageTools:
    """Tools that the model is offered. `warnings`: parts that are not used, such as Anthropic's own tools."""

    def __init__(self) -> None:
        self.warnings: dict[str, None] = {}
        self._tools: dict[str, dict[str, Any]] = {}
        self._removed: set[str] = set()

    def functions(self) -> list[dict[str, Any]]:
        """Return the tools of the chat."""
        return [tool for name, tool in self._tools.items() if name not in self._removed]

    def add(self, tools: list[dict[str, Any]]) -> None:
        """Add the tools of the request. Raises `ApiError` 400."""
        check_bytes(tools)
        for index, tool in enumerate(tools):
            self._add(tool, f"tools.{index}", again=False)

    def change(self, block: dict[str, Any], place: str) -> None:
        """Add or remove the tool that a block of a message names. Raises `ApiError` 400."""
        given, changes = block.get("tool"), block.get("type")
        if not isinstance(changes, str) or changes not in CHANGES:
            raise bad_request(f"{place}.type must be {' or '.join(map(repr, sorted(CHANGES)))}", "messages")
        adds = changes == _ADDITION
        tool: dict[str, Any] = given if isinstance(given, dict) else {}
        kind = tool.get("type")
        definition = tool.get("definition") if adds and kind == "tool_definition" else None
        if isinstance(definition, dict):
            self._add(definition, f"{place}.tool.definition", again=True)
        elif kind == "tool_reference":
            name = text_field(tool, "name", f"{place}.tool", "messages")
            (self._removed.discard if adds else self._removed.add)(name)
        elif isinstance(kind, str) and kind.startswith("mcp_"):
            self.warnings[f"messages: changes of type {kind[:40]!r} are left out"] = None
        else:
            raise bad_request(f"{place}.tool must be a tool_reference or a tool_definition to add", "messages")

    def _add(self, tool: dict[str, Any], place: str, again: bool) -> None:
        """Add the tool found at `place`. `again`: replace the one of its name."""
        kind = tool.get("type")
        if kind in (None, "custom"):
            function = _function(tool, place)
            name = function["name"]
            if name in self._tools and not again:
                raise bad_request(f"{place}.name: {name!r} is there twice", "tools")
            self._tools[name] = {"type": "function", "function": function}
            self._removed.discard(name)
            self.warnings |= dict.fromkeys(ignored_in_tools([tool], _TOOL_FIELDS))
        elif isinstance(kind, str):
            self.warnings[f"{place} of type {kind[:40]!r} is left out"] = None
        else:
            raise bad_request(f"{place}.type must be a string", "tools")


def _function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    ALLOWED_CALLERS.check(f"{place}.allowed_callers", tool.get("allowed_callers"))
    named = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
    function = {name: tool[own] for name, own in named.items() if tool.get(own) is not None}
    read_function(function, place, "input_schema")
    return function
