"""Grammars of calls: they compile, enforce their rules, and parsers read what they allow."""

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from roseinfer.core.errors import InvalidRequestError
from roseinfer.grammar.constraint import JsonOptions
from roseinfer.grammar.json_schema import schema_text
from roseinfer.grammar.library import GrammarTokens, Matcher, compile_grammar
from roseinfer.text.tokenizer import Tokenizer
from roseinfer.text.tools.base import MAX_CALLS, Tool, ToolFormat, grammar
from roseinfer.text.tools.registry import format_names, tool_format
from tests.text.tools.recorded import ORDINARY, by_ids, fed, marked_tokenizer, plain_tokenizer

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/Where"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False}},
}
TOOLS = [Tool("get_weather", WEATHER), Tool("list.files"), Tool("free-form", {"type": "object"})]
STRICT = [Tool("get_weather", WEATHER, strict=True), *TOOLS[1:]]
# Calls of `TOOLS` in each format, as the grammar of a required call writes them.
CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "list.files", "arguments": {}}\n</tool_call>',
    ],
    "qwen_xml": [
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=list.files>\n</function>\n</tool_call>",
    ],
    "llama_json": [
        '{"name": "get_weather", "parameters": {"city": "Köln", "days": 3}}',
        '{"name": "list.files", "parameters": {}}',
    ],
    "pythonic": ['[get_weather(city="Köln", days=3)]', "[list.files()]"],
    "mistral": [
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}]',
        '[TOOL_CALLS] [{"name": "list.files", "arguments": {}}]',
    ],
}
SAID = [["call", "get_weather", '{"city": "Köln", "days": 3}', True], ["call", "list.files", "{}", True]]
SEVERAL = {
    "hermes": "\n".join(CALLS["hermes"]),
    "qwen_xml": "\n".join(CALLS["qwen_xml"]),
    "pythonic": '[get_weather(city="Köln", days=3), list.files()]',
    "mistral": (
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Köln", "days": 3}}, '
        '{"name": "list.files", "arguments": {}}]'
    ),
}
WRONG = ("get_weather", "get_wether"), ("3", "0"), ("3", '"3"'), ('"days"', '"dayz"'), ("days", "dayz")


def schemas(schema: Mapping[str, Any], strict: bool) -> str:
    return schema_text(dict(schema), strict=strict, options=JsonOptions()).text


