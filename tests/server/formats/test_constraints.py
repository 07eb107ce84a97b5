"""Fields that constrain the output: what each becomes for the engine, and what the client is told where it cannot."""

from typing import Any

import pytest

from roseinfer.core.guide import GuideSpec
from tests.server.live import LiveServer
from tests.text.tokenizers import word_piece

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
PATHS = list(BODIES)
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def json_schema(schema: Any = NUMBER, name: Any = "number", **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": name, "schema": schema, **more}}}


def outputs(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def ask(server: LiveServer, fields: dict[str, Any], path: str = PATHS[0]) -> tuple[GuideSpec | None, list[str]]:
    """Return the engine's guide for a request, and the warnings."""
    answer = server.post(path, BODIES[path] | fields)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].prompt.guide, answer.json().get("warnings", [])


def refused(server: LiveServer, fields: dict[str, Any], path: str = PATHS[0]) -> dict[str, Any]:
    answer = server.post(path, BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert not server.engine.requests
    return answer.json()["error"]


def deep(levels: int) -> list[Any]:
    return [deep(levels - 1)] if levels > 1 else []


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": NUMBER, "end": "</f>"}],
    "triggers": ["<f>"],
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        (json_schema(), '"n":{"type":"integer"}'),
        (json_schema(strict=True, description="d"), '"lenient":false'),
        ({"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "ab+"}}}, "ab+"),
        (outputs(json=NUMBER), '"lenient":true'),
        (outputs(json='{"type": "boolean"}'), '"type":"boolean"'),
        (outputs(json_object=True), '"type":"object"'),
        (outputs(regex="a[bc]"), "a[bc]"),
        (outputs(choice=["yes", "no"]), "yes"),
        (outputs(grammar='start: "hello"'), "hello"),
        (outputs(grammar='root ::= "hello"'), "hello"),
        (outputs(structural_tag={"format": {"type": "const_string", "value": "hey"}}), "hey"),
        (outputs(structural_tag='{"format": {"type": "const_string", "value": "hey"}}'), "hey"),
        (outputs(json=NUMBER, whitespace_pattern="[ ]?", disable_any_whitespace=False), '"whitespace_pattern":"[ ]?"'),
        (outputs(json=NUMBER, disable_any_whitespace=True), '"whitespace_flexible":false'),
        (outputs(json=NUMBER, disable_additional_properties=True), '"additionalProperties":false'),
    ],
)
def test_what_the_engine_is_given(server: LiveServer, path: str, fields: dict[str, Any], words: str) -> None:
    guide, warnings = ask(server, fields, path)
    assert guide is not None and words in guide.grammar and not guide.triggers
    assert warnings == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fields", [{"response_format": TAG}, outputs(structural_tag=TAG)])
def test_structures_and_triggers(server: LiveServer, path: str, fields: dict[str, Any]) -> None:
    guide, warnings = ask(server, fields, path)
    assert guide is not None and not guide.grammar and warnings == []
    assert [trigger.text for trigger in guide.triggers] == ["<f>"]


def test_every_prompt_has_its_guide(server: LiveServer) -> None:
    body = {"prompt": ["x", "y"], "n": 2} | outputs(choice=["a"])
    assert server.post(PATHS[0], body).status_code == 200
    assert len({request.prompt.guide for request in server.engine.requests}) == 1
    assert len(server.engine.requests) == 2 and server.engine.requests[0].prompt.guide is not None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", NUMBER), ("guided_json", '{"type": "boolean"}'), ("guided_regex", "a+"),
        ("guided_choice", ["a"]), ("guided_grammar", 'start: "a"'),
    ],
)  # fmt: skip
def test_older_names_mean_the_same(server: LiveServer, path: str, name: str, value: Any) -> None:
    newer = ask(server, outputs(**{name.removeprefix("guided_"): value}), path)
    assert ask(server, {name: value, "guided_decoding_backend": "outlines"}, path) == (
        newer[0],
        ["guided_decoding_backend"],
    )


