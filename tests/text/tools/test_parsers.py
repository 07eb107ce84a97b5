"""Parsers on arbitrary text: they never raise, lose nothing, and read each character a bounded number of times."""

import json
import random
import re
import sys
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roseinfer.core.errors import ConfigError
from roseinfer.text.output import CallStart, Text
from roseinfer.text.tools.base import CallParser, Mark, Tool
from roseinfer.text.tools.registry import detect, format_names, tool_format
from tests.helpers.cases import cases, examples
from tests.text.tools.recorded import (
    MARKS,
    ORDINARY,
    RECORDINGS,
    by_ids,
    fed,
    marked_tokenizer,
    plain_tokenizer,
    recorded,
)

TOOLS = [Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "o": {"type": "object"}}})]
FRAGMENTS = sorted(
    {piece for path in RECORDINGS for piece in re.split(r"(\s|[^\w\s]+)", recorded(path)["output"]) if piece}
    | {
        *MARKS,
        '{"name": "f", "arguments": {',
        '{"name": "f", "parameters": {',
        "[f(a=",
        "<function=f>",
        "<parameter=b>",
    }
    | {
        "</parameter>",
        "</function>",
        '"}',
        "}}",
        "\\",
        "'",
        '"',
        "]",
        ")",
        " ",
        "\n",
        "\ud7ff",
        "\U0001f600",
        "[f[ARGS]{",
    }
)
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)
names = st.sampled_from(format_names())


def parser(name: str) -> CallParser:
    return tool_format(name, plain_tokenizer()).parser(TOOLS)


