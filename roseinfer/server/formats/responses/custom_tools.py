"""Custom tools: functions of one text, which the client gets without JSON around it."""

from typing import Any

from pydantic_core import from_json

from roseinfer.server.formats.chat_builder import text_field
from roseinfer.server.formats.responses.tool_kinds import CallName, Events, ToolKind, tool_description
from roseinfer.server.http.errors import bad_request

# The argument that holds the input.
_INPUT = "input"


class CustomTools(ToolKind):
    """Custom tools: the input is a string within the arguments, so it is sent when they are complete."""

    type, item, prefix = "custom", "custom_tool_call", "ctc"
    fields = frozenset({"type", "name", "description", "format", "defer_loading", "allowed_callers"})

    def function(self, tool: dict[str, Any], place: str, warnings: dict[str, None]) -> dict[str, Any]:
        """Return a function of one text. A regex is enforced; a grammar in Lark is only shown to the model."""
        text: dict[str, Any] = {"type": "string"}
        about = [tool_description(tool, place)]
        wanted = tool.get("format")
        if isinstance(wanted, dict) and wanted.get("type") == "grammar":
            definition = text_field(wanted, "definition", f"{place}.format", "tools")
            syntax = wanted.get("syntax")
            if syntax == "regex":
                text["pattern"] = f"^(?:{definition})$"
            elif syntax != "lark":
                raise bad_request(f"{place}.format.syntax must be 'regex' or 'lark'", "tools")
            else:
                about.append(f"The input follows this grammar:\n{definition}")
                warnings[f"{place}.format is shown to the model, not enforced"] = None
        elif wanted is not None and wanted != {"type": "text"}:
            raise bad_request(f"{place}.format must be of type 'text' or 'grammar'", "tools")
        schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
        described = "\n\n".join(filter(None, about))
        function = {"name": tool.get("name"), "parameters": schema, "strict": True}
        return function | {"description": described} if described else function

    def arguments(self, item: dict[str, Any], place: str) -> dict[str, Any]:
        return {_INPUT: text_field(item, "input", place, "input")}

    def call(self, name: CallName, text: str) -> dict[str, Any]:
        return name.fields() | {"input": custom_input(text)}

    def ended(self, name: CallName, text: str) -> Events:
        given = custom_input(text)
        return [("custom_tool_call_input.delta", {"delta": given}), ("custom_tool_call_input.done", {"input": given})]


CUSTOM = CustomTools()


def custom_input(arguments: str) -> str:
    """Return the input that the arguments of a call hold, as far as they were written."""
    try:
        given = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = given.get(_INPUT, "") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments
