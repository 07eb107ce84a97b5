"""Separation of reasoning and answer."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from roseinfer.core.guide import Thinking
from roseinfer.text.output import OutputParser
from roseinfer.text.reasoning import Reasoner
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.registry import tool_format
from tests.helpers.cases import examples
from tests.text import tokenizers as build
from tests.text.tools.recorded import by_ids, fed, marked_tokenizer, plain_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<think>"}}\n</tool_call>'
CALLED = ["call", "f", '{"a": "<think>"}', True]
# Output, whether it begins within the reasoning, and the expected events.
CASES = {
    "thinks": (
        "<think>\nLet me see.\n\nYes.\n</think>\n\nParis.",
        False,
        [["reasoning", "Let me see.\n\nYes."], ["text", "Paris."]],
    ),
    "inside": ("Let me see.\n</think>\n\nParis.", True, [["reasoning", "Let me see."], ["text", "Paris."]]),
    "says nothing of it": ("<think>\n\n</think>\n\nParis.\n", False, [["text", "Paris.\n"]]),
    "does not think": ("Paris.", False, [["text", "Paris."]]),
    "white space alone": ("\n\n", False, [["text", "\n\n"]]),
    "cut": ("<think>\nLet me", False, [["reasoning", "Let me"]]),
    "cut in the mark": ("<think>Let me </th", False, [["reasoning", "Let me </th"]]),
    "cut at once": ("<thi", False, [["text", "<thi"]]),
    "like a mark": ("<thin> a </think>", False, [["text", "<thin> a </think>"]]),
    "marks within": (
        "a <think> b < / </thinker> c</think>d",
        True,
        [["reasoning", "a <think> b < / </thinker> c"], ["text", "d"]],
    ),
    "calls": (f"hm\n</think>\n\n{CALL}", True, [["reasoning", "hm"], CALLED]),
    "text and calls": (f"<think>hm</think>So:\n{CALL}\n", False, [["reasoning", "hm"], ["text", "So:\n"], CALLED]),
    "calls alone": (CALL, False, [CALLED]),
    "calls in mind": (f"<think>{CALL}</think>no", False, [["reasoning", CALL], ["text", "no"]]),
}
cases = pytest.mark.parametrize(("text", "inside", "expected"), CASES.values(), ids=CASES)


def parser(tokenizer: Tokenizer, inside: bool) -> OutputParser:
    reasoner = Reasoner.detect(TEMPLATE, tokenizer)
    assert reasoner is not None
    return reasoner.parser(inside, tool_format("hermes", tokenizer).parser())


@cases
def test_every_split_in_two(text: str, inside: bool, expected: list):
    for at in range(len(text) + 1):
        assert fed(parser(plain_tokenizer(), inside), [(text[:at], 0), (text[at:], 0)]) == expected, at
    assert fed(parser(plain_tokenizer(), inside), [(char, 0) for char in text]) == expected


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"marks within"}))
def test_marks_that_are_tokens(name: str):
    text, inside, expected = CASES[name]
    tokenizer = marked_tokenizer()
    assert fed(parser(tokenizer, inside), by_ids(tokenizer, text)) == expected


def test_a_spelled_mark_is_text_where_it_is_a_token():
    text = "</think> is how I end. "
    assert fed(parser(marked_tokenizer(), True), [(char, 0) for char in text]) == [["reasoning", text.rstrip()]]


def test_thinking_may_begin_again_where_its_mark_is_a_token():
    tokenizer = marked_tokenizer()
    said = fed(parser(tokenizer, True), by_ids(tokenizer, f"a</think>b <think> c </think> {CALL}<think>d</think>e"))
    assert said == [["reasoning", "a"], ["text", "b "], ["reasoning", "c"], CALLED, ["reasoning", "d"], ["text", "e"]]


@pytest.mark.parametrize("text", ["\n\nyes", "  <think>no</think>\n\nyes", "\n", ""])
def test_white_space_before_the_answer_can_be_dropped_whether_the_model_thinks_or_not(text: str):
    reasoner = Reasoner("<think>", "</think>", plain_tokenizer())
    expected = [["text", "yes"]] if "yes" in text else []
    for pieces in ([(text, 0)], [(char, 0) for char in text]):
        said = fed(reasoner.parser(inside=False, bare=True), pieces)
        assert [event for event in said if event[0] != "reasoning"] == expected


def test_without_tools_all_else_is_text():
    reasoner = Reasoner.detect(TEMPLATE, plain_tokenizer())
    assert reasoner is not None
    said = fed(reasoner.parser(inside=True), [(f"a</think>{CALL}", 0)])
    assert said == [["reasoning", "a"], ["text", CALL]]


@pytest.mark.parametrize(
    ("text", "inside", "tokens"),
    [
        ("<think>ab</think>cd", False, 4),
        ("ab</think>cd", True, 3),
        ("abcd", False, 0),
        ("\n<think>", False, 1),
        ("ab", True, 2),
    ],
)
def test_tokens_of_the_thinking_are_counted(text: str, inside: bool, tokens: int):
    """Count the marks as well."""
    tokenizer = marked_tokenizer()
    counted = parser(tokenizer, inside)
    fed(counted, by_ids(tokenizer, text))
    assert counted.reasoning_tokens == tokens


def test_tokens_are_counted_where_marks_are_spelled():
    counted = parser(plain_tokenizer(), inside=False)
    fed(counted, [(piece, 0) for piece in ("<th", "ink>", "a b", "</", "think> c", " d")])
    assert counted.reasoning_tokens == 5
    other = parser(plain_tokenizer(), inside=False)
    fed(other, [(piece, 0) for piece in ("<th", "e>", " d")])
    assert other.reasoning_tokens == 0


def chat_tokenizer(*marks: str) -> Tokenizer:
    backend = build.byte_level().backend
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return Tokenizer(backend, {}, None)


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")], ids=["spelled", "tokens"])
@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nSo far I", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\n</think><|im_end|>\n<|im_start|>assistant\n<think>", True),
    ],
)
def test_the_prompt_decides_whether_the_model_is_thinking(marks: tuple[str, ...], prompt: str, inside: bool):
    tokenizer = chat_tokenizer(*marks)
    reasoner = Reasoner.detect(TEMPLATE, tokenizer)
    assert reasoner is not None
    assert reasoner.inside(tokenizer.encode(prompt, add_special_tokens=False)) is inside


def test_a_model_thinks_if_its_template_says_so():
    assert Reasoner.detect("{{ messages }}", marked_tokenizer()) is None
    assert Reasoner.detect(None, marked_tokenizer()) is None
    mistral = Reasoner.detect("[THINK]...[/THINK]", marked_tokenizer())
    assert mistral is not None and mistral.end.text == "[/THINK]"


def test_parameters_for_the_engine():
    tokenizer = marked_tokenizer()
    reasoner = Reasoner.detect(TEMPLATE, tokenizer)
    assert reasoner is not None
    begin, end = (tokenizer.backend.token_to_id(text) for text in ("<think>", "</think>"))
    assert reasoner.thinking(inside=True) == Thinking(inside=True, begin=(begin,), end=(end,))
    assert reasoner.thinking(inside=False, budget=5) == Thinking(inside=False, begin=(begin,), end=(end,), budget=5)
    words = tokenizer.encode("so", add_special_tokens=False)
    assert reasoner.thinking(inside=False, budget=5, last_words="so").last_words == (*words, end)
    assert not reasoner.thinking(inside=False, last_words="so").last_words
    spelled = Reasoner.detect(TEMPLATE, plain_tokenizer())
    assert spelled is not None
    thinking = spelled.thinking(inside=False)
    assert thinking.begin == () and len(thinking.end) > 1


PIECES = ["<think>", "</think>", "<th", "</", "think>", "<", " ", "\n\n", "a", "b c", CALL, "<tool_call>", "\U0001f600"]


@examples(200)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.booleans(), st.randoms(use_true_random=False))
def test_streamed_is_whole(text: str, inside: bool, rng: random.Random):
    whole = fed(parser(plain_tokenizer(), inside), [(text, 0)])
    cuts = sorted(rng.choices(range(len(text) + 1), k=4))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert fed(parser(plain_tokenizer(), inside), [(piece, 0) for piece in pieces]) == whole
    assert fed(parser(plain_tokenizer(), inside), [(char, 0) for char in text]) == whole
    tokenizer = marked_tokenizer()
    said = fed(parser(tokenizer, inside), by_ids(tokenizer, text))
    thought = [entry[1] for entry in said if entry[0] == "reasoning"]
    assert not any("</think>" in text for text in thought) and (inside or "<think>" in text or not thought)