@examples(300)
@given(names, outputs, st.randoms(use_true_random=False))
def test_streamed_is_whole(name: str, text: str, rng: random.Random):
    whole = fed(parser(name), [(text, ORDINARY)])
    cuts = sorted(rng.choices(range(len(text) + 1), k=5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert fed(parser(name), [(piece, ORDINARY) for piece in pieces]) == whole
    assert fed(parser(name), [(char, ORDINARY) for char in text]) == whole
    tokenizer = marked_tokenizer()
    fed(tool_format(name, tokenizer).parser(TOOLS), by_ids(tokenizer, text))


@examples(300)
@given(names, outputs)
@example("hermes", "\t<tool_call>x")
@example("pythonic", "<|python_start|>")
def test_nothing_is_invented_or_lost(name: str, text: str):
    """Check content: it keeps the order of the output; without a call it is the whole output.

    The opening of a call that is cut off before its name is no content.
    """
    said = fed(parser(name), [(char, ORDINARY) for char in text])
    at = 0
    for kind, first, *_ in said:
        if kind == "text":
            at = text.index(first, at) + len(first)
    if all(kind == "text" for kind, *_ in said):
        shown = "".join(first for _, first in said)
        cut_off = text.removeprefix(shown).lstrip()
        marks = tuple(mark.text for mark in tool_format(name, plain_tokenizer()).marks)
        assert text.startswith(shown) and (shown == text or cut_off.startswith(marks))
    if name not in ("qwen_xml", "pythonic"):
        assert all(arguments in text or arguments == "{}" for kind, _, arguments, *_ in map(_padded, said))


def _padded(entry: list) -> list:
    return entry if entry[0] == "call" else ["", "", "{}"]


@examples(200)
@given(st.sampled_from(["qwen_xml", "pythonic"]), outputs)
def test_converted_arguments_are_json(name: str, text: str):
    for kind, _, *call in fed(parser(name), [(text, ORDINARY)]):
        if kind == "call" and call[1]:
            assert isinstance(json.loads(call[0], parse_int=str), dict)


def operations(run: Callable[[], object]) -> int:
    """Count calls of functions, including built-in ones, while `run` runs."""
    count = 0

    def seen(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


LONG = {
    "hermes": ['<tool_call>\n{"name": "f", "arguments": {"a": "', "<tool_call>", "<", '<tool_call>{"name": "', "\n"],
    "qwen_xml": ["<tool_call>\n<function=f>\n<parameter=b>\n", "<function=f><parameter=o>", "<tool_call>", "\n<", "\n"],
    "llama_json": ['{"name": "f", "parameters": {"a": "', '{"name": "', "<|python_tag|>", '{"id": [', ";"],
    "pythonic": ["[f(a='", "[f(a=[", "[f(a=1, ", "[f(a=1", "[f(), "],
    "mistral": [
        "[TOOL_CALLS]f[ARGS]",
        '[TOOL_CALLS][{"arguments": {"a": "',
        "[TOOL_CALLS]",
        "[",
        '[TOOL_CALLS][{"name": "',
    ],
}
TAILS = ["[", "\\", '{"name": "f", "arguments": {}}, ']
MORE_TAILS = ['"', " ", "<tool_call>", "f(a=1), ", "</parameter"]


@pytest.mark.parametrize("name", LONG)
@cases("tail", TAILS, exhaustive=MORE_TAILS)
def test_the_cost_is_linear(name: str, tail: str):
    """Compare the work for a text with that for a text four times as long."""
    for head in LONG[name]:
        for text in (head, head + tail):
            repeated = (lambda n, head=head: head + tail * n) if text == head else (lambda n, text=text: text * n)
            costs = []
            for n in (10, 40):
                pieces = [(char, ORDINARY) for char in repeated(n)]
                costs.append(operations(lambda p=pieces: [q.feed(*piece) for q in [parser(name)] for piece in p]))
            assert costs[1] < 5 * costs[0], text


def test_plain_text_is_sent_at_once():
    for name in format_names():
        reader = parser(name)
        assert [reader.feed(text, ORDINARY) for text in ("Paris", " is", " nice")][1:] == [
            [Text(" is")],
            [Text(" nice")],
        ]


def test_ids_of_calls():
    def ids(name: str, text: str) -> list[str]:
        return [event.id for event in parser(name).feed(text, ORDINARY) if isinstance(event, CallStart)]

    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
    found = ids("hermes", call * 2)
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", id) for id in found) and len(set(found)) == 2
    own = ids("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}")
    assert all(re.fullmatch(r"[A-Za-z0-9]{9}", id) for id in own) and len(set(own)) == 2
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{}") == ["abc123XYZ"]
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]short[ARGS]{}") != ["short"]


def test_a_lone_surrogate_is_no_name():
    r"""Use a lone \ud800, which cannot be sent."""
    text = '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'
    assert fed(parser("hermes"), [(text, ORDINARY)]) == [["text", text]]


def test_a_name_is_sent_once_it_is_whole():
    for name, opening in (
        ("hermes", '<tool_call>\n{"name": "f"'),
        ("qwen_xml", "<tool_call>\n<function=f>"),
        ("mistral", '[TOOL_CALLS][{"name": "f"'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{"),
        ("pythonic", "[f("),
        ("pythonic", "[f(a="),
        ("llama_json", '{"name": "f", "parameters": {'),
    ):
        early = [*parser(name).feed(opening[:-1], ORDINARY), *parser(name).feed(opening, ORDINARY)]
        started = [event.name for event in early if isinstance(event, CallStart)]
        assert started == ([] if opening == "[f(" else ["f"]), opening


def test_arguments_stream():
    """Check that a string parameter is sent before it ends."""
    for name, opening, more in (
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"b": "', "abc"),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=b>\n", "abc"),
    ):
        reader = parser(name)
        reader.feed(opening, ORDINARY)
        assert [event.text for event in reader.feed(more, ORDINARY)] == [more]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (
            'For each call: <tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
            "hermes",
        ),
        ('"<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>"', "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=p1>\nvalue\n</parameter>\n</function>\n</tool_call>", "qwen_xml"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama_json",
        ),
        (
            "Calls: [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
            "pythonic",
        ),
        ('<tool_call>\n{"arguments": <args-dict>, "name": <function-name>}\n</tool_call>', "hermes"),
        # Llama 4's own, in which the marks stand around text only.
        (
            '{"name": function name, "parameters": dictionary of argument name and its value} <|python_start|>',
            "llama_json",
        ),
        # Other formats with similarities.
        ("<tool_call>{function-name}\n<arg_key>{arg-key}</arg_key>\n<arg_value>{arg-value}</arg_value>", None),
        ("<seed:tool_call>\n<function=f>\n<parameter=p>value</parameter>\n</function>\n</seed:tool_call>", None),
        ("{{ '[TOOL_CALLS]' }}{{ call.name }}{{ '[ARGS]' }}", "mistral"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        (None, None),
    ],
)
def test_the_format_is_found_in_the_template(template: str | None, name: str | None):
    assert detect(template) == name


def test_formats_by_name():
    assert format_names() == ("hermes", "llama_json", "mistral", "pythonic", "qwen_xml")
    with pytest.raises(ConfigError, match="unknown tool_call_parser 'xml'; known: hermes"):
        tool_format("xml", plain_tokenizer())


def test_marks_are_tokens_where_they_are_added_as_such():
    tokenizer = marked_tokenizer()
    (mark,) = tool_format("hermes", tokenizer).marks
    assert mark == Mark("<tool_call>", tokenizer.backend.token_to_id("<tool_call>")) and mark.id is not None
    assert tool_format("hermes", plain_tokenizer()).marks == (Mark("<tool_call>"),)
    inner = {tokenizer.backend.token_to_id(text) for text in ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")}
    assert tool_format("mistral", tokenizer).parser().markers == inner