class Language:
    """Texts that a grammar accepts with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.tokens = GrammarTokens.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])

    def accepts(self, text: str, said: str) -> bool:
        matcher = compile_grammar(text, self.tokens).matcher()
        ids = self.ids(said)
        if not matcher.allows(ids):
            return False
        matcher.consume(ids)
        return bool(matcher.raw.is_accepting())

    def ids(self, said: str) -> list[int]:
        pieces = by_ids(self.tokenizer, said)
        return [id for piece, mark in pieces for id in ([mark] if mark else self.tokens.spell(piece.encode()))]


@pytest.fixture(scope="module", params=[plain_tokenizer, marked_tokenizer], ids=["spelled", "tokens"])
def language(request: pytest.FixtureRequest) -> Language:
    return Language(request.param())


def calls_of(format: ToolFormat, name: str, language: Language) -> list[str]:
    if name == "mistral" and language.tokenizer is marked_tokenizer():
        return ['[TOOL_CALLS]get_weather[ARGS]{"city": "Köln", "days": 3}', "[TOOL_CALLS]list.files[ARGS]{}"]
    return CALLS[name]


@pytest.mark.parametrize("name", format_names())
def test_required_calls(name: str, language: Language):
    format = tool_format(name, language.tokenizer)
    text = grammar(format.rules(TOOLS, 1, schemas))
    for call, said in zip(calls_of(format, name, language), SAID, strict=True):
        assert language.accepts(text, call), call
        assert fed(format.parser(TOOLS), by_ids(language.tokenizer, call)) == [said]
        assert not language.accepts(text, f"\n{call}") and not language.accepts(text, call[:-1])
        for right, wrong in WRONG:
            if right in call and not (right == "3" and wrong == '"3"' and name == "qwen_xml"):
                assert not language.accepts(text, call.replace(right, wrong)), wrong
    assert not language.accepts(text, "Paris.")
    assert language.accepts(grammar(format.rules(TOOLS, 1, schemas), after_thinking=True), f"\n\n{call}")


@pytest.mark.parametrize("name", format_names())
def test_a_document_may_replace_calls(name: str, language: Language):
    format = tool_format(name, language.tokenizer)
    document = schemas({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, True)
    text = grammar(format.rules(TOOLS, 1, schemas), document=document)
    assert language.accepts(text, '{"a": null}') and language.accepts(text, calls_of(format, name, language)[1])
    assert not language.accepts(text, '{"b": null}')


@pytest.mark.parametrize("name", SEVERAL)
def test_several_calls(name: str, language: Language):
    format = tool_format(name, language.tokenizer)
    several = SEVERAL[name]
    if name == "mistral" and language.tokenizer is marked_tokenizer():
        several = "".join(calls_of(format, name, language))
    assert language.accepts(grammar(format.rules(TOOLS, MAX_CALLS, schemas)), several)
    assert not language.accepts(grammar(format.rules(TOOLS, 1, schemas)), several)
    assert fed(format.parser(TOOLS), by_ids(language.tokenizer, several)) == SAID
    least = calls_of(format, name, language)[1]
    many = {"hermes": "\n", "qwen_xml": "\n"}.get(name, "").join([least] * (MAX_CALLS + 1))
    assert not language.accepts(grammar(format.rules(TOOLS, MAX_CALLS, schemas)), many)


def opened(format: ToolFormat, call: str, most: int = MAX_CALLS, tools: list[Tool] = TOOLS, **options: bool):
    """Return the grammar that a call triggers, and the rest of the call; None if it triggers none."""
    for trigger in format.triggers(tools, most, schemas, **options):
        mark = next((mark.text for mark in format.marks if mark.id is not None and mark.id == trigger.token_id), None)
        opening = trigger.text if mark is None else mark
        if call.startswith(opening):
            return trigger.grammar, call.removeprefix(opening)
    return None


@pytest.mark.parametrize("name", format_names())
def test_calls_that_the_model_opens(name: str, language: Language):
    """Check syntax for all tools and schemas of strict ones; with `others` False all schemas, and no other names."""
    format = tool_format(name, language.tokenizer)
    call, _ = calls_of(format, name, language)
    for tools in (TOOLS, STRICT):
        assert language.accepts(*opened(format, call, tools=tools))
    assert language.accepts(*opened(format, call, others=False))
    wrong = call.replace("days", "dayz")
    assert not language.accepts(*opened(format, wrong, tools=STRICT))
    assert not language.accepts(*opened(format, wrong, others=False))
    assert language.accepts(*opened(format, wrong)), "no schema is forced on a tool that is not strict"
    other = call.replace("get_weather", "get_time")
    if name != "pythonic":  # its trigger is the name of a tool
        assert language.accepts(*opened(format, other)) and language.accepts(*opened(format, other, tools=STRICT))
        assert not language.accepts(*opened(format, other, others=False))
    assert not language.accepts(*opened(format, call[:-3] + "!!!"))


def test_a_list_of_something_else_opens_no_call(language: Language):
    format = tool_format("pythonic", language.tokenizer)
    assert opened(format, "[1, 2]") is None and opened(format, "[see](x)") is None
    text, rest = opened(format, '[list.files(), get_time(zone="CET", at={"h": 1}), get_weather(city="x", days=1)]') or (
        "",
        "",
    )
    assert language.accepts(text, rest) and language.accepts(text, rest.replace("days=1", "days=0"))
    text, rest = opened(format, "[list.files(), get_weather(city='x', days=0)]", tools=STRICT) or ("", "")
    assert not language.accepts(text, rest)


def test_variants_of_python_are_accepted(language: Language):
    format = tool_format("pythonic", language.tokenizer)
    call = """[get_weather(city='it\\'s "x" \\n ü', a=True, b=none, c=[1,2, -3.5e2 ,'y'], d={'k': {"l": None}})]"""
    assert not language.accepts(*opened(format, call)), "a variable"
    call = call.replace("none", "None")
    assert language.accepts(*opened(format, call)) and language.accepts(*opened(format, call.replace(", ", ",\n ")))
    ((kind, _, arguments, complete),) = fed(format.parser(TOOLS), [(call, ORDINARY)])
    assert (kind, complete) == ("call", True) and json.loads(arguments)["city"] == 'it\'s "x" \n ü'


def test_a_document_may_look_like_a_call_of_llamas(language: Language):
    format = tool_format("llama_json", language.tokenizer)
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    text = grammar(format.rules(TOOLS, 1, schemas), document=schemas(person, True))
    for name in ("Bob", "get_weather"):
        assert language.accepts(text, f'{{"name": "{name}", "age": 3}}'), name


def test_other_json_opens_no_call_of_llamas(language: Language):
    format = tool_format("llama_json", language.tokenizer)
    assert opened(format, '{"answer": 1}') is None
    assert language.accepts(*opened(format, '{"name": "Bob", "age": 3, "pets": [{"a": null}]}', tools=STRICT))


def test_hermes_takes_arguments_first(language: Language):
    """Check the order that Hermes 2 Pro was trained with."""
    format = tool_format("hermes", language.tokenizer)
    call = '<tool_call>\n{"arguments": {"a": 1}, "name": "%s"}\n</tool_call>'
    assert language.accepts(*opened(format, call % "f"))
    assert not language.accepts(*opened(format, call % "get_weather", tools=STRICT)), "its schema could not be held"


def test_mistral_may_give_ids():
    language = Language(marked_tokenizer())
    format = tool_format("mistral", language.tokenizer)
    call = "[TOOL_CALLS]list.files[CALL_ID]abcdefgh1[ARGS]{}"
    assert language.accepts(grammar(format.rules(TOOLS, 1, schemas)), call)
    assert language.accepts(*opened(format, call))


@pytest.mark.parametrize(
    ("name", "schema", "keyword"),
    [
        ("qwen_xml", {"type": "object", "anyOf": [{"required": ["a"]}]}, "anyOf"),
        ("pythonic", {"type": "object", "minProperties": 1}, "minProperties"),
        ("pythonic", {"type": "object", "additionalProperties": {"type": "string"}}, "additionalProperties"),
        ("pythonic", {"type": "object", "properties": {"a": {"$ref": "#"}}}, "$ref"),
        ("pythonic", {"type": "object", "properties": {"a b": {}}}, "a b"),
        ("qwen_xml", {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}, "maxLength"),
        ("qwen_xml", {"type": "object", "properties": {"a": {"type": ["string", "integer"]}}}, "type"),
        ("qwen_xml", {"type": "object", "properties": {"a>": {}}}, "a>"),
    ],
)
def test_a_strict_tool_that_a_format_cannot_enforce_is_refused(name: str, schema: dict, keyword: str):
    format = tool_format(name, plain_tokenizer())
    with pytest.raises(InvalidRequestError, match="is strict") as caught:
        format.rules([Tool("f", schema, strict=True)], 1, schemas)
    assert repr(keyword) in str(caught.value)
    with pytest.raises(InvalidRequestError, match="is strict"):
        format.triggers([Tool("f", schema, strict=True)], 1, schemas)
    compile_grammar(grammar(format.rules([Tool("f", schema)], 1, schemas)), Language(plain_tokenizer()).tokens)


VALUES = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "b": {"type": "boolean"},
        "e": {"enum": ["x", "y z"]},
        "l": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "o": {"type": "object", "properties": {"k": {"type": "null"}}, "additionalProperties": False},
        "z": {"type": "null"},
    },
    "required": ["s", "e", "o"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", format_names())
def test_random_outputs_of_a_grammar_are_valid_calls(name: str, language: Language):
    """Draw random tokens from the masks until the grammar ends, and parse the text as calls."""
    tokenizer, tokens = language.tokenizer, language.tokens
    tools = [Tool("f", VALUES, strict=True)]
    format = tool_format(name, tokenizer)
    compiled = compile_grammar(grammar(format.rules(tools, 2, schemas)), tokens)
    ended = 0
    for seed in range(12):
        rng, matcher, ids = random.Random(seed), compiled.matcher(), []
        while not matcher.complete and len(ids) < 400 and (more := drawn(matcher, tokens, rng)):
            ids += more
        pieces = [(tokenizer.token_bytes(id).decode("latin-1"), id) for id in ids]
        said = fed(format.parser(tools), pieces)
        assert all(entry[0] == "call" and entry[1] == "f" for entry in said if not cut(entry)), said
        for entry in said:
            if entry[0] == "call" and entry[3]:
                ended += 1
                Draft202012Validator(VALUES).validate(json.loads(entry[2], strict=False))
    assert ended > 3


def cut(entry: list) -> bool:
    return entry[0] == "text" or not entry[3]


def drawn(matcher: Matcher, tokens: GrammarTokens, rng: random.Random) -> list[int]:
    """Return an allowed token, with a higher probability of tokens that end a string."""
    for end in ("\n</parameter>\n", '"') if rng.random() < 0.3 else ():
        ids = tokens.spell(end.encode())
        if matcher.allows(ids):
            matcher.consume(ids)
            return ids
    words = memoryview(bytearray(4 * ((tokens.vocab_size + 31) // 32))).cast("I")
    matcher.fill(words)
    bits = int.from_bytes(words.cast("B"), "little")
    allowed = [id for id in range(tokens.vocab_size) if bits >> id & 1 and id not in tokens.eos_ids]
    if not allowed:
        return []
    ids = [rng.choice(allowed)]
    matcher.consume(ids)
    return ids


def test_ordinary_tokens_are_not_marks():
    assert ORDINARY not in [mark.id for name in format_names() for mark in tool_format(name, marked_tokenizer()).marks]
