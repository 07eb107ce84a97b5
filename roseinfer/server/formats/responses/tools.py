"""Tools of a response as functions of a chat, and the names of their calls in the answer."""

from typing import Any

from roseinfer.server.formats.chat_builder import text_field
from roseinfer.server.formats.responses.client_tools import CLIENT_TOOLS
from roseinfer.server.formats.responses.custom_tools import CUSTOM
from roseinfer.server.formats.responses.tool_kinds import FUNCTION, CallName, ToolKind, tool_description
from roseinfer.server.formats.tool_fields import ALLOWED_CALLERS, MAX_NAME_CHARS, check_bytes, read_function
from roseinfer.server.formats.unsupported import unsupported_error
from roseinfer.server.http.errors import bad_request

KINDS: dict[str, ToolKind] = {kind.type: kind for kind in (FUNCTION, CUSTOM, *CLIENT_TOOLS)}
_NAMESPACE_FIELDS = frozenset({"type", "name", "description", "tools"})


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
        # Types of tools that a choice may name. The names of functions and custom tools are checked later.
        self._callable = {FUNCTION.type, CUSTOM.type}

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
        type = tool.get("type")
        if not isinstance(type, str):
            raise bad_request(
                f"{place}: tools of type {str(type)[:40]!r} are not supported", "tools", "unsupported_field"
            )
        if type == "namespace":
            self._add_namespace(tool, place)
        elif type not in KINDS:
            self.warnings[f"{place} of type {type[:40]!r} is left out"] = None
        elif (why := KINDS[type].why_left_out(tool, place)) is not None:
            self.warnings[f"{place} of type {type!r} is left out: {why}"] = None
        else:
            self._offer(tool, place)

    def _add_namespace(self, tool: dict[str, Any], place: str) -> None:
        """Offer the tools of a namespace. Its description goes to the first: a chat has no other place for it."""
        name, tools = text_field(tool, "name", place, "tools"), tool.get("tools")
        if not isinstance(tools, list):
            raise bad_request(f"{place}.tools must be a list of tools", "tools")
        self._note_fields(tool, _NAMESPACE_FIELDS)
        about = tool_description(tool, place)
        for index, entry in enumerate(tools):
            inner = f"{place}.tools.{index}"
            if not isinstance(entry, dict) or entry.get("type") not in ("function", "custom"):
                raise bad_request(f"{inner} must be a tool of type 'function' or 'custom'", "tools")
            self._offer(entry, inner, name, about)
            about = None

    def _offer(self, tool: dict[str, Any], place: str, namespace: str | None = None, about: str | None = None) -> None:
        ALLOWED_CALLERS.check(f"{place}.allowed_callers", tool.get("allowed_callers"))
        kind = KINDS[tool["type"]]
        function = kind.function(tool, place, self.warnings)
        self._note_fields(tool, kind.fields)
        read_function(function, place)
        known = CallName(function["name"], namespace, kind)
        if self._again and (known.name, namespace) in self._offered:
            return
        function["name"] = self._free_name(known, place)
        if about:
            function["description"] = "\n\n".join(filter(None, (about, function.get("description"))))
        self.names[function["name"]] = known
        self._offered[known.name, namespace] = function["name"]
        self._callable.add(kind.type)
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

    def _note_fields(self, tool: dict[str, Any], known: frozenset[str]) -> None:
        for name, value in tool.items():
            if value is not None and name not in known:
                self.warnings[f"tools.{name}"] = None

    # --- tool_choice ------------------------------------------------------------------------------------------------
    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Return the `tool_choice` of the chat. Raises `ApiError` 400."""
        if not isinstance(choice, dict):
            return choice
        type = choice.get("type")
        if self._is_callable(choice):
            return self._named(choice)
        if type != "allowed_tools":
            raise unsupported_error("tool_choice", f"no tool of type {str(type)[:40]!r} can be called here")
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise bad_request("tool_choice.tools must be a list of objects", "tool_choice")
        named = [self._named(tool) for tool in tools if self._is_callable(tool)]
        if tools and not named:
            raise unsupported_error("tool_choice", "none of the allowed tools can be called here")
        if len(named) < len(tools):
            self.warnings["tool_choice.tools: those that cannot be called here are left out"] = None
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}

    def _is_callable(self, choice: dict[str, Any]) -> bool:
        """True unless the choice names a tool that is left out."""
        type = choice.get("type")
        return isinstance(type, str) and type in self._callable

    def _named(self, choice: dict[str, Any]) -> dict[str, Any]:
        namespace = choice.get("namespace")
        name = KINDS[choice["type"]].name(choice, "tool_choice", "tool_choice")
        offered = self.name_of(name, namespace if isinstance(namespace, str) else None)
        return {"type": "function", "function": {"name": offered}}
