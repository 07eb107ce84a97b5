"""Limits on the depth of JSON, the length of literals and the time of masks."""

from typing import Any

import pytest

from roseinfer.grammar.build import build_grammar
from roseinfer.grammar.constraint import Choice, Constraint, GrammarText, JsonSchema, Regex, StructuralTag
from roseinfer.grammar.library import GrammarError
from roseinfer.grammar.limits import FREE_MASK_S, MAX_LITERAL_BYTES, MAX_MASKS_S, check_depth, check_mask_time


def lists(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("value", [None, "text", 5, [], {}, {"a": [1, {"b": "c"}]}, lists(100), [1, lists(99)]])
def test_allowed_depths(value: Any) -> None:
    check_depth(value)


@pytest.mark.parametrize("value", [lists(101), {"a": lists(100)}, lists(100_000)])
def test_too_deep_values_are_rejected(value: Any) -> None:
    with pytest.raises(GrammarError, match="deeper than 100") as raised:
        check_depth(value)
    assert raised.value.code == "grammar_too_complex"


def literals(size: int) -> list[tuple[Constraint, str]]:
    text = "a" * size
    tag = {"type": "tag", "begin": "<a>", "content": {"type": "const_string", "value": text}, "end": ""}
    return [
        (JsonSchema(schema={"enum": ["b", text]}), "enum"),
        (JsonSchema(schema={"properties": {"x": {"const": {"y": [text]}}}}), "const"),
        (JsonSchema(schema={"properties": {text: {}}}), "properties"),
        (JsonSchema(schema={"required": [text]}), "required"),
        (JsonSchema(schema={"enum": ["\u00e9" * (size // 2) + "a" * (size % 2)]}), "enum"),
        (Choice(["b", text]), "choice"),
        (GrammarText(f'start: "x" | "{text}"'), "the grammar"),
        (GrammarText(f"start: A\nA: /{text}/"), "the grammar"),
        (GrammarText(f'root ::= "{text}"'), "the grammar"),
        (StructuralTag(spec={"type": "structural_tag", "format": tag}), "the constraint"),
    ]


@pytest.mark.parametrize("number", range(len(literals(1))))
def test_literals_have_a_limit(number: int) -> None:
    assert build_grammar(literals(MAX_LITERAL_BYTES)[number][0], {})
    constraint, where = literals(MAX_LITERAL_BYTES + 1)[number]
    with pytest.raises(GrammarError, match=f"a text in {where} has 8193 bytes, at most 8192 are allowed") as raised:
        build_grammar(constraint, {})
    assert raised.value.code == "grammar_too_complex"


def test_long_texts_that_are_not_literals_have_no_limit() -> None:
    many = " | ".join(f'"{i:05}"' for i in range(2000))
    assert build_grammar(GrammarText(f"start: {many}"), {}) and build_grammar(Regex("a" * MAX_LITERAL_BYTES), {})
    assert build_grammar(JsonSchema(schema={"description": "a" * 20_000, "type": "integer"}), {})


def test_the_time_limit_on_masks_covers_all_samples() -> None:
    check_mask_time(MAX_MASKS_S, 1)
    check_mask_time(FREE_MASK_S, 10_000)
    with pytest.raises(GrammarError, match="128 samples take 115 ms for each token, at most 20 ms") as raised:
        check_mask_time(0.0009, 128)
    assert raised.value.code == "grammar_too_complex" and "smaller n" in str(raised.value)
    with pytest.raises(GrammarError, match="it takes 40 ms"):
        check_mask_time(0.04, 1)
