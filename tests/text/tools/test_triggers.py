"""Calls that a model opens itself: free text, a call that follows its triggered grammar, and free text again."""

import pytest

from roseinfer.text.tools.base import Tool
from roseinfer.text.tools.registry import tool_format
from tests.helpers.tokenizers import EOS_ID
from tests.helpers.writing import TOKENIZER, Writing
from tests.text.tools.recorded import fed
from tests.text.tools.test_grammars import schemas

PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = [Tool("get", PARAMETERS, strict=True), Tool("list.all")]
HERMES = '<tool_call>\n{"name": "get", "arguments": {"n": 1}}\n</tool_call>'
QWEN = "<tool_call>\n<function=get>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
# Output, position where a strict tool's arguments begin, and the expected events.
SAID = [["call", "get", '{"n": 1}', True]]
OUTPUTS = {
    "hermes": (f"So: {HERMES} and on", HERMES.index("1}"), [["text", "So: "], *SAID, ["text", " and on"]]),
    "qwen_xml": (f"So: {QWEN}\n{QWEN}", QWEN.index("1\n"), [["text", "So: "], *SAID, *SAID]),
    "mistral": (
        'So: [TOOL_CALLS][{"name": "get", "arguments": {"n": 1}}, {"name": "x", "arguments": {}}]',
        len('[TOOL_CALLS][{"name": "get", "arguments": {"n": '),
        [["text", "So: "], *SAID, ["call", "x", "{}", True]],
    ),
    "llama_json": ('{"name": "get", "parameters": {"n": 1}}', len('{"name": "get", "parameters": {"n": '), SAID),
    "pythonic": ("\n[get(n=1), list.all()]", len("\n[get(n="), [*SAID, ["call", "list.all", "{}", True]]),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_call_triggers_its_grammar(name: str):
    text, at, expected = OUTPUTS[name]
    format = tool_format(name, TOKENIZER)
    output = Writing(triggers=format.triggers(TOOLS, 16, schemas))
    at += len("So: ") if text.startswith("So: ") else 0
    allowed = output.say(text[:at]).allowed()
    assert allowed is not None and allowed - {*b" \t\r\n"} == {*b"-0123456789"}, "the strict tool takes an integer"
    output.say(text[at:])
    allowed = output.allowed()
    assert allowed is None or EOS_ID in allowed, "the call is complete"
    assert fed(format.parser(TOOLS), [(text, 0)]) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <tool_box> b"),
        ("qwen_xml", "<functional>"),
        ("llama_json", '{"answer": 42}'),
        ("llama_json", 'Say {"name": "get"'),
        ("pythonic", "[get, list]"),
        ("pythonic", "Use [get(n="),
        ("mistral", "[1, 2] [TOOLS]"),
    ],
)
def test_other_text_stays_free(name: str, text: str):
    format = tool_format(name, TOKENIZER)
    assert Writing(triggers=format.triggers(TOOLS, 16, schemas)).say(text).allowed() is None
    assert fed(format.parser(TOOLS), [(text, 0)]) == [["text", text]]


def test_a_single_call_ends_the_output():
    triggers = tool_format("hermes", TOKENIZER).triggers(TOOLS, 1, schemas)
    assert Writing(triggers=triggers, ends_after=1).say(HERMES).ended
