"""Constrained outputs of the embedded model through a real client and a real server."""

import json
import re
import runpy
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.real_server import RealServer

EXAMPLE = Path(__file__).parents[3] / "examples" / "structured_outputs.py"
MESSAGES: list[Any] = [{"role": "user", "content": "A person, as JSON."}]


class Colour(StrEnum):
    RED = "red"
    GREEN = "green"


Age = Annotated[int, Field(ge=0, le=120)]


class Person(BaseModel):
    age: Age
    colour: Colour
    parents: Annotated[list[Age], Field(max_length=2)] | None
    married: bool


# Every part is bounded, so that even a small model comes to an end.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 500}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 8},
        "when": {"type": "string", "format": "date"},
        "more": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["colour", "sizes", "name", "when", "more"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}},
}


def schema_format(schema: dict[str, Any] = SCHEMA, strict: bool = True) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": strict}}


def check(text: str, finish_reason: str, schema: dict[str, Any] = SCHEMA) -> bool:
    """True if a document is complete. A complete one must be valid."""
    if finish_reason == "length":
        return False
    assert finish_reason == "stop"
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    return True


def test_parse(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=300, temperature=1, seed=1
    )
    person = done.choices[0].message.parsed
    assert isinstance(person, Person) and person.colour in ("red", "green")


def test_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=300, temperature=1, seed=1
    ) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0].message
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert isinstance(streamed.parsed, Person)
    whole = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=300, temperature=1, seed=1
    )
    assert whole.choices[0].message.content == streamed.content


@pytest.mark.parametrize(("temperature", "samples"), [pytest.param(0.0, 1, marks=pytest.mark.exhaustive), (1.0, 3)])
def test_every_strict_document_is_valid(client: openai.OpenAI, temperature: float, samples: int) -> None:
    done = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=schema_format(),
        temperature=temperature,
        n=samples,
        seed=7,
        max_tokens=200,
        logprobs=True,
        top_logprobs=2,
    )
    complete = [check(choice.message.content or "", choice.finish_reason) for choice in done.choices]
    assert any(complete) or not temperature, "the greedy model writes much white space"
    for choice in done.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        text = b"".join(bytes(entry.bytes or b"") for entry in choice.logprobs.content)
        assert text.decode(errors="ignore").startswith(choice.message.content or "")


def test_documents_beside_free_texts_with_other_fields(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tiny", "prompt": "def f(", "max_tokens": 300, "seed": 3}
    free = client.completions.create(**fields | {"max_tokens": 40})
    done = client.completions.create(
        **fields,
        n=3,
        frequency_penalty=0.5,
        presence_penalty=0.1,
        extra_body={"response_format": schema_format(), "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 9},
    )
    complete = [check(choice.text, choice.finish_reason) for choice in done.choices]
    assert any(complete)
    again = client.completions.create(**fields | {"max_tokens": 40})
    assert again.choices[0].text == free.choices[0].text


def test_a_stop_string_and_a_short_budget_cut_a_document(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "temperature": 0,
        "response_format": schema_format(),
    }
    cut = client.chat.completions.create(**asked, max_tokens=5).choices[0]
    assert cut.finish_reason == "length" and cut.message.content and cut.message.content.startswith("{")
    stopped = client.chat.completions.create(**asked, max_tokens=300, stop=['"sizes"']).choices[0]
    assert stopped.finish_reason == "stop"
    assert re.fullmatch(r'\{\s*"colour"\s*:\s*"\w+"\s*,\s*', stopped.message.content or "")
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=MESSAGES, response_format=Person, max_tokens=3)


def test_any_object(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "response_format": {"type": "json_object"}}
    done = client.chat.completions.create(**asked, seed=2, n=4, max_tokens=100)
    for choice in done.choices:
        assert (choice.message.content or "").startswith("{")
        check(choice.message.content or "", choice.finish_reason, {"type": "object"})


LARK = 'start: verb " the " NOUN "."\nverb: "See" | "Hear"\nNOUN: /[a-z]{3,5}/'
GBNF = 'root ::= verb " the " noun "."\nverb ::= "See" | "Hear"\nnoun ::= [a-z] [a-z] [a-z]'
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "Answer: "},
            {"type": "tag", "begin": "<n>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
             "end": "</n>"},
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": LARK}, r"(See|Hear) the [a-z]{3,5}\."),
        ({"grammar": GBNF}, r"(See|Hear) the [a-z]{3}\."),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, r"\d\d"),
        ({"json": {"items": {"const": 1}, "type": "array", "minItems": 2}, "whitespace_pattern": "X"},
         r"\[X?1X?(,X?1X?)+\]"),
        ({"structural_tag": TAG}, r"Answer: <n>(true|false)</n>"),
    ],
)  # fmt: skip
def test_structured_outputs(client: openai.OpenAI, constraint: Any, pattern: str, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 1, "seed": 5}
    extra = {"structured_outputs": constraint}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=extra))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        (choice,) = client.chat.completions.create(**asked, extra_body=extra).choices
        text, reason = choice.message.content or "", choice.finish_reason
        assert reason == "stop"
    assert re.fullmatch(pattern, text), text


