"""Constraint that the fields of `structured_outputs` set, in requests to the server and in `LLM`."""

from collections.abc import Mapping
from typing import Any

from orjson import JSONDecodeError, loads

from roseinfer.core.errors import InvalidRequestError
from roseinfer.grammar.constraint import (
    JSON_OBJECT,
    Choice,
    Constraint,
    GrammarText,
    JsonOptions,
    JsonSchema,
    Regex,
    StructuralTag,
)

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def structured_constraint(fields: Mapping[str, Any], param: str) -> Constraint:
    """Return the constraint. `fields`: values of `KINDS` and `OPTIONS`, of the right types; None = not given.

    Raise `InvalidRequestError` that names `param` unless there is exactly one kind, with options that fit it.
    """
    # `json_object: false` has no effect.
    kinds = [name for name in KINDS if fields.get(name) not in (None, False)]
    if len(kinds) != 1:
        found = f"got {', '.join(kinds)}" if kinds else "got none"
        raise InvalidRequestError(f"{param} takes exactly one of {', '.join(KINDS)}; {found}", param)
    (kind,) = kinds
    for name in OPTIONS:
        if kind not in ("json", "json_object", "structural_tag") and fields.get(name):
            raise InvalidRequestError(f"{param}: {name} is for JSON only", param)
    return _of_kind(kind, fields[kind], _options(fields, param), param)


def _of_kind(kind: str, value: Any, options: JsonOptions, param: str) -> Constraint:
    if kind == "json":
        return JsonSchema(schema=_object(value, f"{param}: json", param), options=options)
    if kind == "json_object":
        return JsonSchema(schema=JSON_OBJECT.schema, strict=True, options=options)
    if kind == "structural_tag":
        return StructuralTag(spec=_object(value, f"{param}: structural_tag", param), options=options)
    if kind == "choice":
        return Choice(value)
    return Regex(value) if kind == "regex" else GrammarText(value)


def _options(fields: Mapping[str, Any], param: str) -> JsonOptions:
    if fields.get("whitespace_pattern") is not None and fields.get("disable_any_whitespace"):
        message = f"{param}: whitespace_pattern and disable_any_whitespace cannot be combined"
        raise InvalidRequestError(message, param)
    return JsonOptions(
        whitespace_pattern=fields.get("whitespace_pattern"),
        any_whitespace=not fields.get("disable_any_whitespace"),
        additional_properties=not fields.get("disable_additional_properties"),
    )


def _object(value: str | dict[str, Any], where: str, param: str) -> dict[str, Any]:
    """Return an object, parsed if it is given as text."""
    if isinstance(value, str):
        try:
            value = loads(value)
        except JSONDecodeError as error:
            raise InvalidRequestError(f"{where} is invalid JSON: {error}"[:300], param) from error
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{where} must be an object", param)
    return value
