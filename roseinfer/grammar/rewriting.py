"""Rewrite a JSON schema for llguidance: drop keywords without effect, and move bounds into the range of its numbers.

llguidance rejects keywords by name: `uniqueItems: false` just as `true`. It reads numbers as 64-bit floats and integers
and fails at the ends of 64-bit integers.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from roseinfer.grammar.schema_graph import Schema, SchemaGraph

# The bound furthest from 0 that llguidance accepts: the last 64-bit float before 2^63.
MAX_BOUND = 2**63 - 1024


def rewrite_schema(schema: Schema) -> Schema:
    """Return `schema`, or an equivalent copy. The schema's depth has been checked.

    A bound beyond `MAX_BOUND` moves to it: no invalid document passes, but integers within 1,024 of the ends of 64 bits
    are never written.
    """
    if not any(_neutral_keywords(part) or _clamped_bounds(part) for part in SchemaGraph(schema).parts):
        return schema
    copy = deepcopy(schema)
    for part in SchemaGraph(copy).parts:
        for name in _neutral_keywords(part):
            del part[name]
        part |= _clamped_bounds(part)
    return copy


# --- keywords without effect ------------------------------------------------------------------------------------
def _anything(value: Any) -> bool:
    """Return True if every document follows the schema."""
    return value is True or value == {}


def _each(neutral: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(neutral, value.values()))


_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "dependencies": _each(lambda value: value == [] or _anything(value)),
    "dependentRequired": _each(lambda value: value == []),
    "dependentSchemas": _each(_anything),
    "not": lambda value: value is False,
    "propertyNames": lambda value: _anything(value) or value == {"type": "string"},
    "unevaluatedItems": _anything,
    "unevaluatedProperties": _anything,
    "uniqueItems": lambda value: value is False,
}


def _neutral_keywords(part: Schema) -> list[str]:
    """Return the keywords of a part that exclude no document."""
    names = [name for name, neutral in _NEUTRAL.items() if name in part and neutral(part[name])]
    if "contains" not in part:
        names += [name for name in ("minContains", "maxContains") if name in part]
    idle: list[str] = [
        name for name in ("then", "else") if name in part and ("if" not in part or _anything(part[name]))
    ]
    if "if" in part and all(name in idle or name not in part for name in ("then", "else")):
        idle.append("if")
    return names + idle


# --- bounds -----------------------------------------------------------------------------------------------------
def _clamped_bounds(part: Schema) -> dict[str, int]:
    """Return new values for the bounds of a part that are too far from 0."""
    lower = {name: -MAX_BOUND for name in ("minimum", "exclusiveMinimum") if _number(part, name) < -MAX_BOUND}
    upper = {name: MAX_BOUND for name in ("maximum", "exclusiveMaximum") if _number(part, name) > MAX_BOUND}
    return lower | upper


def unreachable_bounds(part: Schema) -> list[str]:
    """Return the bounds of a part that leave only numbers beyond `MAX_BOUND`."""
    lower = [name for name in ("minimum", "exclusiveMinimum") if _number(part, name) > MAX_BOUND]
    return lower + [name for name in ("maximum", "exclusiveMaximum") if _number(part, name) < -MAX_BOUND]


def _number(part: Schema, name: str) -> int | float:
    """Return the keyword's number, 0 if it has none: older drafts have booleans there; llguidance reports errors."""
    value = part.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
