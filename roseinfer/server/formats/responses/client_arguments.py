"""Arguments of the tools in `client_tools`: as the client gets them, and their schemas for the model.

The schemas have no alternatives and no restrictions of texts, so that every format of tool calls can enforce them.
"""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from roseinfer.server.formats.request_document import AnswerModel

MAX_ARGUMENT = 2**31 - 1
Amount = Annotated[int, Field(ge=1, le=MAX_ARGUMENT)]
Command = Annotated[list[str], Field(min_length=1)]


# --- what the client gets -----------------------------------------------------------------------------------------
class _Arguments(AnswerModel):
    model_config = ConfigDict(extra="ignore")


class ShellAction(_Arguments):
    commands: Command
    timeout_ms: Amount | None = None
    max_output_length: Amount | None = None


class LocalShellAction(_Arguments):
    type: Literal["exec"] = "exec"
    command: Command
    env: dict[str, str] = Field(default_factory=dict)
    timeout_ms: Amount | None = None
    user: str | None = None
    working_directory: str | None = None


class WrittenFile(_Arguments):
    type: Literal["create_file", "update_file"]
    path: str
    diff: str


class DeletedFile(_Arguments):
    type: Literal["delete_file"]
    path: str


PatchOperation = Annotated[WrittenFile | DeletedFile, Field(discriminator="type")]


# --- what the model gets ------------------------------------------------------------------------------------------
def _text(about: str) -> dict[str, Any]:
    return {"type": "string", "description": about}


def _texts(about: str) -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}, "minItems": 1, "description": about}


def _amount(about: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": MAX_ARGUMENT, "description": about}


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TIMEOUT = _amount("Time limit in milliseconds")
SHELL = _object(
    ["commands"],
    commands=_texts("Commands of the shell, run in this order"),
    timeout_ms=_TIMEOUT,
    max_output_length=_amount("Maximum number of characters of output to return"),
)
LOCAL_SHELL = _object(
    ["command", "env"],
    command=_texts('The program and its arguments. For syntax of a shell: ["bash", "-lc", "..."]'),
    env={"type": "object", "additionalProperties": {"type": "string"}, "description": "Environment variables to set"},
    timeout_ms=_TIMEOUT,
    user=_text("User that runs the program"),
    working_directory=_text("Folder that the program runs in"),
)
APPLY_PATCH = _object(
    ["type", "path", "diff"],
    type={"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
    path=_text("Path of the file"),
    diff=_text(
        "create_file: the lines of the file, each after '+'. update_file: hunks, each a line '@@', perhaps with the "
        "heading of the section that it is in, and then lines after ' ' (unchanged), '-' (removed) or '+' (added). "
        "delete_file: empty"
    ),
)
