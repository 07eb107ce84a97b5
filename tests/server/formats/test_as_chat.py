"""Shared parts of the translations to chat requests: names of fields in errors."""

import pytest

from roseinfer.core.errors import InvalidRequestError
from roseinfer.server.formats.as_chat import FieldNames
from roseinfer.server.http.errors import ApiError

NAMES = FieldNames(
    {"messages": "input", "format": "text.format", "format.schema": "text.format", "tools.*.function": "tools.*"},
    {},
    {},
)


@pytest.mark.parametrize(
    ("text", "field", "own"),
    [
        ("messages must not be empty", "messages", "input must not be empty"),
        ("format.schema.type, not format", "format", "text.format.type, not text.format"),
        ("messages_of.format", "", "messages_of.format"),
        ("format: messages", "format", "text.format: messages"),
        ("format: messages", "", "text.format: input"),
        ("tools.12.function.name and tools.function", "tools", "tools.12.name and tools.function"),
        ("temperature", "temperature", "temperature"),
    ],
)  # fmt: skip
def test_fields_translate(text: str, field: str, own: str) -> None:
    assert NAMES.translate(text, field) == own


def test_errors_name_the_fields_that_were_written() -> None:
    with pytest.raises(ApiError) as raised, NAMES.errors():
        raise InvalidRequestError("format.schema.x is wrong", "format", "invalid_grammar")
    error = raised.value
    assert (error.status, error.message, error.param, error.code) == (
        400, "text.format.x is wrong", "text.format", "invalid_grammar",
    )  # fmt: skip
