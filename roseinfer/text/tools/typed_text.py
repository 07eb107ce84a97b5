"""Plain text of a value whose type only its schema knows, turned into JSON."""

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
    """Whether a value of one of these JSON types is its text; no types: nothing is known of it."""
    return types <= {"string"}


def as_json(text: str, types: frozenset[str]) -> str | None:
    """The first of `types` that the text can be, strings last; digits stay as they are.

    A text that is none of them is a string. None: it is empty and may not be, so nothing was given.
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
        # Numbers of any length: none is turned into one.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    """NaN and the infinities are not JSON."""
    raise ValueError(constant)


def _from_python(text: str) -> str | None:
    """Models write lists and objects as Python does, too."""
    reader = TextReader()
    reader.give(text, letters=True)
    reader.ended = True
    value = PythonValue(reader)
    try:
        for _ in value.read():
            raise AssertionError("an ended reader never waits")
    except (MalformedCall, CallCutOff):
        return None
    return value.json if reader.at == len(text) else None
