"""Constraint of an output, as `SamplingParams.structured_outputs` takes it."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from roseinfer.core.errors import InvalidRequestError

_TEXTS = ("regex", "grammar", "whitespace_pattern")
_SCHEMAS = ("json", "structural_tag")
_FLAGS = ("json_object", "disable_fallback", "disable_any_whitespace", "disable_additional_properties")


@dataclass(kw_only=True, slots=True)
class StructuredOutputsParams:
    """Constraint of an output: exactly one of the first six fields.

    Args:
        json: a JSON schema, as a dictionary or as text that holds one.
        regex: a regular expression (Rust's syntax, without look-around) that the whole text matches.
        choice: texts, one of which is the output.
        grammar: a grammar in Lark, or in GBNF if it contains `::=`.
        json_object: True for any JSON object.
        structural_tag: texts that start constrained parts of otherwise free output, as a dictionary or as text.
        disable_fallback: no effect, as there is one implementation.
        disable_any_whitespace: no white space between the tokens of JSON.
        disable_additional_properties: default `additionalProperties` to false.
        whitespace_pattern: regular expression of the text between two tokens of JSON.

    Raise `InvalidRequestError` for a field of the wrong type. `LLM` checks the rest when a request uses it.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self.given()

    def given(self) -> dict[str, Any]:
        """Return the fields that are set. Raise `InvalidRequestError` for one of the wrong type."""
        given = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}
        for name, value in given.items():
            if name in _TEXTS and not isinstance(value, str):
                raise _wrong(name, "text", value)
            if name in _SCHEMAS and not isinstance(value, str | dict):
                raise _wrong(name, "a dictionary or text", value)
            if name in _FLAGS and not isinstance(value, bool):
                raise _wrong(name, "True or False", value)
        if self.choice is not None:
            given["choice"] = _texts(self.choice)
        return given


def _texts(choice: Any) -> list[str]:
    texts = list(choice) if isinstance(choice, Iterable) and not isinstance(choice, str) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise _wrong("choice", "a list of texts", choice)
    return texts


def _wrong(name: str, expected: str, value: Any) -> InvalidRequestError:
    message = f"structured_outputs.{name} must be {expected}, got {type(value).__name__}"
    return InvalidRequestError(message, "structured_outputs")