def test_options_by_their_older_names(server: LiveServer) -> None:
    guide, warnings = ask(server, {"guided_json": NUMBER, "guided_whitespace_pattern": " "})
    assert guide == ask(server, outputs(json=NUMBER, whitespace_pattern=" "))[0]
    assert warnings == []
    assert ask(server, {"guided_decoding_backend": "x"}) == (None, ["guided_decoding_backend"])


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_nothing_asked(server: LiveServer, fields: dict[str, Any]) -> None:
    assert ask(server, fields) == (None, [])


def test_what_is_ignored_is_named(server: LiveServer) -> None:
    lenient = {"type": "array", "uniqueItems": True, "items": {"type": "string", "format": "binary"}}
    assert ask(server, json_schema(lenient, odd=1))[1] == [
        "response_format.json_schema.odd",
        "response_format: uniqueItems is not enforced",
        "response_format: format 'binary' is not enforced",
    ]
    assert ask(server, {"response_format": {"type": "text", "odd": 1}})[1] == ["response_format.odd"]
    assert ask(server, outputs(regex="a", disable_fallback=True))[1] == ["structured_outputs.disable_fallback"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param", "words", "code"),
    [
        ({"response_format": "json"}, "response_format", "valid object", None),
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is unknown", None),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema", None),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "be combined", None),
        ({"response_format": {"type": "json_object", "triggers": []}}, "response_format", "cannot be combined", None),
        (json_schema(schema=None), "response_format", "needs its schema", None),
        (json_schema(schema=[]), "response_format", "valid object", None),
        (json_schema(name=None), "response_format", "name must be", None),
        (json_schema(name="a b"), "response_format", "name must be", None),
        (json_schema(name="a" * 65), "response_format", "name must be", None),
        (json_schema(strict="yes"), "response_format", "valid boolean", None),
        (json_schema({"type": "array", "uniqueItems": True}, strict=True), "response_format",
         "strict, and 'uniqueItems' cannot be enforced", "unsupported_schema"),
        (json_schema({"type": "string", "minLength": 2, "maxLength": 1}), "response_format", "minLength",
         "invalid_grammar"),
        (json_schema({"$ref": "#/$defs/N", "$defs": {"N": {"$ref": "#/$defs/N"}}}), "response_format",
         "refers to itself", "invalid_grammar"),
        (json_schema({"enum": ["x" * 262144]}), "response_format", "larger than 262144", "grammar_too_complex"),
        (json_schema({"enum": [deep(99)]}), "response_format", "deeper than 100", "grammar_too_complex"),
        (json_schema({"enum": [deep(900)]}), "response_format", "deeper than 100", "grammar_too_complex"),
        (json_schema({"type": "string", "pattern": "a" * 8193}), "response_format", "longer than 8192",
         "grammar_too_complex"),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs 'structures'", "invalid_grammar"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "tags_with_separator"}}}, "response_format",
         "'tags_with_separator' are not supported", "invalid_grammar"),
        (outputs(), "structured_outputs", "got none", None),
        (outputs(json_object=False), "structured_outputs", "got none", None),
        (outputs(json={}, regex="a"), "structured_outputs", "got json, regex", None),
        (outputs(json=5), "structured_outputs", "json", None),
        (outputs(json="{"), "structured_outputs", "is invalid JSON", None),
        (outputs(json="[]"), "structured_outputs", "must be an object", None),
        (outputs(structural_tag="1"), "structured_outputs", "must be an object", None),
        (outputs(regex="("), "structured_outputs", "unclosed group", "invalid_grammar"),
        (outputs(regex="a(?=b)"), "structured_outputs", "look-around", "invalid_grammar"),
        (outputs(regex="a" * 8193), "structured_outputs", "longer than 8192", "grammar_too_complex"),
        (outputs(choice=[]), "structured_outputs", "list of choices is empty", "invalid_grammar"),
        (outputs(choice=["a"] * 1025), "structured_outputs", "at most 1024", "grammar_too_complex"),
        (outputs(choice=[1]), "structured_outputs", "valid string", None),
        (outputs(grammar="start: ("), "structured_outputs", "", "invalid_grammar"),
        (outputs(grammar="root ::= ("), "structured_outputs", "Expected ')'", "invalid_grammar"),
        (outputs(regex="a", whitespace_pattern=" "), "structured_outputs", "is for JSON only", None),
        (outputs(json={}, whitespace_pattern="("), "structured_outputs", "", "invalid_grammar"),
        (outputs(json={}, whitespace_pattern=" " * 8193), "structured_outputs", "longer", "grammar_too_complex"),
        (outputs(json={}, whitespace_pattern=" ", disable_any_whitespace=True), "structured_outputs",
         "cannot be combined", None),
        ({"guided_json": 1}, "guided_json", "", None),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "got none", None),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "got regex, choice", None),
        ({"guided_regex": "("}, "guided_regex", "unclosed group", "invalid_grammar"),
        ({"guided_json": {}, **outputs(regex="a")}, "guided_json", "and structured_outputs cannot", None),
        ({**json_schema(), **outputs(regex="a")}, "response_format", "and structured_outputs cannot", None),
        ({**json_schema(), "guided_regex": "a"}, "response_format", "and guided_regex cannot", None),
    ],
)  # fmt: skip
def test_refusals(
    server: LiveServer, path: str, fields: dict[str, Any], param: str, words: str, code: str | None
) -> None:
    found = refused(server, fields, path)
    assert (found["param"], found["code"], found["type"]) == (param, code, "invalid_request_error")
    assert words in found["message"]


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "null"}]}
    return schema


