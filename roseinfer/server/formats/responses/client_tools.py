"""Tools that OpenAI describes and clients run: shells and patches of files. The model sees them as functions."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter

from roseinfer.server.formats.chat_builder import check_nesting, text_field
from roseinfer.server.formats.responses import client_arguments as written
from roseinfer.server.formats.responses.tool_kinds import CallName, Events, ToolKind, call_id_of
from roseinfer.server.http.errors import bad_request


class ClientTools(ToolKind):
    """Base of the kinds. A call that was cut, or with wrong arguments, is that of a function: no client runs it.

    `field`: of the item, with the arguments. `absent`: arguments that the model writes and items may lack.
    `fixed`: entries of the field that are no arguments. `more`: other fields of the item.
    """

    late = True
    fields = frozenset({"type", "allowed_callers"})
    field: str
    about: str
    parameters: Mapping[str, Any]
    shape: Any
    absent: Mapping[str, Any] = {}
    fixed: frozenset[str] = frozenset()
    more: Mapping[str, Any] = {}

    def function(self, tool: dict[str, Any], place: str, warnings: dict[str, None]) -> dict[str, Any]:
        return {"name": self.type, "description": self.about, "parameters": self.parameters, "strict": True}

    def name(self, given: dict[str, Any], place: str, param: str) -> str:
        return self.type

    def call_id(self, item: dict[str, Any], place: str) -> str:
        return call_id_of(item, place)

    def arguments(self, item: dict[str, Any], place: str) -> dict[str, Any]:
        """Return the arguments in the order of the schema, as a grammar has the model write them."""
        given = item.get(self.field)
        check_nesting(given, "input")
        if not isinstance(given, dict):
            return {self.field: given}
        names = dict.fromkeys([*self.parameters["properties"], *given])
        found = {name: given.get(name, self.absent.get(name)) for name in names if name not in self.fixed}
        return {name: value for name, value in found.items() if value is not None}

    def fits(self, text: str) -> bool:
        try:
            self._read(text)
        except ValueError:
            return False
        return True

    def call(self, name: CallName, text: str) -> dict[str, Any]:
        return {self.field: self._read(text), **self.more}

    def begun(self, name: CallName, text: str) -> dict[str, Any]:
        return self.call(name, text)

    def _read(self, text: str) -> dict[str, Any]:
        """Return the value of the field. Raises `ValueError`."""
        found: dict[str, Any] = self._adapter.validate_json(text).model_dump()
        return found

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.shape)


class ShellTools(ClientTools):
    """The tool `shell`, unless its commands run in a container of a server."""

    type, item, prefix, field = "shell", "shell_call", "sh", "action"
    about = "Run commands in a shell on the user's machine. Returns their output and exit codes."
    fields = ClientTools.fields | {"environment"}
    parameters, shape = written.SHELL, written.ShellAction
    more: Mapping[str, Any] = {"environment": {"type": "local"}}

    def why_left_out(self, tool: dict[str, Any], place: str) -> str | None:
        kind = _environment(tool, place).get("type", "local")
        return None if kind == "local" else f"environment {str(kind)[:40]!r} is not local"

    def function(self, tool: dict[str, Any], place: str, warnings: dict[str, None]) -> dict[str, Any]:
        skills = _skills(_environment(tool, place).get("skills"), f"{place}.environment.skills")
        about = "\n".join([self.about, *skills])
        return super().function(tool, place, warnings) | {"description": about}

    def begun(self, name: CallName, text: str) -> dict[str, Any]:
        call = self.call(name, text)
        return call | {self.field: call[self.field] | {"commands": []}}

    def ended(self, name: CallName, text: str) -> Events:
        events: Events = []
        for index, command in enumerate(self._read(text)["commands"]):
            at = {"command_index": index}
            events.append(("shell_call_command.added", at | {"command": ""}))
            events.append(("shell_call_command.delta", at | {"delta": command}))
            events.append(("shell_call_command.done", at | {"command": command}))
        return events


def _environment(tool: dict[str, Any], place: str) -> dict[str, Any]:
    environment = tool.get("environment")
    if not isinstance(environment, dict | None):
        raise bad_request(f"{place}.environment must be an object", "tools")
    return environment or {}


def _skills(skills: Any, place: str) -> list[str]:
    """Return lines that describe the skills of a local environment. Raises `ApiError` 400."""
    if skills is None or skills == []:
        return []
    if not isinstance(skills, list) or not all(isinstance(skill, dict) for skill in skills):
        raise bad_request(f"{place} must be a list of objects", "tools")
    lines = ["Skills are folders with instructions in SKILL.md. Read them before a task that fits:"]
    for index, skill in enumerate(skills):
        name, about, path = (
            text_field(skill, key, f"{place}.{index}", "tools") for key in ("name", "description", "path")
        )
        lines.append(f"- {name} ({path}): {about}")
    return lines


class LocalShellTools(ClientTools):
    """The tool `local_shell`, the predecessor of `shell`."""

    type, item, prefix, field = "local_shell", "local_shell_call", "lsh", "action"
    about = "Run a program on the user's machine. Returns its output."
    parameters, shape = written.LOCAL_SHELL, written.LocalShellAction
    absent: Mapping[str, Any] = {"env": {}}
    fixed = frozenset({"type"})


class ApplyPatchTools(ClientTools):
    """The tool `apply_patch`."""

    type, item, prefix, field = "apply_patch", "apply_patch_call", "apc", "operation"
    about = "Create, update or delete a file on the user's machine."
    parameters, shape = written.APPLY_PATCH, written.PatchOperation
    absent: Mapping[str, Any] = {"diff": ""}


CLIENT_TOOLS: tuple[ClientTools, ...] = (ShellTools(), LocalShellTools(), ApplyPatchTools())
