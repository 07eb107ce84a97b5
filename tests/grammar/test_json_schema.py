"""JSON schemas: strict ones are enforced or rejected by keyword, lenient ones name what they ignore."""

import copy
import re

import pytest

from roseinfer.grammar.constraint import JSON_OBJECT, Prepared
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.schema_graph import SchemaGraph
from tests.helpers.grammars import accepts, make, of_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def test_keys_come_in_the_order_of_the_schema() -> None:
    made = of_schema(PERSON)
    assert made.warnings == ()
    assert accepts(made.grammar, '{"name": "Ada", "age": 36}')
    assert not accepts(made.grammar, '{"age": 36, "name": "Ada"}')
    turned = dict(reversed(PERSON["properties"].items()))
    assert accepts(of_schema(PERSON | {"properties": turned}).grammar, '{"age": 36, "name": "Ada"}')


def test_any_json_object() -> None:
    grammar = make(JSON_OBJECT).grammar
    assert accepts(grammar, "{}") and accepts(grammar, '{"a": [1, {"b": null}], "é": -1.5e3}')
    assert not accepts(grammar, "[]") and not accepts(grammar, " {}")


@pytest.mark.parametrize(
    ("options", "allowed", "forbidden"),
    [
        ({}, '{"name":' + " \n" * 16 + '"x","age":1}', '{"name":' + " " * 33 + '"x","age":1}'),
        ({"whitespace_pattern": "[ ]{0,2}"}, '{"name":  "x","age":1}', '{"name":   "x","age":1}'),
        ({"any_whitespace": False}, '{"name":"x","age":1}', '{"name": "x","age":1}'),
        ({"additional_properties": False}, '{"name":"x","age":1}', '{"name":"x","age":1,"b":2}'),
        ({"additional_properties": True}, '{"name":"x","age":1,"b":2}', '{"name":"x","age":1,"b":}'),
    ],
)
def test_options(options: dict, allowed: str, forbidden: str) -> None:
    grammar = of_schema(PERSON, **options).grammar
    assert accepts(grammar, allowed) and not accepts(grammar, forbidden)


def test_additional_properties_can_be_off_by_default() -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    opened = inner | {"additionalProperties": {"type": "integer"}}
    schema = {"properties": {"properties": inner, "open": opened, "list": {"items": inner}}, "type": "object"}
    grammar = of_schema(schema, additional_properties=False).grammar
    assert accepts(grammar, '{"properties":{"a":1},"open":{"b":2},"list":[{"a":3}]}')
    assert not accepts(grammar, '{"properties":{"b":1}}') and not accepts(grammar, '{"list":[{"b":1}]}')
    assert "additionalProperties" not in inner, "the client's own is left alone"


def test_a_key_with_escapes_is_rejected() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    grammar = of_schema(schema).grammar
    assert accepts(grammar, '{"a":1,"b":"x"}') and not accepts(grammar, '{"a":"x"}')
    assert not accepts(grammar, '{"\\u0061":"x"}')
    odd = {"type": "object", "properties": {'a\x01"\n': {"const": "\t"}}, "required": ['a\x01"\n']}
    assert accepts(of_schema(odd).grammar, '{"a\\u0001\\"\\n":"\\t"}')


WITH_IDS = {
    "$id": "https://example.com/a",
    "items": {"$id": "https://example.com/b", "$ref": "https://example.com/a#/$defs/c"},
    "$defs": {"c": {}},
}
UNSUPPORTED = [
    ({"type": "string", "not": {"const": "a"}}, "not"),
    ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if, then"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "format": "binary"}, "format 'binary'"),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "decimal"}}}, "format 'decimal'"),
    ({"oneOf": [{"type": "object"}, {"type": "object", "properties": {"a": {}}}]}, "oneOf"),
    ({"type": "object", "maxProperties": 1, "properties": {"a": {}, "b": {}}}, "maxProperties"),
    (WITH_IDS, "$id beside $ref"),
    ({"type": "object", "minProperties": 2, "additionalProperties": {"type": "null"}}, "minProperties"),
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**54}, "minimum"),
    ({"type": "integer", "exclusiveMaximum": 2**53 + 3}, "exclusiveMaximum"),
    ({"type": "number", "maximum": 2**53 + 3}, "maximum"),
]