HOSTILE: list[dict[str, Any]] = [
    json_schema({"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(30)]}),
    json_schema(nested(60)),
    json_schema(nested(200)),
    json_schema({"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "null"}}} for i in range(1500)]}),
    json_schema({"type": "object", "properties": {f"p{i}": {"pattern": f"^x{i}+$"} for i in range(1000)}}),
    json_schema({"enum": [f"value {i}" for i in range(3000)]}),
    json_schema({"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    outputs(regex="(.{1,50}[ab]){1,50}"),
    outputs(regex="(.{1,1000}[ab]){1,1000}"),
    outputs(grammar="root ::= " + "(" * 20000),
    outputs(choice=["x" * 250] * 1024),
]


@pytest.mark.exhaustive  # `end_to_end/test_structured_outputs` sends such constraints, too
def test_hostile_constraints_leave_the_server_answering(server: LiveServer) -> None:
    """Each either works or gets a 400, and requests without one are answered as ever."""
    endless = refused(server, HOSTILE[0])
    assert endless["code"] == "grammar_too_complex" and "takes too long" in endless["message"]
    for fields in HOSTILE:
        answer = server.post(PATHS[0], BODIES[PATHS[0]] | fields)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            error = answer.json()["error"]
            assert error["code"] in ("grammar_too_complex", "invalid_grammar") and len(error["message"]) < 1000
        assert server.post(PATHS[0], {"prompt": "x"}).status_code == 200
    assert ask(server, outputs(choice=["a"]))[0] is not None


def test_metrics(server: LiveServer) -> None:
    def counted() -> dict[str, float]:
        lines = server.get("/metrics").text.splitlines()
        found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("rose")}
        return {name.partition("{")[0] + name.partition("reason=")[2]: value for name, value in found.items()}

    before = counted()
    for _ in range(2):
        ask(server, outputs(choice=["known only here"]))
    server.post(PATHS[0], BODIES[PATHS[0]] | outputs(regex="(("))
    after = counted()
    grown = {name: after[name] - before.get(name, 0) for name in after if "grammar" in name and "bucket" not in name}
    assert grown["roseinfer:grammar_compile_seconds_count"] == 2
    assert grown["roseinfer:grammars_cached_total"] == 1
    assert grown['roseinfer:grammars_refused_total"invalid_grammar"}'] == 1


def test_a_tokenizer_that_grammars_cannot_follow() -> None:
    """The text that one of its tokens adds is unknown."""
    with LiveServer(word_piece()) as server:
        found = refused(server, outputs(regex="a"))
        assert found["code"] == "unsupported_tokenizer"
        assert server.post(PATHS[0], {"prompt": "x"}).status_code == 200
