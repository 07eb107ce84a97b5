"""JSON schemas for the grammar library: with our options inside, and looked through for what the library lets pass.

The library refuses what it cannot enforce, or, when lenient, ignores it and says so. It does not see:
- properties by names with escapes: `{"\\u0061": 1}` passes for another property than `a`. Hence no `\\u` at all;
- that keys which no schema names may come twice, so that they count for less than `minProperties` wants;
- that it leaves control characters out of the texts that `const` and `enum` name, without that `\\u`;
- that in older drafts an `$id` beside a `$ref` means nothing;
- that it takes numbers as 64-bit floats, and those of integers as 64-bit integers, the nearest there are: bounds move,
  and `const` names another number, or runs for ever at -2^63 until the stack is full;
- that a schema which only refers to itself has no instance. Such a grammar compiles, and its matchers run into it;
- keywords that no draft knows, which are no mistake.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from orjson import JSONEncodeError, dumps

from roseinfer.grammar.constraint import JsonOptions
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import check_literals, check_regex
from roseinfer.grammar.patterns import with_supported_patterns
from roseinfer.grammar.rewriting import FURTHEST, out_of_reach, rewritten
from roseinfer.grammar.subschemas import Schema, SchemaGraph

# Nobody needs more between two symbols, and a model that may pad for ever sometimes does.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# What may stand behind a backslash in strings.
ESCAPES = 'nrbtf\\"'
OPTIONS_KEY = "x-guidance"
_INEXACT = "integers must lie between -2^63 and 2^63 and be such that 64-bit floats hold them"
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")

# fmt: off
_ENFORCED = frozenset(
    {
        "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum",
        "exclusiveMinimum", "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
        "minLength", "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties",
        "prefixItems", "properties", "required", "type",
    }
)
_ANNOTATIONS = frozenset(
    {
        "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary",
        "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated",
        "description", "example", "examples", "externalDocs", "id", "readOnly", "title", "writeOnly", "xml",
    }
)
# Known to a draft and not enforced: of these the library speaks itself.
_REPORTED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems",
    }
)
# fmt: on
# What says something of documents: all else is a note, or no keyword at all.
KEYWORDS = _ENFORCED | _REPORTED


@dataclass(frozen=True, slots=True)
class SchemaText:
    """`text`: the schema as JSON, as the library reads it, also behind `%json` in a Lark grammar. `ignored`: keywords
    that it does not enforce, beside those that the library names.
    """

    text: str
    ignored: tuple[str, ...]


def schema_text(schema: Schema, *, strict: bool, options: JsonOptions) -> SchemaText:
    """The keys of documents come in the order of `schema`. Raises `GrammarError` for what cannot be enforced, with
    `strict`, and for what has no instance.
    """
    schema = rewritten(schema if options.additional_properties else _closed(schema))
    schema, left_out = with_supported_patterns(schema, strict=strict)
    graph = SchemaGraph(schema)
    ignored = dict.fromkeys([*left_out, *_ignored(graph, schema, strict)])
    if graph.loops():
        raise GrammarError("the schema refers to itself without end")
    if not graph.has_finite_instance():
        raise GrammarError("the schema is unsatisfiable: what it requires contains itself without end")
    settings = {
        "whitespace_flexible": options.any_whitespace,
        "whitespace_pattern": _whitespace(options),
        "item_separator": ",",
        "key_separator": ":",
        "json_allowed_escapes": ESCAPES,
        "coerce_one_of": not strict,
        "lenient": not strict,
    }
    return SchemaText(_dumped(schema | {OPTIONS_KEY: settings}), tuple(ignored))


def _dumped(schema: Schema) -> str:
    try:
        return dumps(schema).decode()
    except JSONEncodeError as error:
        raise GrammarError(f"the schema cannot be written as JSON: {error}") from error


def _whitespace(options: JsonOptions) -> str | None:
    if not options.any_whitespace:
        return None
    if options.whitespace_pattern is None:
        return WHITESPACE
    check_regex(options.whitespace_pattern)
    return options.whitespace_pattern


def _ignored(graph: SchemaGraph, schema: Schema, strict: bool) -> Iterator[str]:
    if OPTIONS_KEY in schema:
        yield OPTIONS_KEY
    for part in graph.parts:
        for name in part:
            if name not in _ENFORCED and name not in _ANNOTATIONS and name not in _REPORTED and name[:2] != "x-":
                yield name[:80]
        for name in ("const", "enum", "required"):
            check_literals(part.get(name), name)
        check_literals(_names(part.get("properties")), "properties")
        if _has_control_characters([part.get("const"), part.get("enum")]):
            raise GrammarError("const and enum with control characters cannot be enforced", code="unsupported_schema")
        for name in ("const", "enum"):
            number = _inexact(part.get(name))
            if number is not None:
                raise _beyond(name, str(number), f": {_INEXACT}")
        for name in out_of_reach(part):
            raise _beyond(name, f"numbers beyond {FURTHEST}")
        if _counts_keys_twice(part):
            yield from _unless_strict("minProperties", strict)
        for name in _moved_bounds(part):
            yield from _unless_strict(name, strict)
        if "$ref" in part and "$id" in part and part is not schema:
            yield from _unless_strict("$id beside $ref", strict)


def _unless_strict(name: str, strict: bool) -> Iterator[str]:
    if strict:
        raise not_enforceable([name])
    yield name


def _has_control_characters(value: Any) -> bool:
    """Whether texts of a value have characters that JSON can only write as `\\u`. Its depth has been checked."""
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_control_characters, value)) or any(map(_has_control_characters, value.values()))
    return isinstance(value, list) and any(map(_has_control_characters, value))


def _inexact(value: Any) -> int | float | None:
    """A number in a value that the library would write as another one. Its depth has been checked."""
    if isinstance(value, dict | list):
        entries = value.values() if isinstance(value, dict) else value
        return next((number for entry in entries if (number := _inexact(entry)) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 2**63 - 1:
        return None
    if abs(value) > FURTHEST and (isinstance(value, int) or value.is_integer()):
        return value
    return value if isinstance(value, int) and int(float(value)) != value else None


def _counts_keys_twice(part: Schema) -> bool:
    least, required = part.get("minProperties"), part.get("required")
    if not isinstance(least, int | float) or least <= 1:
        return False
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    return least > len(names)


def _moved_bounds(part: Schema) -> Iterator[str]:
    """The bounds of numbers that the library moves outwards, so that more is allowed than the schema allows."""
    kinds = part.get("type")
    only_integers = kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds)
    for name in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        bound = part.get(name)
        if not isinstance(bound, int | float) or isinstance(bound, bool):
            continue
        taken: int | float = float(bound)
        if only_integers:
            taken = max(-(2**63), min(taken, 2**63 - 1))
        if taken < bound if name.endswith("inimum") else taken > bound:
            yield name


def _names(value: Any) -> list[str]:
    return list(value) if isinstance(value, dict) else []


def _closed(value: Any, is_schema: bool = True) -> Any:
    """`value` with `additionalProperties: false` where a schema names properties and says nothing of others.

    Its depth has been checked.
    """
    if isinstance(value, list):
        return [_closed(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    if not is_schema:
        return {name: _closed(entry) for name, entry in value.items()}
    closed = {}
    for name, entry in value.items():
        if name in ("enum", "const", "default", "examples", "required"):
            closed[name] = entry
        else:
            closed[name] = _closed(entry, name not in ("properties", "patternProperties", "$defs", "definitions"))
    if "properties" in value and "additionalProperties" not in value and "patternProperties" not in value:
        closed["additionalProperties"] = False
    return closed


# --- what the library says --------------------------------------------------------------------------------------
_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")
_OURS = re.compile(r"(?s)^at \d+\(\d+\): (?=.*\n   1 \| start: TEXT)|\n   1 \| start: TEXT.*")
# A schema within a grammar: where it stands there, and the lines around it.
_IN_GRAMMAR = re.compile(r"(?s)^at \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?$")
_COUNTS = "min/maxProperties only supported"
_RANGE = re.compile(r"Failed to generate regex for (?:integer|float) range: min=(\w+)[^,]*, max=(\w+)")
_DIGITS = re.compile(r"Value for 'multipleOf' has too many digits")


def keywords(message: str) -> list[str]:
    """The keywords that a message of the library says it cannot enforce; none if it is about something else."""
    found = _KEYS.search(message)
    if found is not None:
        return [name.strip().strip('"') for name in found[1].split(",")]
    found = _FORMAT.search(message)
    if found is not None:
        return [f"format {found[1].strip()!r}"]
    if _COUNTS in message:
        return ["minProperties", "maxProperties"]
    return ["oneOf"] if message.startswith("oneOf ") or ": oneOf constraints" in message else []


def not_enforceable(names: list[str]) -> GrammarError:
    listed = ", ".join(names)
    return GrammarError(f"the schema is strict, and {listed} cannot be enforced", code="unsupported_schema")


def _beyond(name: str, numbers: str, why: str = "") -> GrammarError:
    return GrammarError(f"{name} of {numbers} cannot be enforced{why}", code="unsupported_schema")


def explained(error: GrammarError) -> GrammarError:
    """What the library says, in terms of the schema where it is about one."""
    names = keywords(error.message)
    if names:
        return not_enforceable(names)
    edge = _RANGE.search(error.message)
    if edge is not None:
        names = [name for name, end in (("minimum", edge[1]), ("maximum", edge[2])) if end != "None"]
        return _beyond(" and ".join(names), "numbers so far from 0")
    if _DIGITS.search(error.message):
        return _beyond("multipleOf", "a number of so many digits")
    if "NoExtension" in error.message:
        return GrammarError("no output satisfies the constraint")
    # Where in a grammar of our own it stands tells a client nothing.
    message = _IN_GRAMMAR.sub(r"\1", _OURS.sub("", error.message))
    return GrammarError(message, code=error.code or "invalid_grammar")