@pytest.mark.parametrize(("schema", "keyword"), UNSUPPORTED)
def test_unenforced_keywords_are_rejected_if_strict_and_named_if_lenient(schema: dict, keyword: str) -> None:
    with pytest.raises(GrammarError, match="cannot be enforced") as raised:
        of_schema(schema)
    assert raised.value.code == "unsupported_schema"
    assert all(name in raised.value.message for name in keyword.split(", "))
    assert set(keyword.split(", ")) <= set(of_schema(schema, strict=False).warnings)


@pytest.mark.parametrize("most", [2**63 - 1, 2**64 - 1, 1e19, 2**53])
def test_bounds_of_usual_integer_types(most: float) -> None:
    made = of_schema({"type": ["integer", "null"], "minimum": 0, "maximum": most})
    assert made.warnings == () and accepts(made.grammar, str(2**53)) and not accepts(made.grammar, "-1")


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("prefix", ["m", "exclusiveM"])
@pytest.mark.parametrize("edge", [2**63, 2**63 - 1, 1e300])
def test_bounds_at_the_ends_of_64_bits_are_clamped(kind: str, prefix: str, edge: float) -> None:
    schema = {"type": kind, f"{prefix}inimum": -edge, f"{prefix}aximum": edge}
    made = of_schema(schema)
    assert made.warnings == () and schema[f"{prefix}inimum"] == -edge, "the client's own is left alone"
    for number in (0, -(2**62), 2**62):
        assert accepts(made.grammar, str(number))
    for number in (-(2**63) - 2048, 2**63 + 2048):
        assert not accepts(made.grammar, str(number))


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (-0.0, "-0"),
        (0.1, "0.1"),
        (1e-7, "0.0000001"),
        (-(2**53), "-9007199254740992"),
        (2**53 + 2, "9007199254740994"),
        (2**63 - 1, "9223372036854775807"),
        (-(2**63) + 1024, "-9223372036854774784"),
    ],
)
def test_numbers_of_const(number: float, written: str) -> None:
    assert accepts(of_schema({"const": number}).grammar, written)
    assert accepts(of_schema({"enum": ["a", {"b": [number]}]}).grammar, f'{{"b":[{written}]}}')


# A library that meets these takes its process along, names another number, or looks for it for ever.
@pytest.mark.parametrize("number", [-(2**63), -(2**63) + 1, -(2**63) - 1, 2**53 + 1, 2**63, 2**64, -1e300, 10**400])
@pytest.mark.parametrize("strict", [True, False])
def test_inexact_numbers_of_const_are_rejected(number: float, strict: bool) -> None:
    for schema in ({"const": number}, {"type": "integer", "enum": ["a", number]}, {"const": {"a": [number]}}):
        with pytest.raises(
            GrammarError, match=f"(const|enum) of {re.escape(str(number))} cannot be enforced: integers"
        ) as raised:
            of_schema({"type": "array", "items": schema}, strict)
        assert raised.value.code == "unsupported_schema"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1e30, "maximum": 2e30}, "minimum of numbers beyond"),
        ({"type": "number", "exclusiveMaximum": -(10**400)}, "exclusiveMaximum of numbers beyond"),
        ({"type": "number", "minimum": 1e18}, "minimum of numbers so far from 0"),
        ({"type": "integer", "maximum": -(2**62)}, "maximum of numbers so far from 0"),
        ({"type": "integer", "multipleOf": 2**63}, "multipleOf of a number of so many digits"),
        ({"type": "string", "default": 2**64}, "cannot be written as JSON"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_too_large_numbers_are_rejected_by_keyword(schema: dict, words: str, strict: bool) -> None:
    with pytest.raises(GrammarError, match=words):
        of_schema(schema, strict)


@pytest.mark.parametrize(
    "neutral",
    [
        {"uniqueItems": False},
        {"minItems": 0, "minLength": 0, "minProperties": 0},
        {"additionalProperties": True, "additionalItems": True, "items": {}},
        {"not": False},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": True, "unevaluatedProperties": {}, "unevaluatedItems": True},
        {"dependentRequired": {"a": []}, "dependentSchemas": {"a": {}}, "dependencies": {"a": [], "b": True}},
        {"minContains": 1, "maxContains": 2},
        {"if": {"const": 1}},
        {"then": {"type": "null"}, "else": False},
        {"if": {"const": 1}, "then": {}, "else": True},
        {"deprecated": True, "readOnly": False, "required": [], "patternProperties": {}},
    ],
)
def test_keywords_without_effect_pass(neutral: dict) -> None:
    schema = {"type": ["object", "array", "string"], "$defs": {"a": neutral}, "items": {"$ref": "#/$defs/a"}, **neutral}
    plain = of_schema({"type": ["object", "array", "string"]})
    for strict in (True, False):
        made = of_schema(schema, strict)
        assert made.warnings == plain.warnings
        for document in ('"a"', "[1,[1]]", '{"a":1,"b":[]}'):
            assert accepts(made.grammar, document)
    assert schema["$defs"]["a"] == neutral, "the client's own is left alone"


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"if": {}, "then": {}, "else": {"type": "null"}}, "if"),
        ({"contains": {}, "minContains": 0}, "contains"),
        ({"dependentRequired": {"a": [], "b": ["c"]}}, "dependentRequired"),
        ({"uniqueItems": 0}, "uniqueItems"),
    ],
)
def test_keywords_with_effect_do_not_pass(schema: dict, keyword: str) -> None:
    with pytest.raises(GrammarError, match=keyword):
        of_schema(schema)


