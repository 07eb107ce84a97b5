"""Parameters of tools with any schema, since clients send it and it may be invalid."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roseinfer.core.errors import InvalidRequestError
from roseinfer.text.tools.base import Tool
from roseinfer.text.tools.parameters import Parameters
from roseinfer.text.tools.registry import tool_format
from roseinfer.text.tools.typed_text import as_json
from tests.helpers.cases import examples
from tests.text.tools.recorded import plain_tokenizer


def types_of(schema: Any, **more: Any) -> frozenset[str]:
    (parameter,) = Parameters.of(Tool("f", {"type": "object", "properties": {"a": schema}, **more})).all
    return parameter.types


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": [1, "a", None, True]}, {"integer", "string", "null", "boolean"}),
        ({"enum": [1.5, [], {}]}, {"number", "array", "object"}),
        ({"const": "a"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"$ref": "#/$defs/A"}]}]}, {"string", "array"}),
        ({"$ref": "#/$defs/A"}, {"array"}),
        ({"$ref": "#/$defs/Loop"}, {"boolean"}),
        ({"$ref": "#/$defs/Missing"}, set()),
        ({"properties": {}}, {"object"}),
        ({"type": "integer", "default": None}, {"integer", "null"}),
        ({"type": 5}, set()),
        ({"type": [5, "string"]}, {"string"}),
        (True, set()),
        ({}, set()),
    ],
)
def test_types(schema: Any, types: set[str]):
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}, {"type": "boolean"}]}
    assert types_of(schema, **{"$defs": {"A": {"items": {}}, "Loop": loop}}) == types


def test_a_chain_of_references_is_followed_to_its_end():
    links = {f"l{i}": {"$ref": f"#/$defs/l{i + 1}"} for i in range(5000)}
    assert types_of({"$ref": "#/$defs/l0"}, **{"$defs": links | {"l5000": {"type": "null"}}}) == {"null"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 007 ", {"integer"}, '" 007 "'),
        ("7", {"string", "integer"}, "7"),
        ("null", {"string", "null"}, "null"),
        ("None", {"string"}, '"None"'),
        ("", {"string", "null"}, '""'),
        ("", {"integer"}, None),
        ("", {"integer", "null"}, "null"),
        ("1" * 5000, {"integer"}, "1" * 5000),
        ('{"a": 1e400}', {"object"}, '{"a": 1e400}'),
        ("[NaN]", {"array"}, '["NaN"]'),
        ("{'a': 1} x", {"object"}, "\"{'a': 1} x\""),
        ("[" * 5000 + "]" * 5000, {"array"}, '"' + "[" * 5000 + "]" * 5000 + '"'),
        ("{}", {"array"}, '"{}"'),
        ("TRUE", {"boolean"}, '"TRUE"'),
    ],
)
def test_text_of_a_type(text: str, types: set[str], value: str | None):
    assert as_json(text, frozenset(types)) == value


KEYWORDS = st.sampled_from(
    ["type", "properties", "required", "$ref", "anyOf", "allOf", "enum", "const", "items", "$defs", "A", "default", "a"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["string", "#/$defs/A", "object", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYWORDS, inner, max_size=4),
    max_leaves=12,
)


@examples(150)
@given(st.dictionaries(KEYWORDS, ANYTHING, max_size=5), st.booleans())
def test_no_schema_breaks_parsers_or_grammars(schema: dict[str, Any], strict: bool):
    tool = Tool("f", {**schema, "type": "object"}, strict)
    for name in ("qwen_xml", "pythonic"):
        format = tool_format(name, plain_tokenizer())
        format.parser([tool]).feed("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", 0)
        try:
            format.rules([tool], 2, lambda schema, strict: "{}")
            format.triggers([tool], 2, lambda schema, strict: "{}")
        except InvalidRequestError:
            assert strict
