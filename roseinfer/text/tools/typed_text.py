"""Conversion of plain text to JSON by the type in its schema."""

import json
import re

from roseinfer.text.tools.base import CallCutOff, MalformedCall
from roseinfer.text.tools.python_value import PythonValue, quoted
from roseinfer.text.tools.reader import TextReader

NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
NULLS = frozenset({"null", "None"})
BOOLEANS = {"true": "true", "True": "true", "false": "false", "False": "false"}
BRACKETS = {"{": "object", "[": "array"}


def only_text(types: frozenset[str]) -> bool:
    """Return True if values of these JSON types are plain text. Without types nothing is known, so they are."""
    return types <= {"string"}


def as_json(text: str, types: frozenset[str]) -> str | None:
    """Return the text as the first of `types` that fits, strings last; digits stay unchanged.

    A text that fits none becomes a string. None means no value: the text is empty and must not be.
    """
    bare = text.strip()
    if not bare and "string" not in types:
        return "null" if "null" in types else None
    if bare in NULLS and ("null" in types or "string" not in types):
        return "null"
    if not types.isdisjoint({"integer", "number"}) and NUMBER.fullmatch(bare):
        return bare
    if "boolean" in types and bare in BOOLEANS:
        return BOOLEANS[bare]
    if BRACKETS.get(bare[:1]) in types:
        value = bare if _is_json(bare) else _from_python(bare)
        if value is not None:
            return value
    return quoted(text)


def _is_json(text: str) -> bool:
    try:
        # Keep numbers as text, since they may have any length.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which are not JSON."""
    raise ValueError(constant)


def _from_python(text: str) -> str | None:
    """Convert lists and objects in Python's notation, which models write too."""
    reader = TextReader()
    reader.give(text, letters=True)
    reader.ended = True
    value = PythonValue(reader)
    try:
        for _ in value.read():
            raise AssertionError("a reader at its end never waits")
    except (MalformedCall, CallCutOff):
        return None
    return value.json if reader.at == len(text) else None
