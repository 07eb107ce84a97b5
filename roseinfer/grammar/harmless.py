"""JSON schemas that are known to compile in next to no time, of which there is nothing to prove.

Proving takes another process, and is for what may take hours, die of its recursion or have no instance. Most schemas of
applications are objects, lists, texts and numbers within one another. If all that stands in one is on the lists below
and its sizes are small, the engine can have it at once. Whatever else there is, is proved; nothing is refused here.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

from roseinfer.grammar.constraint import JsonOptions, JsonSchema
from roseinfer.grammar.json_schema import KEYWORDS, OPTIONS_KEY
from roseinfer.grammar.subschemas import Schema, target

MOST_PARTS = 200
MOST_LEVELS = 16
MOST_CHOICES = 100
LONGEST_TEXT = 1000  # also of bounds of texts
MOST_ITEMS = 50
LARGEST_NUMBER = 10**9

_TYPES: dict[str, Callable[[Any], bool]] = {
    "array": lambda value: False,  # none is ever named by `enum`
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: _is_number(value) and isinstance(value, int),
    "null": lambda value: value is None,
    "number": lambda value: _is_number(value) and isinstance(value, int),
    "object": lambda value: False,
    "string": lambda value: isinstance(value, str),
}
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_COUNTS = {"minLength": LONGEST_TEXT, "maxLength": LONGEST_TEXT, "minItems": MOST_ITEMS, "maxItems": MOST_ITEMS}
_BOUNDS = ("minimum", "maximum")
_TAKEN = _OF_OBJECTS | {"type", "items", "enum", "anyOf", "$ref", "format", *_COUNTS, *_BOUNDS}
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"})
# Of these drafts the words above mean the same.
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/20(19-09|20-12))/schema#?")
# Notes that say where references lead, or what the words mean.
_PLACES = frozenset({"$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", OPTIONS_KEY})
_AT_ROOT = frozenset({"$schema", "$id", "id"})


def is_harmless(constraint: object) -> bool:
    """Whether a constraint is a schema that compiles, has an instance, and is enforced as a whole."""
    if not isinstance(constraint, JsonSchema) or constraint.options != JsonOptions():
        return False
    root = constraint.schema
    draft = root.get("$schema", "")
    if draft and not (isinstance(draft, str) and _DRAFTS.fullmatch(draft)):
        return False
    seen: set[int] = set()
    level = [root]
    for _ in range(MOST_LEVELS + 1):
        if not level:
            return True
        seen.update(map(id, level))
        if len(seen) > MOST_PARTS or not all(_is_plain(part, root) for part in level):
            return False
        level = [below for part in level for below in _below(part, root) if id(below) not in seen]
    return False


def _is_plain(part: Schema, root: Schema) -> bool:
    """One part by itself."""
    words = part.keys() & KEYWORDS
    if not words <= _TAKEN or part.keys() & _PLACES or (part is not root and part.keys() & _AT_ROOT):
        return False
    for name in ("anyOf", "$ref"):  # what stands beside them would have to hold as well
        if name in words and len(words) > 1:
            return False
    if "$ref" in words and target(root, part["$ref"]) is None:
        return False
    if "format" in words and not (words <= {"type", "format"} and str(part["format"]) in _FORMATS):
        return False
    kinds = part.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return (
        isinstance(kinds, list)
        and all(isinstance(kind, str) and kind in _TYPES for kind in kinds)
        and (bool(kinds) or "type" not in part)
        and _has_object(part)
        and _has_choices(part, kinds)
        and _has_range(part)
    )


def _has_object(part: Schema) -> bool:
    named, required = part.get("properties", {}), part.get("required", [])
    rest = part.get("additionalProperties", True)
    return (
        isinstance(named, dict)
        and all(isinstance(below, dict) and _is_text(name) for name, below in named.items())
        and isinstance(required, list)
        and all(isinstance(name, str) and name in named for name in required)
        and isinstance(rest, bool | dict)
        and isinstance(part.get("items", {}), dict)
    )


def _has_choices(part: Schema, kinds: list[str]) -> bool:
    for name in ("enum", "anyOf"):
        if name in part and not (isinstance(part[name], list) and 0 < len(part[name]) <= MOST_CHOICES):
            return False
    if "enum" in part and not part.keys() & KEYWORDS <= {"type", "enum"}:
        return False
    fits = [_TYPES[kind] for kind in kinds or ("string", "integer", "boolean", "null")]
    choices = part.get("enum", [])
    return all(isinstance(below, dict) for below in part.get("anyOf", [])) and all(
        any(fit(choice) for fit in fits) and _is_small(choice) for choice in choices
    )


def _has_range(part: Schema) -> bool:
    for name, most in _COUNTS.items():
        if name in part and not (type(part[name]) is int and 0 <= part[name] <= most):
            return False
    for name in _BOUNDS:
        if name in part and not (_is_number(part[name]) and abs(part[name]) <= LARGEST_NUMBER):
            return False
    if all(name in part for name in _BOUNDS) and not all(isinstance(part[name], int) for name in _BOUNDS):
        return False  # there may be no integer between them
    pairs = (("minLength", "maxLength"), ("minItems", "maxItems"), _BOUNDS)
    return all(part[low] <= part[high] for low, high in pairs if low in part and high in part)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_small(value: Any) -> bool:
    return _is_text(value) if isinstance(value, str) else value is None or abs(value) <= LARGEST_NUMBER


def _is_text(value: str) -> bool:
    """Of characters that JSON writes as they are."""
    return len(value) <= LONGEST_TEXT and value.isprintable()


def _below(part: Schema, root: Schema) -> Iterator[Schema]:
    referred = target(root, part.get("$ref"))
    if referred is not None:
        yield referred
    yield from part.get("properties", {}).values()
    yield from part.get("anyOf", ())
    for name in ("items", "additionalProperties"):
        if isinstance(part.get(name), dict):
            yield part[name]
