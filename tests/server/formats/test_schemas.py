"""The bounds that the OpenAPI document names are those that the server enforces."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import LiveServer

# Bodies that every field can be added to, and what makes sense of some fields.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 0, "echo": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "logprobs": True},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": []},
}
SCHEMAS = {
    "/v1/completions": "CompletionRequest",
    "/v1/chat/completions": "ChatRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "MessagesRequest",
    "/v1/messages/count_tokens": "CountTokensRequest",
    "/tokenize": "TokenizeRequest",
    "/detokenize": "DetokenizeRequest",
}
# Lists whose items are more than the document says of them.
ELSEWHERE = ("tools", "system")
MESSAGE = {"role": "user", "content": "x"}


def fields(document: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema of a kind of value) of every field, those of `slo` as slo.name."""
    schemas = document["components"]["schemas"]
    for name, field in schemas[SCHEMAS[path]]["properties"].items():
        for branch in field.get("anyOf", [field]):
            if branch.get("$ref", "").endswith("/SloFields"):
                for inner, schema in schemas["SloFields"]["properties"].items():
                    yield from ((f"slo.{inner}", kind) for kind in schema["anyOf"])
            else:
                yield name, branch


def edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at the schema's bounds and just beyond, and whether the schema allows them."""
    step = 1 if schema.get("type") == "integer" else 0.001
    if "minimum" in schema:
        yield from ((schema["minimum"], True), (schema["minimum"] - step, False))
    if "exclusiveMinimum" in schema:
        yield from ((schema["exclusiveMinimum"], False), (schema["exclusiveMinimum"] + step, True))
    if "maximum" in schema:
        yield from ((schema["maximum"], True), (schema["maximum"] + step, False))
    if "not" in schema:
        yield schema["not"]["const"], False
    if "minLength" in schema:
        yield from (("x" * schema["minLength"], True), ("x" * (schema["minLength"] - 1), False))
    if "maxLength" in schema:
        yield from (("x" * schema["maxLength"], True), ("x" * (schema["maxLength"] + 1), False))
    if schema.get("type") == "array":
        yield from array_edges(schema)
    if "maxProperties" in schema:
        yield from (({str(i): 1 for i in range(schema["maxProperties"] + extra)}, not extra) for extra in (0, 1))
        yield from (({"5": value}, allowed) for value, allowed in edges(schema["additionalProperties"]))


def array_edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    items = schema["items"]
    inner = items.get("items", {}).get("type")
    filler = {"integer": 5, "string": "x", "array": ["x"] if inner == "string" else [5]}.get(items.get("type"), MESSAGE)
    if "minItems" in schema:
        yield from (([filler] * schema["minItems"], True), ([filler] * (schema["minItems"] - 1), False))
    if "maxItems" in schema:
        yield from (([filler] * schema["maxItems"], True), ([filler] * (schema["maxItems"] + 1), False))
    yield from (([value], allowed) for value, allowed in edges(items))


def named_field(error: dict[str, Any]) -> str | None:
    """In OpenAI's form, or in Anthropic's."""
    return error["param"] if "param" in error else error.get("details", {}).get("param")


def check(server: LiveServer, path: str, name: str, value: Any, allowed: bool) -> None:
    outer, _, inner = name.partition(".")
    base = {key: given for key, given in BODIES[path].items() if (key, name) != ("prompt", "messages")}
    answer = server.post(path, base | {outer: {inner: value} if inner else value})
    shown = f"{path} {name} {str(value)[:60]}: {answer.text[:300]}"
    refused = answer.status_code == 400 and named_field(answer.json()["error"]) == name
    # More messages than fit the context, or as many biases as its vocabulary lacks, are refused for their own reasons.
    otherwise = any(why in answer.text for why in ("maximum context length", "prompt is too long", "vocabulary of"))
    assert refused is not allowed or (allowed and otherwise), shown


@pytest.mark.parametrize("path", BODIES)
def test_bounds_are_enforced(server: LiveServer, path: str) -> None:
    document = server.get("/openapi.json").json()
    checked = 0
    for name, schema in fields(document, path):
        if name in ELSEWHERE:
            continue
        for value, allowed in edges(schema):
            check(server, path, name, value, allowed)
            checked += 1
    least = {"/v1/completions": 90, "/v1/chat/completions": 80, "/v1/responses": 70, "/v1/messages": 70}
    assert checked >= least.get(path, 1)


def test_bounds_follow_the_options(serve: Any) -> None:
    server = serve(max_prompts=7, max_choices=5, max_stop_strings=3, max_logprobs=-1)
    schemas = server.get("/openapi.json").json()["components"]["schemas"]
    completion = schemas["CompletionRequest"]["properties"]

    def kinds(name: str) -> list[dict[str, Any]]:
        return completion[name]["anyOf"]

    assert [kind.get("maxItems") for kind in kinds("prompt")] == [None, None, 7, 7]
    assert (kinds("n")[0]["minimum"], kinds("n")[0]["maximum"]) == (1, 5)
    assert kinds("stop")[1]["maxItems"] == 3
    assert kinds("logprobs")[0]["minimum"] == -1 and "maximum" not in kinds("logprobs")[0]
