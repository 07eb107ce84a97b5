"""Conversation as it is sent: messages, objectives and the fields of each request."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roseinfer.core.errors import ConfigError

Message = dict[str, str]


def slo_fields(slo: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request fields for these objectives; with objectives, they also ask for the report on them."""
    return {"slo": {**slo, "why": True}} if slo else {}


@dataclass(slots=True)
class Conversation:
    """Turns so far in `messages`, without the system message. `params`: sampling fields of every request."""

    model: str
    system: str | None = None
    slo: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Return the body of the request for the next answer."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        body: dict[str, Any] = {"model": self.model, "messages": [*first, *self.messages], **self.params}
        return {**body, **slo_fields(self.slo)}

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})

    def answered(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def remove_last(self) -> str | None:
        """Remove the last question and its answer. Return the question, None if there is none."""
        while self.messages:
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return None

    def save(self, path: Path) -> None:
        """Write the request that would continue the conversation as JSON. Raises `ConfigError`, also if the file
        exists.
        """
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self.body(), indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