def test_unused_definitions_are_ignored() -> None:
    unused = {"type": "string", "$defs": {"a": {"not": {}, "minProperties": 3}}}
    assert of_schema(unused).warnings == ()


def test_unknown_keywords_are_named() -> None:
    schema = {"type": "string", "nullable": True, "title": "t", "x-order": 1, "deprecated": True}
    assert of_schema(schema).warnings == of_schema(schema, strict=False).warnings == ("nullable",)


def test_options_in_a_schema_do_not_weaken_ours() -> None:
    inside = {"lenient": True, "whitespace_pattern": "[ ]*", "coerce_one_of": True, "json_allowed_escapes": "u"}
    with pytest.raises(GrammarError, match="'not' cannot be enforced"):
        of_schema({"x-guidance": inside, "not": {"type": "string"}})
    made = of_schema({"x-guidance": inside, **PERSON})
    assert made.warnings == ("x-guidance",)
    assert not accepts(made.grammar, '{"name":' + " " * 33 + '"x","age":1}')


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "string", "const": 1}, "incompatible types"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a'"),
        ({"type": "no such type"}, "Invalid type: no such type"),
        ({"properties": []}, "properties must be an object"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"$ref": "#/$defs/N", "$defs": {"N": {"$ref": "#/$defs/N"}}}, "refers to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"allOf": [{"$ref": "#/$defs/N"}]}}}, "itself"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, "refers to itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "contains itself without end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "contains itself without end"),
        ({"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, "contains itself without end"),
        (
            {
                "anyOf": [{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#/$defs/b"}}}],
                "$defs": {"b": {"type": "array", "minItems": 2, "items": {"$ref": "#"}}},
            },
            "contains itself without end",
        ),
        ({"const": "a\x02b"}, "control characters"),
        ({"properties": {"a": {"enum": [1, [{"\x0b": 1}]]}}}, "control characters"),
        ({"type": "string", "pattern": "a" * 9000}, "longer than 8192 bytes"),
        ({"type": "object", "patternProperties": {"a" * 9000: {}}}, "longer than 8192 bytes"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_schemas_without_an_instance_are_rejected(schema: dict, words: str, strict: bool) -> None:
    with pytest.raises(GrammarError) as raised:
        of_schema(schema, strict)
    assert words in raised.value.message and "<state>" not in raised.value.message


UNSUPPORTED = [
    ({"type": "string", "pattern": "^(?=a)b"}, "pattern '^(?=a)b'", "#", "look-around", '"x"'),
    ({"type": "array", "items": {"pattern": r"(a)\1"}}, r"pattern '(a)\\1'", "#/items", "backreferences", '["b"]'),
    ({"properties": {"a/b": {"type": "string", "pattern": "("}}}, "pattern '('", "#/properties/a~1b", "unclosed", "{}"),
    ({"type": "string", "pattern": r"x\b"}, r"pattern 'x\\b'", "#", "look-around is not supported", '"y"'),
    (
        {"type": "object", "patternProperties": {"^(?!x)": {"type": "integer"}, "^y": {"type": "null"}}},
        "patternProperties '^(?!x)'",
        "#",
        "look-around",
        '{"x":"z","y":null}',
    ),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"pattern": "(?!x)"}}}, "pattern '(?!x)'", "#/$defs/a", "look-around", "1"),
]


@pytest.mark.parametrize(("schema", "named", "place", "why", "document"), UNSUPPORTED)
def test_a_pattern_that_is_not_supported(schema: dict, named: str, place: str, why: str, document: str) -> None:
    """Lenient schemas are followed without the pattern, strict ones rejected with its name and place."""
    before = copy.deepcopy(schema)
    made = of_schema(schema, strict=False)
    assert made.warnings == (named,) and accepts(made.grammar, document)
    with pytest.raises(GrammarError) as raised:
        of_schema(schema, strict=True)
    assert raised.value.code == "unsupported_schema" and why in raised.value.message
    assert f"{named} at {place} cannot be enforced" in raised.value.message
    assert "start:" not in raised.value.message and "\n" not in raised.value.message
    assert schema == before, "the client's own is left alone"


def test_the_rest_of_a_schema_with_such_a_pattern_is_enforced() -> None:
    schema = {"type": "object", "patternProperties": {"^(?!x)": {}, "^y": {"type": "null"}}}
    assert not accepts(of_schema(schema, strict=False).grammar, '{"y":1}')
    assert not accepts(of_schema({"type": "string", "pattern": "(?!x)", "maxLength": 2}, strict=False).grammar, '"abc"')


def test_a_word_in_data_is_no_pattern() -> None:
    schema = {"enum": [{"pattern": "(?!x)"}], "default": {"pattern": "("}}
    assert of_schema(schema, strict=True).warnings == ()


def test_errors_of_a_schema_do_not_show_the_grammar_around_it() -> None:
    text = 'start: "x" a\na: "b" %json {"type":"string","minLength":5,"maxLength":3} "}"\n'
    with pytest.raises(GrammarError) as raised:
        make(Prepared(grammar=text))
    assert raised.value.message == "Unsatisfiable schema: minLength (5) is greater than maxLength (3)"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": {"$ref": "#"}}]},
        {"$ref": "#/$defs/a", "$id": "https://example.com/b", "$defs": {"a": {}}},
        {"type": ["object", "array"], "required": ["a"], "properties": {"a": {"$ref": "#"}}, "items": {"$ref": "#"}},
        {"type": "object", "required": ["a"], "properties": {"a": True, "b": {"allOf": [{"type": "null"}]}}},
        {"anyOf": [True, {"type": "array", "minItems": 1, "items": {"$ref": "#"}}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": ["null", "object"], "required": ["c"]}}},
        {"$ref": "#tree", "$defs": {"t": {"$anchor": "tree", "type": "array", "items": {"$ref": "#tree"}}}},
    ],
)
def test_recursion_that_can_end(schema: dict) -> None:
    assert of_schema(schema).grammar


def nested(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(("levels", "words"), [(98, ""), (104, "nested deeper than 100 levels"), (40000, "deeper")])
def test_depth(levels: int, words: str) -> None:
    if not words:
        assert of_schema(nested(levels)).grammar
        return
    with pytest.raises(GrammarError, match=words) as raised:
        of_schema(nested(levels))
    assert raised.value.code == "grammar_too_complex"


@pytest.mark.exhaustive
def test_checking_a_schema_takes_linear_time() -> None:
    """Long chains in either order of definition, and a part that needs all of them: quadratic time is minutes."""
    count = 20_000
    names = [f"d{i}" for i in range(count)]
    chain = {
        name: {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/{after}"}}
        for name, after in zip(names, [*names[1:], "end"], strict=True)
    }
    links = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    whole = {"type": "object", "required": names, "properties": links, "$defs": chain | {"end": {"type": "null"}}}
    graph = SchemaGraph(whole)
    assert len(graph.parts) == 3 * count + 2
    assert graph.has_finite_instance() and not graph.loops()
    del chain["d19999"]["items"]
    whole["$defs"] = chain | {"d19999": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/d0"}}}
    assert not SchemaGraph(whole).has_finite_instance()
