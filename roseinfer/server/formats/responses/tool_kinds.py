"""Kinds of tools that clients run, and functions, the plainest kind."""

from dataclasses import dataclass
from typing import Any

from roseinfer.server.formats.chat_builder import text_field

# Names of events without "response.", and their fields.
Events = list[tuple[str, dict[str, Any]]]


class ToolKind:
    """Kind of tools: their function for the model, and the items and events of their calls for the client.

    `type`: of a tool. `item`: type of a call's item. `prefix`: of the item's id. `fields`: those of a tool that need no
    warning. `late`: a call is sent when it is complete, since its arguments decide what its item is.
    """

    type: str
    item: str
    prefix: str
    fields: frozenset[str]
    late = False

    # --- the request ------------------------------------------------------------------------------------------------
    def why_left_out(self, tool: dict[str, Any], place: str) -> str | None:
        """Return why the client cannot run a tool of this kind, None if it can. Raises `ApiError` 400."""
        return None

    def function(self, tool: dict[str, Any], place: str, warnings: dict[str, None]) -> dict[str, Any]:
        """Return the tool as a function of a chat. Raises `ApiError` 400."""
        raise NotImplementedError

    def name(self, given: dict[str, Any], place: str, param: str) -> str:
        """Return the name of the tool in a choice or in the item of a call. Raises `ApiError` 400."""
        return text_field(given, "name", place, param)

    def call_id(self, item: dict[str, Any], place: str) -> str:
        return text_field(item, "call_id", place, "input")

    def arguments(self, item: dict[str, Any], place: str) -> str | dict[str, Any]:
        """Return the arguments of an earlier call, as the model wrote them. Raises `ApiError` 400."""
        raise NotImplementedError

    # --- the answer -------------------------------------------------------------------------------------------------
    def fits(self, text: str) -> bool:
        """True if a complete call with these arguments is an item of this kind."""
        return True

    def call(self, name: "CallName", text: str) -> dict[str, Any]:
        """Return the fields of a call's item, without ids and status. `text`: the arguments, perhaps cut."""
        raise NotImplementedError

    def begun(self, name: "CallName", text: str) -> dict[str, Any]:
        """Return the fields of the item before the events with its content."""
        return self.call(name, "")

    def grown(self, text: str) -> Events:
        """Return the events of more arguments."""
        return []

    def ended(self, name: "CallName", text: str) -> Events:
        """Return the last events with the content of a call."""
        return []


class FunctionTools(ToolKind):
    """Functions: the client gets the arguments as the model writes them."""

    type, item, prefix = "function", "function_call", "fc"
    # `defer_loading` asks to hide a tool until a search finds it. There is no search, so all tools are shown.
    fields = frozenset({"type", "name", "description", "parameters", "strict", "defer_loading", "allowed_callers"})

    def function(self, tool: dict[str, Any], place: str, warnings: dict[str, None]) -> dict[str, Any]:
        """Return the fields of a function, which chats have within the tool."""
        known = ("name", "description", "parameters", "strict")
        return {name: tool[name] for name in known if tool.get(name) is not None}

    def arguments(self, item: dict[str, Any], place: str) -> str:
        return text_field(item, "arguments", place, "input")

    def call(self, name: "CallName", text: str) -> dict[str, Any]:
        return name.fields() | {"arguments": text}

    def grown(self, text: str) -> Events:
        return [("function_call_arguments.delta", {"delta": text})]

    def ended(self, name: "CallName", text: str) -> Events:
        return [("function_call_arguments.done", {"arguments": text, "name": name.name})]


FUNCTION = FunctionTools()


@dataclass(frozen=True, slots=True)
class CallName:
    """Name of a tool in the client's words, and the kind of the tool."""

    name: str
    namespace: str | None = None
    kind: ToolKind = FUNCTION

    def fields(self) -> dict[str, str]:
        """Return the fields of a call's item that name its tool."""
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


def call_id_of(item: dict[str, Any], place: str) -> str:
    """Return the id of an item's call, which some items have as their own id. Raises `ApiError` 400."""
    is_own = item.get("call_id") is None and item.get("id") is not None
    return text_field(item, "id" if is_own else "call_id", place, "input")


def tool_description(tool: dict[str, Any], place: str) -> str | None:
    return None if tool.get("description") is None else text_field(tool, "description", place, "tools")
