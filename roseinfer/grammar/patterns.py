"""Find patterns of JSON schemas that llguidance does not support, before a grammar is compiled.

The compiler's error would not say which pattern of which part it is, so it could not be left out of a lenient schema.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from roseinfer.grammar.library import GrammarError, pattern_error
from roseinfer.grammar.limits import check_regex
from roseinfer.grammar.schema_graph import Schema, SchemaGraph

MAX_SHOWN_CHARS = 80


def with_supported_patterns(schema: Schema, *, strict: bool) -> tuple[Schema, list[str]]:
    """Return `schema`, or a copy without the patterns that are not supported, and what was left out.

    The schema's depth has been checked. Raises `GrammarError` for a pattern that is too long and, with `strict`, for
    one that is not supported; the error names the pattern and its place.
    """
    faults: dict[str, str | None] = {}
    bad = [found for part in SchemaGraph(schema).parts for found in _unsupported(part, faults)]
    if not bad:
        return schema, []
    if strict:
        part, name, pattern = bad[0]
        place = _place(schema, part)
        message = f"the schema is strict, and {_shown(name, pattern)} at {place} cannot be enforced: {faults[pattern]}"
        raise GrammarError(message, code="unsupported_schema")
    copy = deepcopy(schema)
    for part in SchemaGraph(copy).parts:
        for _, name, pattern in list(_unsupported(part, faults)):
            if name == "pattern":
                del part[name]
            else:
                del part[name][pattern]
    return copy, list(dict.fromkeys(_shown(name, pattern) for _, name, pattern in bad))


def _unsupported(part: Schema, faults: dict[str, str | None]) -> Iterator[tuple[Schema, str, str]]:
    """Yield the part, keyword and pattern of each unsupported pattern. `faults`: results so far, by pattern."""
    for name, pattern in _patterns(part):
        check_regex(pattern)
        if pattern not in faults:
            faults[pattern] = pattern_error(pattern)
        if faults[pattern] is not None:
            yield part, name, pattern


def _patterns(part: Schema) -> Iterator[tuple[str, str]]:
    if isinstance(part.get("pattern"), str):
        yield "pattern", part["pattern"]
    named = part.get("patternProperties")
    for pattern in named if isinstance(named, dict) else ():
        yield "patternProperties", pattern


def _shown(name: str, pattern: str) -> str:
    cut = pattern if len(pattern) <= MAX_SHOWN_CHARS else pattern[: MAX_SHOWN_CHARS - 3] + "..."
    return f"{name} {cut!r}"


def _place(schema: Schema, part: Schema) -> str:
    """Return the place of `part` in `schema` as a JSON pointer."""
    waiting: list[tuple[Any, str]] = [(schema, "#")]
    while waiting:
        value, place = waiting.pop()
        if value is part:
            return place
        if isinstance(value, dict):
            steps = [(below, str(name).replace("~", "~0").replace("/", "~1")) for name, below in value.items()]
        else:
            steps = [(below, str(index)) for index, below in enumerate(value)]
        waiting += [(below, f"{place}/{step}") for below, step in steps if isinstance(below, dict | list)]
    return "#"
