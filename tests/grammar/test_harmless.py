"""What is taken for harmless compiles, has an instance, and is enforced; what is not on the lists is proved."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roseinfer.grammar.build import built, proved
from roseinfer.grammar.constraint import JSON_OBJECT, Choice, JsonOptions, JsonSchema
from roseinfer.grammar.harmless import LONGEST_TEXT, MOST_CHOICES, MOST_ITEMS, MOST_LEVELS, MOST_PARTS, is_harmless
from roseinfer.grammar.library import GrammarError
from tests.helpers.grammars import tiny_tokens

PERSON = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": "https://example.com/person",
    "title": "Person",
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40, "description": "of the person"},
        "born": {"type": "string", "format": "date"},
        "kind": {"enum": ["a", "b", None, 3, True]},
        "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 150},
        "height": {"type": "number", "minimum": 0.5},
        "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 1, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": {"type": "boolean"}}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"friend": {"$ref": "#/$defs/person"}}, "x-order": 1}},
}


def harmless(schema: dict[str, Any], **options: Any) -> bool:
    return is_harmless(JsonSchema(schema=schema, options=JsonOptions(**options)))


def test_what_applications_ask_for() -> None:
    assert harmless(PERSON) and is_harmless(JSON_OBJECT) and harmless({})
    assert not is_harmless(Choice(["a"])) and not harmless({}, whitespace_pattern=" ")


def nested(levels: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(levels - 1)} if levels > 1 else {}


def several(count: int) -> dict[str, Any]:
    return {"properties": {str(i): {} for i in range(count)}}


@pytest.mark.parametrize(
    "schema",
    [
        {"pattern": "a"}, {"oneOf": [{}]}, {"allOf": [{}]}, {"not": {}}, {"const": 1}, {"multipleOf": 2},
        {"$dynamicRef": "#"}, {"$anchor": "a"}, {"x-guidance": {}}, {"patternProperties": {}}, {"uniqueItems": True},
        {"prefixItems": [{}]}, {"items": [{}]}, {"items": False}, {"minProperties": 1}, {"exclusiveMinimum": 1},
        {"type": "text"}, {"type": []}, {"type": [["string"]]}, {"type": 3},
        {"properties": []}, {"properties": {"a": True}}, {"properties": {"a\n": {}}},
        {"required": ["a"]}, {"required": "a", "properties": {"a": {}}}, {"additionalProperties": None},
        {"enum": []}, {"enum": [{}]}, {"enum": [0.5]}, {"enum": [2**53]}, {"enum": ["\t"]}, {"enum": "ab"},
        {"enum": [1], "type": "string"}, {"enum": [True], "type": "integer"}, {"enum": ["a"], "maxLength": 1},
        {"enum": list(range(MOST_CHOICES + 1))}, {"enum": ["a" * (LONGEST_TEXT + 1)]},
        {"anyOf": []}, {"anyOf": [True]}, {"anyOf": [{}], "type": "string"}, {"anyOf": {}},
        {"$ref": "#/$defs/a"}, {"$ref": "other.json"}, {"$ref": "#", "type": "string"}, {"$ref": 3},
        {"minLength": LONGEST_TEXT + 1}, {"maxLength": -1}, {"maxLength": 2.0}, {"minLength": 3, "maxLength": 2},
        {"maxItems": MOST_ITEMS + 1}, {"minItems": True}, {"minimum": -(2**63)}, {"maximum": "1"}, {"minimum": True},
        {"minimum": 0.1, "maximum": 0.9}, {"minimum": 2, "maximum": 1},
        {"format": "regex"}, {"format": "date", "maxLength": 3}, {"format": ["date"]},
        {"$schema": "https://example.com/mine"}, {"$schema": 7}, {"properties": {"a": {"$id": "b"}}},
        nested(MOST_LEVELS + 1), several(MOST_PARTS),
    ],
)  # fmt: skip
def test_what_is_not_on_the_lists(schema: dict[str, Any]) -> None:
    assert not harmless(schema) and not harmless({"properties": {"a": schema}})


def test_up_to_the_limits() -> None:
    assert harmless(nested(MOST_LEVELS)) and harmless(several(MOST_PARTS - 1))
    assert harmless({"enum": list(range(MOST_CHOICES))}) and harmless({"maxLength": LONGEST_TEXT})


NOTES = st.fixed_dictionaries(
    {}, optional={"title": st.text(max_size=3), "default": st.none(), "mood": st.integers(0, 9)}
)
CHOICES = st.one_of(st.integers(-3, 3), st.sampled_from(["", "a", 'q"\\', "é"]), st.booleans(), st.none())
TYPES = st.sampled_from(["string", "integer", "number", "boolean", "null", "object", "array"])
SIZES = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES | st.lists(TYPES, min_size=1, max_size=3),
        **{name: st.integers(0, 60) for name in ("minLength", "maxLength", "minItems", "maxItems")},
        "minimum": st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9),
        "maximum": st.integers(-(10**9), 10**9),
    },
)
LEAVES = st.one_of(
    SIZES,
    st.fixed_dictionaries({"enum": st.lists(CHOICES, min_size=1, max_size=4)}, optional={"type": TYPES}),
    st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(["date-time", "ipv6", "uuid"])}),
    st.just({"$ref": "#/properties/a"}),
    st.just({"$ref": "#"}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    more = {"required": st.lists(st.sampled_from("abc"), max_size=2), "additionalProperties": st.booleans() | inner}
    return st.fixed_dictionaries({"properties": named}, optional={"type": st.just("object"), **more})


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.fixed_dictionaries({"items": inner}, optional={"type": st.just("array"), "minItems": st.integers(0, 3)}),
        st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=3)}),
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=objects(SCHEMAS), notes=NOTES)
def test_what_is_taken_for_harmless_compiles_and_is_enforced(schema: dict[str, Any], notes: dict[str, Any]) -> None:
    constraint = JsonSchema(schema=schema | notes, strict=True)
    if not is_harmless(constraint):
        return
    try:
        made = built(constraint, {})
    except GrammarError as error:  # seen without compiling
        assert "itself" in error.message
        return
    assert proved(made, tiny_tokens()).warnings == made.warnings
