"""Tools and thinking through server and engine, with a model that says what a script has for it.

`forbidden`: what it would have said, had a mask not been in the way.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer.core.config.server import ServerConfig
from tests.helpers.cases import cases
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def call(name: str = "weather", **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


BONN = call(city="Bonn")


class Model:
    """Model that answers with `says` next."""

    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._questions = 0

    def ask(self, says: str, **fields: Any) -> dict[str, Any]:
        self._questions += 1
        ANSWERS[f"question {self._questions}"] = says
        messages = [{"role": "user", "content": f"question {self._questions}"}]
        body = {"messages": messages, "max_tokens": 300} | fields
        answer = self._server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def said(self, says: str, **fields: Any) -> tuple[dict[str, Any], str]:
        """The message, and why it ended."""
        choice = self.ask(says, **fields)["choices"][0]
        return choice["message"], choice["finish_reason"]

    @property
    def forbidden(self) -> list[str]:
        found, self._server.runner.forbidden = self._server.runner.forbidden, []
        return found


ANSWERS: dict[str, str] = {}


def script(prompt: str) -> str:
    return ANSWERS[prompt.rsplit("<|user|>", 1)[1].split("<|end|>")[0]]


@pytest.fixture(scope="module")
def running() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(thinks=True), script) as server:
        yield server


@pytest.fixture(scope="module")
def model(running: ScriptedServer) -> Model:
    return Model(running)


def arguments(message: dict[str, Any]) -> list[tuple[str, Any]]:
    calls = [entry["function"] for entry in message.get("tool_calls", ())]
    return [(entry["name"], json.loads(entry["arguments"])) for entry in calls]


# --- calls --------------------------------------------------------------------------------------------------------
def test_text_and_calls_in_auto(model: Model) -> None:
    message, end = model.said(f"Let me see. {BONN}\n{call('clock')}", tools=[WEATHER, CLOCK])
    assert (message["content"].strip(), end) == ("Let me see.", "tool_calls")
    assert arguments(message) == [("weather", {"city": "Bonn"}), ("clock", {})]
    assert not model.forbidden


def test_the_syntax_of_a_call_is_enforced_in_auto_and_its_schema_is_not(model: Model) -> None:
    message, _ = model.said(call(town=1), tools=[WEATHER])
    assert arguments(message) == [("weather", {"town": 1})] and not model.forbidden
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    model.said(call(town=1), tools=[strict], max_tokens=100)
    assert model.forbidden
    model.said('<tool_call>\n{"name": "weather", "arguments": nonsense', tools=[WEATHER], max_tokens=100)
    assert model.forbidden


def test_one_call_and_no_more(model: Model) -> None:
    message, end = model.said(f"{BONN}\n{BONN}", tools=[WEATHER], parallel_tool_calls=False)
    assert (len(arguments(message)), end) == (1, "tool_calls") and not model.forbidden


def test_allowed_tools_in_auto(model: Model) -> None:
    only: Any = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": only}
    message, _ = model.said(call("clock"), tools=[WEATHER, CLOCK], tool_choice=choice)
    assert arguments(message) == [("clock", {})] and not model.forbidden
    model.said(BONN, tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=30)
    assert model.forbidden


def test_a_call_that_must_not_be(model: Model) -> None:
    message, _ = model.said(BONN, tools=[WEATHER], tool_choice="none", max_tokens=20)
    assert "tool_calls" not in message and "<tool_call>" not in message["content"]
    assert len(model.forbidden) == 1, "its first token"


def test_a_call_that_must_be(model: Model) -> None:
    message, end = model.said(BONN, tools=[WEATHER], tool_choice="required")
    assert (arguments(message), end) == ([("weather", {"city": "Bonn"})], "tool_calls") and not model.forbidden
    message, _ = model.said("I would rather not.", tools=[CLOCK], tool_choice="required", max_tokens=200)
    assert model.forbidden and [name for name, _ in arguments(message)][:1] in ([], ["clock"])


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("tokens", [1, 5, 20, 40])
def test_a_call_that_is_cut_off(model: Model, tokens: int, choice: str) -> None:
    """The opening is neither content nor searched for stop strings."""
    fields = {"tools": [WEATHER], "tool_choice": choice, "stop": ["tool", "name", "<", "{"]}
    message, end = model.said(BONN, **fields, max_tokens=tokens)
    assert (message["content"] or "", end) == ("", "length") and not model.forbidden


def test_stop_strings_do_not_count_in_arguments_and_reasoning(model: Model) -> None:
    message, end = model.said(f"<think>Bonn?</think>{BONN}", tools=[WEATHER], stop=["Bonn"])
    assert (message["reasoning"], end, len(arguments(message))) == ("Bonn?", "tool_calls", 1)
    message, end = model.said(f"{BONN}\n\nThe end, I say", tools=[WEATHER], stop=["end"])
    assert (end, len(arguments(message))) == ("stop", 1) and message["content"].strip() == "The"
    assert not model.forbidden


def test_a_call_or_a_document(model: Model) -> None:
    fields = {"tools": [WEATHER], "response_format": FORMAT}
    message, end = model.said(BONN, **fields)
    assert (len(arguments(message)), end) == (1, "tool_calls")
    message, end = model.said('<think>text it is</think>\n\n{"city": "Bonn"}', **fields)
    assert (json.loads(message["content"]), end) == ({"city": "Bonn"}, "stop")
    assert not model.forbidden


# --- thinking -----------------------------------------------------------------------------------------------------
def test_a_document_behind_thinking(model: Model) -> None:
    answer = model.ask('<think>{"not": 1}</think>\n\n{"city": "Bonn"}', response_format=FORMAT)
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ('{"not": 1}', '{"city": "Bonn"}')
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5
    assert not model.forbidden


def test_a_document_without_thinking(model: Model) -> None:
    message, _ = model.said('{"city": "Bonn"}', response_format=FORMAT, reasoning_effort="none")
    assert message["content"] == '{"city": "Bonn"}' and "reasoning" not in message and not model.forbidden


def test_what_is_asked_for_is_all_of_the_content(model: Model) -> None:
    """The grammar has room for white space behind thinking, which this model skips."""
    for thinks in ({"reasoning_effort": "none"}, {}):
        message, _ = model.said("\n\nyes", structured_outputs={"choice": ["yes", "no"]}, **thinks)
        assert message["content"] == "yes" and not model.forbidden


def test_calls_behind_thinking(model: Model) -> None:
    for choice in ("auto", "required"):
        message, end = model.said(f"<think>hm</think>\n\n{BONN}", tools=[WEATHER], tool_choice=choice)
        assert (message["reasoning"], len(arguments(message)), end) == ("hm", 1, "tool_calls")
        assert message["content"] is None
    assert not model.forbidden


@pytest.mark.parametrize("budget", [0, 10])
def test_a_budget_ends_the_thinking(model: Model, budget: int) -> None:
    """The model goes on where it was held up; its own end of thinking is text by then."""
    answer = model.ask("<think>" + "round and " * 20 + "</think>So.", thinking_token_budget=budget)
    message = answer["choices"][0]["message"]
    assert message["reasoning"].endswith("answer.") and "round" in message["content"]
    assert message["reasoning"].count("round") <= budget
    assert model.forbidden


def test_a_budget_that_is_enough_changes_nothing(model: Model) -> None:
    message, _ = model.said("<think>short</think>So.", thinking_token_budget=50)
    assert (message["reasoning"], message["content"]) == ("short", "So.") and not model.forbidden


# --- formats ------------------------------------------------------------------------------------------------------
XML = "<tool_call>\n<function=weather>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
OBJECT = '{{"name": "weather", "{}": {{"city": "{}"}}}}'
# Name -> one call, and two of them.
USUAL = ("hermes", "qwen_xml", "mistral")
FORMATS = {
    "hermes": (BONN, f"{BONN}\n{call(city='Rome')}"),
    "qwen_xml": (XML.format("Bonn"), f"{XML.format('Bonn')}\n{XML.format('Rome')}"),
    "llama_json": (OBJECT.format("parameters", "Bonn"), ""),
    "pythonic": ('[weather(city="Bonn")]', '[weather(city="Bonn"), weather(city="Rome")]'),
    "mistral": (
        f"[TOOL_CALLS][{OBJECT.format('arguments', 'Bonn')}]",
        f"[TOOL_CALLS][{OBJECT.format('arguments', 'Bonn')}, {OBJECT.format('arguments', 'Rome')}]",
    ),
}


@cases("name", USUAL, exhaustive=[name for name in FORMATS if name not in USUAL])
def test_every_format_from_request_to_answer(name: str) -> None:
    one, two = FORMATS[name]
    with ScriptedServer(tool_caller(), script, ServerConfig(tool_call_parser=name)) as server:
        model = Model(server)
        for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
            message, end = model.said(one, tools=[WEATHER, CLOCK], tool_choice=choice)
            assert (arguments(message), end) == ([("weather", {"city": "Bonn"})], "tool_calls")
            assert message["content"] is None
        for choice in ("auto", "required") if two else ():
            message, end = model.said(two, tools=[WEATHER, CLOCK], tool_choice=choice)
            assert [city for _, city in arguments(message)] == [{"city": "Bonn"}, {"city": "Rome"}]
            ids = [entry["id"] for entry in message["tool_calls"]]
            assert len(set(ids)) == 2 and all(len(id) == (9 if name == "mistral" else 29) for id in ids)
        message, end = model.said(one + " and so on", tools=[WEATHER], parallel_tool_calls=False)
        assert (len(arguments(message)), end, message["content"]) == (1, "tool_calls", None)
        assert not model.forbidden
        message, end = model.said("It is {sunny} [1], I think.", tools=[WEATHER])
        assert (message, end) == ({"role": "assistant", "content": "It is {sunny} [1], I think."}, "stop")
        assert not model.forbidden
