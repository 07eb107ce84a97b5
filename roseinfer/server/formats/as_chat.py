"""Translation of other APIs' requests to chats: fields that Responses and Messages share."""

import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from roseinfer.core.errors import InvalidRequestError, RequestTooLongError
from roseinfer.server.formats.schemas import ChatRequest, OneAnswerRequest
from roseinfer.server.formats.unsupported import HasEffect, Unsupported, supported, unsupported_error
from roseinfer.server.http.errors import ApiError, as_api_error
from roseinfer.server.http.request_models import parse, unknown_fields
from roseinfer.server.request.models import ModelField


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Differences between the fields of an API and those of a chat.

    `names`: field of a chat -> field in the API, `*` standing for a position. `unsupported`: fields that are rejected.
    `hints`: fields that may be ignored, and which of their values have an effect.
    """

    names: Mapping[str, str]
    unsupported: Mapping[str, Unsupported]
    hints: Mapping[str, HasEffect]
    # Message of the API for a prompt that is too long; None: that of chats.
    too_long: Callable[[RequestTooLongError], str] | None = None

    def is_ignored(self, name: str, value: Any) -> bool:
        """True if ignoring the field deserves a warning."""
        has_effect = self.hints.get(name)
        return has_effect is None or has_effect(value)

    def translate(self, text: str, field: str = "") -> str:
        """Return `text` with the API's names for `field` of a chat and the fields below it; "" = all fields."""
        for name in sorted(self.names, key=len, reverse=True):
            if f"{name}.".startswith(f"{field}." if field else ""):
                pattern = re.escape(name).replace(r"\*", r"(\d+)")
                text = re.sub(rf"(?<![\w.]){pattern}(?!\w)", self.names[name].replace("*", r"\1"), text)
        return text

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Let errors of a chat name the fields of the API."""
        try:
            yield
        except (ApiError, InvalidRequestError) as raised:
            error = as_api_error(raised)
            if self.too_long is not None and isinstance(raised, RequestTooLongError):
                error.message = self.too_long(raised)
            elif error.param is not None:
                error.message = self.translate(error.message, error.param)
            if error.param is not None:
                error.param = self.translate(error.param)
            raise error from raised


def chat_request(request: ModelField, translated: dict[str, Any], names: FieldNames) -> ChatRequest:
    """Return a chat with the common fields of `request`, the `translated` ones and unknown ones.

    Raises `ApiError` 400 for unsupported fields, and for fields of a chat that the API does not have.
    """
    common = {name: getattr(request, name, None) for name in OneAnswerRequest.model_fields}
    extras = supported(unknown_fields(request), names.unsupported)
    extras = {name: value for name, value in extras.items() if names.is_ignored(name, value)}
    for name in extras:
        if name in ChatRequest.model_fields and name not in OneAnswerRequest.model_fields:
            raise unsupported_error(name, "it is a field of /v1/chat/completions")
    given = {name: value for name, value in (common | translated).items() if value is not None}
    with names.errors():
        return parse(ChatRequest, extras | given)


def ignored_in_tools(tools: list[dict[str, Any]] | None, known: Set[str]) -> list[str]:
    """Return warnings for fields of tools that are not `known`, each once."""
    found = {name: None for tool in tools or [] for name, value in tool.items() if value is not None}
    return [f"tools.{name}" for name in found if name not in known]
