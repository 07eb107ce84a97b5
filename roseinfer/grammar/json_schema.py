"""Prepare JSON schemas for llguidance: add our options, and check what llguidance does not.

llguidance rejects keywords that it cannot enforce, or, if lenient, ignores and reports them. It does not notice:
- names of properties with escapes: `{"\\u0061": 1}` passes for another property than `a`. So `\\u` is never allowed;
- keys that no schema names may come twice, and then count for `minProperties` once;
- without `\\u` the control characters in texts of `const` and `enum` are left out;
- in older drafts an `$id` next to a `$ref` has no meaning;
- numbers are rounded to 64-bit floats or integers: bounds move, `const` names another number, and -2^63 recurses until
  the stack is full;
- a schema that only refers to itself has no instance. Its grammar compiles, and its matchers fail;
- keywords that no draft defines.
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
from roseinfer.grammar.rewriting import MAX_BOUND, rewrite_schema, unreachable_bounds
from roseinfer.grammar.schema_graph import Schema, SchemaGraph

# Bounded, as a model that may write white space without end sometimes does.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Characters allowed after a backslash in strings.
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
# Keywords of a draft that are not enforced: llguidance reports them itself.
_REPORTED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
        "if", "maxContains", "minContains", "not", "propertyNames", "then", "unevaluatedItems",
        "unevaluatedProperties", "uniqueItems",
    }
)
# fmt: on


@dataclass(frozen=True, slots=True)
class SchemaText:
    """A schema as llguidance reads it.

    `text`: JSON, also for use after `%json` in a Lark grammar. `ignored`: unenforced keywords that llguidance does not
    report.
    """

    text: str
    ignored: tuple[str, ...]


def schema_text(schema: Schema, *, strict: bool, options: JsonOptions) -> SchemaText:
    """Return the text of a schema. Keys of documents come in its order.

    Raises `GrammarError` for a schema without instances and, with `strict`, for keywords that cannot be enforced.
    """
    schema = rewrite_schema(schema if options.additional_properties else _closed(schema))
    schema, left_out = with_supported_patterns(schema, strict=strict)
    graph = SchemaGraph(schema)
    ignored = dict.fromkeys([*left_out, *_ignored(graph, schema, strict)])
    if graph.loops():
        raise GrammarError("the schema refers to itself without end")
    if not graph.has_finite_instance():
        raise GrammarError("the schema is unsatisfiable: a required part contains itself without end")
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
        for name in unreachable_bounds(part):
            raise _beyond(name, f"numbers beyond {MAX_BOUND}")
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
    """Return True if a text in `value` has characters that JSON writes as `\\u`. Its depth has been checked."""
    if isinstance(value, str):
        return _CONTROL.search(value) is not None
    if isinstance(value, dict):
        return any(map(_has_control_characters, value)) or any(map(_has_control_characters, value.values()))
    return isinstance(value, list) and any(map(_has_control_characters, value))


def _inexact(value: Any) -> int | float | None:
    """Return a number in `value` that llguidance would change, None if there is none. Its depth has been checked."""
    if isinstance(value, dict | list):
        entries = value.values() if isinstance(value, dict) else value
        return next((number for entry in entries if (number := _inexact(entry)) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value == 2**63 - 1:
        return None
    if abs(value) > MAX_BOUND and (isinstance(value, int) or value.is_integer()):
        return value
    return value if isinstance(value, int) and int(float(value)) != value else None


def _counts_keys_twice(part: Schema) -> bool:
    least, required = part.get("minProperties"), part.get("required")
    if not isinstance(least, int | float) or least <= 1:
        return False
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
    return least > len(names)


def _moved_bounds(part: Schema) -> Iterator[str]:
    """Yield the numeric bounds that llguidance moves outwards, so that invalid numbers pass."""
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
    """Return `value` with `additionalProperties: false` in each schema that only has `properties`.

    The value's depth has been checked.
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


# --- messages of llguidance -------------------------------------------------------------------------------------
_KEYS = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
_FORMAT = re.compile(r"Unknown format: (.*)")
_OURS = re.compile(r"(?s)^at \d+\(\d+\): (?=.*\n   1 \| start: TEXT)|\n   1 \| start: TEXT.*")
# Position of a schema within a grammar, and the lines around it.
_IN_GRAMMAR = re.compile(r"(?s)^at \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\n +\d+ \| .*)?$")
_COUNTS = "min/maxProperties only supported"
_RANGE = re.compile(r"Failed to generate regex for (?:integer|float) range: min=(\w+)[^,]*, max=(\w+)")
_DIGITS = re.compile(r"Value for 'multipleOf' has too many digits")


def unenforced_keywords(message: str) -> list[str]:
    """Return the keywords that cannot be enforced by a message of llguidance; none if it is about something else."""
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
    listed = ", ".join(name if " " in name else repr(name) for name in names)
    return GrammarError(f"the schema is strict, and {listed} cannot be enforced", code="unsupported_schema")


def _beyond(name: str, numbers: str, why: str = "") -> GrammarError:
    return GrammarError(f"{name} of {numbers} cannot be enforced{why}", code="unsupported_schema")


def explain_error(error: GrammarError) -> GrammarError:
    """Return an error of llguidance in terms of the client's schema."""
    names = unenforced_keywords(error.message)
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
    # A position in a grammar that roseinfer has built means nothing to a client.
    message = _IN_GRAMMAR.sub(r"\1", _OURS.sub("", error.message))
    return GrammarError(message, code=error.code or "invalid_grammar")
