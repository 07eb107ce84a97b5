"""Structural tags in both forms, within free text and on their own."""

from typing import Any

import pytest

from roseinfer.grammar.constraint import BuiltGrammar, StructuralTag
from roseinfer.grammar.library import GrammarError
from tests.helpers.grammars import accepts, make

NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WORD = {"type": "regex", "pattern": "[a-z]+"}


def tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def of_format(node: dict[str, Any], markers: dict[str, int] | None = None) -> BuiltGrammar:
    return make(StructuralTag(spec={"type": "structural_tag", "format": node}), markers=markers)


def test_structures_apply_after_their_trigger() -> None:
    structures = [
        {"begin": "<function=f>", "schema": NUMBER, "end": "</function>"},
        {"begin": "<function=g>", "schema": {"type": "boolean"}, "end": "</function>"},
        {"begin": "<<", "schema": {"const": 1}, "end": ">>"},
    ]
    spec = {"type": "structural_tag", "structures": structures, "triggers": ["<function=", "<<"]}
    made = make(StructuralTag(spec=spec), markers={"<<": 7})
    assert (made.grammar, made.ends_after) == ("", 0)
    function, brackets = made.triggers
    assert (function.text, function.token_id) == ("<function=", None) and (brackets.text, brackets.token_id) == (
        "<<",
        7,
    )
    assert accepts(function.grammar, 'f>{"n": 1}</function>') and accepts(function.grammar, "g>true</function>")
    assert not accepts(function.grammar, 'g>{"n": 1}</function>')
    assert accepts(brackets.grammar, "1>>")


def test_triggered_tags_may_end_the_output_or_be_required() -> None:
    node = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>", WORD, "</a>"), tag("<b>", WORD, "</b>")]}
    assert of_format(node).ends_after == 0
    once = of_format(node | {"stop_after_first": True})
    assert once.ends_after == 1 and accepts(once.triggers[0].grammar, "b>xy</b>")
    forced = of_format(node | {"at_least_one": True}).grammar
    assert accepts(forced, "<a>x</a>") and accepts(forced, "<a>x</a> and <b>y</b> then")
    assert not accepts(forced, "text") and not accepts(forced, "<a>x</a> <c>")
    both = of_format(node | {"at_least_one": True, "stop_after_first": True}).grammar
    assert accepts(both, "<b>x</b>") and not accepts(both, "<b>x</b> ")


@pytest.mark.parametrize(
    ("node", "allowed", "forbidden"),
    [
        ({"type": "const_string", "value": 'a"\n'}, ['a"\n'], ["a"]),
        ({"type": "json_schema", "json_schema": NUMBER}, ['{"n":2}'], ["{}"]),
        (WORD, ["abc"], ["aB"]),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, ["y"], ["z"]),
        ({"type": "grammar", "grammar": 'start: "x" | "y"'}, ["y"], ["z"]),
        ({"type": "any_text"}, ["", "any\nthing"], []),
        (tag("<a>", {"type": "any_text"}, "</a>"), ["<a></a>", "<a>x\n<b></a>"], ["<a>x", "<a></a>x"]),
        ({"type": "or", "elements": [WORD, tag("<", WORD, ">")]}, ["ab", "<ab>"], ["<ab"]),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "END"}, WORD]},
            ["ENDa", "some E text ENDab"],
            ["END", "text"],
        ),
        (
            tag("[", {"type": "sequence", "elements": [WORD, {"type": "any_text"}]}, "]"),
            ["[a]", "[ab, and more]"],
            ["[]", "[a"],
        ),
        (
            tag("[", {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<n>", WORD, "</n>")]}, "]"),
            ["[]", "[text]", "[a <n>b</n> c <n>d</n>]"],
            ["[a <n>1</n>]", "[a"],
        ),
        (
            tag("", {"type": "or", "elements": [WORD, {"type": "const_string", "value": "1"}]}, "."),
            ["ab.", "1."],
            ["1", "ab"],
        ),
    ],
)
def test_nodes(node: dict[str, Any], allowed: list[str], forbidden: list[str]) -> None:
    grammar = of_format(node).grammar
    assert all(accepts(grammar, text) for text in allowed)
    assert not any(accepts(grammar, text) for text in forbidden)


def test_a_special_token_may_be_sampled_or_spelled() -> None:
    grammar = of_format(tag("<|user|>", WORD, "."), {"<|user|>": 3}).grammar
    assert accepts(grammar, 3, "a.") and accepts(grammar, "<|us", "er|>", "a.")


def test_lenient_schemas_name_what_they_ignore() -> None:
    node = {"type": "json_schema", "json_schema": {"type": "array", "uniqueItems": True, "nullable": True}}
    assert set(of_format(node).warnings) == {"uniqueItems", "nullable"}
    node = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<", node, ">")]}
    assert set(of_format(node).warnings) == {"uniqueItems", "nullable"}


ANY = {"type": "any_text"}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, "structural_tag needs 'structures'"),
        ({"format": 1}, "'format' must be an object"),
        ({"format": ANY, "triggers": ["<"]}, "give either format, or structures"),
        ({"format": ANY, "stop_after_first": True}, "unknown field 'stop_after_first'"),
        ({"format": {"type": "qwen_xml_parameter"}}, "'qwen_xml_parameter' are not supported"),
        ({"format": {"type": "tags_with_separator"}}, "'tags_with_separator' are not supported"),
        ({"format": {"type": ["tag"]}}, "are not supported"),
        ({"format": ANY | {"excludes": ["x"]}}, "excludes is not supported"),
        ({"format": {"type": "sequence", "elements": []}}, "'elements' must be a list"),
        ({"format": {"type": "sequence", "elements": [ANY, WORD]}}, "followed by a const_string"),
        ({"format": {"type": "tag", "begin": "<", "content": ANY}}, "tag needs 'end'"),
        ({"format": {"type": "tag", "begin": 1, "content": ANY, "end": ""}}, "'begin' must be a text"),
        ({"format": {"type": "regex", "pattern": "a" * 9000}}, "longer than"),
        ({"format": {"type": "or", "elements": [WORD] * 1025}}, "at most 1024"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<b"]}, "no trigger begins"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<a", "<"]}, "more than one trigger"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<a", "x"]}, "no tag begins"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": [""]}, "must be a list of texts"),
        ({"structures": [{"begin": "<a", "end": ""}], "triggers": ["<a"]}, "needs 'schema'"),
    ],
)
def test_unsupported_fields_are_named(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarError) as raised:
        make(StructuralTag(spec={"type": "structural_tag", **spec}))
    assert words in raised.value.message