def test_free_text_until_a_trigger(client: openai.OpenAI) -> None:
    """The embedded model is made to output the trigger, which enables the grammar."""
    answer = client.post("../tokenize", body={"prompt": "def", "add_special_tokens": False}, cast_to=dict[str, Any])
    (def_id,) = answer["tokens"]
    tag = {"type": "tag", "begin": "def f", "content": {"type": "regex", "pattern": "oo [0-9]{2}"}, "end": "!"}
    spec = {"type": "triggered_tags", "triggers": ["def"], "tags": [tag], "stop_after_first": True}
    done = client.completions.create(
        model="tiny",
        prompt="import os\n\n\n",
        max_tokens=200,
        logit_bias={str(def_id): 100},
        extra_body={"response_format": {"type": "structural_tag", "format": spec}},
    )
    (choice,) = done.choices
    assert re.fullmatch(r"def foo \d\d!", choice.text)
    assert choice.finish_reason == "stop"


def test_a_prompt_that_is_only_scored(client: openai.OpenAI) -> None:
    extra = {"structured_outputs": {"regex": "a"}}
    done = client.completions.create(model="tiny", prompt="a b", max_tokens=0, echo=True, extra_body=extra)
    assert done.choices[0].text == "a b"


def test_clients_that_leave(client: openai.OpenAI, real: RealServer) -> None:
    for _ in range(5):
        stream = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=500, stream=True
        )
        next(iter(stream))
        stream.close()


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return schema


KNOWN_CODES = ("grammar_too_complex", "invalid_grammar", "no_token_allowed", "constraint_too_slow")
HOSTILE = [
    {"regex": "(.{1,50}[ab]){1,50}"},
    {"regex": "(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa){4000}"},
    {"choice": ["a" * 8000, "b" * 8000]},
    {"json": nested(8)},
    {"json": {"type": "array", "items": {"anyOf": [{"$ref": "#"}, {"type": "string", "pattern": "(a|b|.{9}){1,99}"}]}}},
    {"grammar": 'start: ("a" | "b" | start start)+'},
]
TOO_SLOW = {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]}}


@pytest.mark.parametrize("constraints", [HOSTILE, pytest.param([TOO_SLOW], marks=pytest.mark.exhaustive)])
def test_hostile_constraints_leave_others_alone(client: openai.OpenAI, constraints: list[dict[str, Any]]) -> None:
    """Each is refused, or ends, or fails by itself; a stream that runs beside them gets all of its tokens."""
    free = client.completions.create(
        model="tiny", prompt="import os\n", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(free)
    tokens = 1 if next(chunks) else 0
    for constraint in constraints:
        asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 20}
        try:
            done = client.completions.create(**asked, extra_body={"structured_outputs": constraint})
            assert done.choices[0].finish_reason in ("length", "stop")
        except openai.BadRequestError as error:
            assert error.code in KNOWN_CODES
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert tokens + len(ends) >= 200 and ends[-1] == "length"


def test_the_example(real: RealServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["structured_outputs.py", "--base-url", f"{real.url}/v1"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    expected = [
        r"parsed: Review\(title='.*', stars=[1-5], genre='(comedy|drama|other)'\)",
        r"streamed in \d+ pieces: \{'title': .*\}",
        r"choice: (positive|negative|neutral)",
        r"regex: [A-Z][a-z]{2,8}, \d{4}",
        r"Lark: SELECT (title|stars|genre)(,(title|stars|genre)){0,2} FROM films",
        r"GBNF: (yes|no) \(\d\d?%\)",
    ]
    assert len(lines) == len(expected)
    for line, pattern in zip(lines, expected, strict=True):
        assert re.fullmatch(pattern, line), line


def test_refusals_reach_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=schema_format({"type": "array", "uniqueItems": True})
        )
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_schema")
    assert "uniqueItems" in refused.value.message
    lenient = schema_format({"type": "array", "uniqueItems": True, "items": {"const": 1}, "maxItems": 2}, strict=False)
    done: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, response_format=lenient, max_tokens=20)
    assert done.warnings == ["response_format: uniqueItems is not enforced"]
