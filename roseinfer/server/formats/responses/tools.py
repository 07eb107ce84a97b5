"""Tools of a response as functions of a chat, and the names of their calls in the answer."""

from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from roseinfer.server.formats.chat_builder import text_field
from roseinfer.server.formats.tool_fields import ALLOWED_CALLERS, MAX_NAME_CHARS, check_bytes, read_function
from roseinfer.server.formats.unsupported import unsupported_error
from roseinfer.server.http.errors import bad_request

# Fields of a tool that need no warning. `defer_loading` asks to hide a tool until a search finds it. There is no
# search, so all tools are shown.
TOOL_FIELDS = frozenset({"type", "name", "description", "parameters", "strict", "defer_loading", "allowed_callers"})
_NAMESPACE_FIELDS = frozenset({"type", "name", "description", "tools"})
_CUSTOM_FIELDS = frozenset({"type", "name", "description", "format", "defer_loading", "allowed_callers"})
# The argument that holds the input of a custom tool.
_INPUT = "input"


@dataclass(frozen=True, slots=True)
class CallName:
    """Name of a tool in the client's words. `custom`: its input is a text, not a JSON object."""

    name: str
    namespace: str | None = None
    custom: bool = False


class OfferedTools:
    """Tools that the model is offered.

    `functions`: the tools of the chat. `names`: the model's name of a tool -> the client's. `warnings`: parts that are
    not used, such as tools that the server cannot run.
    """

    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.names: dict[str, CallName] = {}
        self.warnings: dict[str, None] = {}
        self._again = False
        # (name, namespace) -> the model's name; and by name alone, "" if several namespaces have it.
        self._offered: dict[tuple[str, str | None], str] = {}
        self._within: dict[str, str] = {}

    def add(self, tools: list[dict[str, Any]], place: str, again: bool = False) -> None:
        """Add the tools found at `place`. `again`: skip those that are offered already.

        Raises `ApiError` 400 that names the place.
        """
        check_bytes(tools)
        self._again = again
        for index, tool in enumerate(tools):
            self._add(tool, f"{place}.{index}")

    def name_of(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool that the client names."""
        offered = self._offered.get((name, namespace))
        if offered is None and namespace is None:
            offered = self._within.get(name)
        return offered or (name if namespace is None else f"{namespace}.{name}")

    def call_names(self) -> dict[str, CallName]:
        """Return the client's name for each name that a call may have.

        Models sometimes leave the namespace out. That is understood if no other tool has the name.
        """
        alone = {name: self.names[offered] for name, offered in self._within.items() if offered}
        return alone | self.names

    # --- tools ------------------------------------------------------------------------------------------------------
    def _add(self, tool: dict[str, Any], place: str) -> None:
        kind = tool.get("type")
        if kind == "namespace":
            self._add_namespace(tool, place)
        elif kind in ("function", "custom"):
            self._offer(tool, place)
        elif isinstance(kind, str):
            self.warnings[f"{place} of type {kind[:40]!r} is left out"] = None
        else:
            raise bad_request(
                f"{place}: tools of type {str(kind)[:40]!r} are not supported", "tools", "unsupported_field"
            )

    def _add_namespace(self, tool: dict[str, Any], place: str) -> None:
        """Offer the tools of a namespace. Its description goes to the first: a chat has no other place for it."""
        name, tools = text_field(tool, "name", place, "tools"), tool.get("tools")
        if not isinstance(tools, list):
            raise bad_request(f"{place}.tools must be a list of tools", "tools")
        self._note_fields(tool, _NAMESPACE_FIELDS)
        about = _description(tool, place)
        for index, entry in enumerate(tools):
            inner = f"{place}.tools.{index}"
            if not isinstance(entry, dict) or entry.get("type") not in ("function", "custom"):
                raise bad_request(f"{inner} must be a tool of type 'function' or 'custom'", "tools")
            self._offer(entry, inner, name, about)
            about = None

    def _offer(self, tool: dict[str, Any], place: str, namespace: str | None = None, about: str | None = None) -> None:
        ALLOWED_CALLERS.check(f"{place}.allowed_callers", tool.get("allowed_callers"))
        custom = tool["type"] == "custom"
        function = self._custom(tool, place) if custom else _function(tool)
        self._note_fields(tool, _CUSTOM_FIELDS if custom else TOOL_FIELDS)
        read_function(function, place)
        known = CallName(function["name"], namespace, custom)
        if self._again and (known.name, namespace) in self._offered:
            return
        function["name"] = self._free_name(known, place)
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        self.names[function["name"]] = known
        self._offered[known.name, namespace] = function["name"]
        if namespace is not None:
            self._within[known.name] = "" if known.name in self._within else function["name"]
        self.functions.append({"type": "function", "function": function})

    def _free_name(self, known: CallName, place: str) -> str:
        key = (known.name, known.namespace)
        wanted = [known.name] if known.namespace is None else [f"{known.namespace}.{known.name}", known.name]
        for name in wanted:
            if len(name) <= MAX_NAME_CHARS and name not in self.names and key not in self._offered:
                return name
        raise bad_request(f"{place}.name: {known.name!r} is there twice", "tools")

    def _custom(self, tool: dict[str, Any], place: str) -> dict[str, Any]:
        """Return a function of one text. A regex is enforced; a grammar in Lark is only shown to the model."""
        text: dict[str, Any] = {"type": "string"}
        about = [_description(tool, place)]
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
                self.warnings[f"{place}.format is shown to the model, not enforced"] = None
        elif wanted is not None and wanted != {"type": "text"}:
            raise bad_request(f"{place}.format must be of type 'text' or 'grammar'", "tools")
        schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
        described = "\n\n".join(filter(None, about))
        function = {"name": tool.get("name"), "parameters": schema, "strict": True}
        return function | {"description": described} if described else function

    def _note_fields(self, tool: dict[str, Any], known: frozenset[str]) -> None:
        for name, value in tool.items():
            if value is not None and name not in known:
                self.warnings[f"tools.{name}"] = None

    # --- tool_choice ------------------------------------------------------------------------------------------------
    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Return the `tool_choice` of the chat. Raises `ApiError` 400."""
        if not isinstance(choice, dict):
            return choice
        kind = choice.get("type")
        if kind in ("function", "custom"):
            return self._named(choice)
        if kind != "allowed_tools":
            raise unsupported_error("tool_choice", f"tools of type {str(kind)[:40]!r} are not run here")
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise bad_request("tool_choice.tools must be a list of objects", "tool_choice")
        named = [self._named(tool) for tool in tools if tool.get("type") in ("function", "custom")]
        if tools and not named:
            raise unsupported_error("tool_choice", "none of the allowed tools can be called here")
        if len(named) < len(tools):
            self.warnings["tool_choice.tools: those that are not functions are left out"] = None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}

    def _named(self, choice: dict[str, Any]) -> dict[str, Any]:
        namespace = choice.get("namespace")
        name = text_field(choice, "name", "tool_choice", "tool_choice")
        offered = self.name_of(name, namespace if isinstance(namespace, str) else None)
        return {"type": "function", "function": {"name": offered}}


def _description(tool: dict[str, Any], place: str) -> str | None:
    return None if tool.get("description") is None else text_field(tool, "description", place, "tools")


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a function, which chats have within the tool."""
    known = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in known if tool.get(name) is not None}


def custom_input(arguments: str) -> str:
    """Return the input that the arguments of a custom tool's call hold, as far as they were written."""
    try:
        given = from_json(arguments, allow_inf_nan=False, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = given.get(_INPUT, "") if isinstance(given, dict) else None
    return text if isinstance(text, str) else arguments


def custom_arguments(text: str) -> dict[str, str]:
    """Return the arguments of a custom tool's call with this input."""
    return {_INPUT: text}
