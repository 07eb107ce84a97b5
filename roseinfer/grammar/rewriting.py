"""A JSON schema in words that the grammar library takes: without keywords that say nothing, and with bounds within its
numbers.

The library looks at names: `uniqueItems: false` is as unknown to it as `true`. It takes numbers as 64-bit floats and
integers, and fails at the edge of those, where the bounds of 64-bit integers are.
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from roseinfer.grammar.subschemas import Schema, SchemaGraph

# The bounds furthest from 0 that the library takes: the last 64-bit float before 2^63, which it calls out of range.
FURTHEST = 2**63 - 1024


def rewritten(schema: Schema) -> Schema:
    """`schema`, or a copy that says the same. A bound beyond `FURTHEST` comes nearer: no document passes for it that
    should not, and integers within 1,024 of the ends of 64 bits are not written.

    Its depth has been checked.
    """
    if not any(_drop(part) or _nearer(part) for part in SchemaGraph(schema).parts):
        return schema
    copy = deepcopy(schema)
    for part in SchemaGraph(copy).parts:
        for name in _drop(part):
            del part[name]
        part |= _nearer(part)
    return copy


# --- keywords that say nothing ----------------------------------------------------------------------------------
def _anything(value: Any) -> bool:
    """Whether every document follows a schema."""
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


def _drop(part: Schema) -> list[str]:
    """Keywords of a part of a schema that exclude no document."""
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
def _nearer(part: Schema) -> dict[str, int]:
    """The bounds of a part that are too far out, and where they go instead."""
    lower = {name: -FURTHEST for name in ("minimum", "exclusiveMinimum") if _number(part, name) < -FURTHEST}
    upper = {name: FURTHEST for name in ("maximum", "exclusiveMaximum") if _number(part, name) > FURTHEST}
    return lower | upper


def out_of_reach(part: Schema) -> list[str]:
    """Bounds that leave only numbers beyond `FURTHEST`."""
    lower = [name for name in ("minimum", "exclusiveMinimum") if _number(part, name) > FURTHEST]
    return lower + [name for name in ("maximum", "exclusiveMaximum") if _number(part, name) < -FURTHEST]


def _number(part: Schema, name: str) -> int | float:
    """0 if it is none: older drafts have booleans there, and what is wrong is the library's to say."""
    value = part.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else 0
