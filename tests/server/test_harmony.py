"""Harmony through server and engine, with a model that says what a script has for it; see `test_tools_and_thinking`."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from roseinfer.core.config.server import ServerConfig
from tests.server.live import events
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import harmony

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
NEXT = "<|end|><|start|>assistant"
THINKS = f"<|channel|>analysis<|message|>Rain?{NEXT}"
BONN = {"city": "Bonn"}
NAMED = {"type": "function", "function": {"name": "weather"}}


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}"


def preamble(text: str) -> str:
    return f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"


def call(name: str = "weather", early: bool = False, **arguments: Any) -> str:
    to = f" to=functions.{name}"
    header = f"{to}<|channel|>commentary json" if early else f"<|channel|>commentary{to} <|constrain|>json"
    return f"{header}<|message|>{json.dumps(arguments)}<|call|>"


ANSWERS: dict[str, str] = {}
PROMPTS: list[str] = []


def script(prompt: str) -> str:
    PROMPTS.append(prompt)
    return ANSWERS[prompt.rsplit("<|start|>user<|message|>", 1)[1].split("<|end|>")[0]]


class Model:
    """Model that answers the next question with `says`."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server

    def ask(self, says: str, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.question(says)}]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 300} | fields)

    def said(self, says: str, **fields: Any) -> tuple[dict[str, Any], str]:
        """Return the message, and why it ended."""
        choice = self.ask(says, **fields)["choices"][0]
        return choice["message"], choice["finish_reason"]

    def question(self, says: str) -> str:
        text = f"question {len(ANSWERS)}"
        ANSWERS[text] = says
        return text

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.server.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def forbidden(self) -> list[str]:
        found, self.server.runner.forbidden = self.server.runner.forbidden, []
        return found


@pytest.fixture(scope="module", params=[None, 3], ids=["plain", "drafts"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with ScriptedServer(harmony(), script, wrong_every=request.param) as server:
        yield Model(server)


def calls(message: dict[str, Any]) -> list[tuple[str, Any]]:
    found = [entry["function"] for entry in message.get("tool_calls", ())]
    return [(entry["name"], json.loads(entry["arguments"])) for entry in found]


# --- plain chats --------------------------------------------------------------------------------------------------
def test_reasoning_and_answer(model: Model) -> None:
    answer = model.ask(THINKS + final("It is dry."))
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"]) == ("Rain?", "Rain?")
    assert (message["content"], answer["choices"][0]["finish_reason"]) == ("It is dry.", "stop")
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5


def test_both_tokens_that_end_an_output_do(model: Model) -> None:
    """Call is none of the engine's own here."""
    for end in ("<|call|>", "<|return|>"):
        message, reason = model.said(final("Dry.") + end + NEXT + final("No, it rains."))
        assert (message["content"], reason) == ("Dry.", "stop")


def test_max_tokens_within_the_analysis(model: Model) -> None:
    tokens = len(model.server.tokenizer.encode("<|channel|>analysis<|message|>Ra"))
    message, end = model.said(THINKS + final("Dry."), max_tokens=tokens)
    assert (message["reasoning"], message["content"], end) == ("Ra", "", "length")


def test_stop_strings_count_in_answers_only(model: Model) -> None:
    message, end = model.said(THINKS + final("Dry? No, Rain? yes."), stop=["Rain?"])
    assert (message["reasoning"], message["content"], end) == ("Rain?", "Dry? No, ", "stop")
    message, end = model.said(call(city="Bonn"), tools=[WEATHER], stop=["Bonn"])
    assert (calls(message), end) == ([("weather", BONN)], "tool_calls")


def test_a_stream_says_the_same(model: Model) -> None:
    body = {
        "messages": [{"role": "user", "content": model.question(THINKS + preamble("I look.") + call(city="Bonn"))}],
        "tools": [WEATHER],
        "stream": True,
    }
    said: dict[str, str] = {"reasoning": "", "content": "", "arguments": ""}
    for event in events(model.server.post("/v1/chat/completions", body).text)[:-1]:
        delta = event["choices"][0]["delta"]
        for name in ("reasoning", "content"):
            said[name] += delta.get(name) or ""
        for entry in delta.get("tool_calls", ()):
            said["arguments"] += entry["function"]["arguments"]
    assert said == {"reasoning": "Rain?", "content": "I look.", "arguments": '{"city": "Bonn"}'}


@pytest.mark.parametrize(
    ("effort", "written", "warns"),
    [("low", "low", False), ("high", "high", False), (None, "medium", False), ("max", "high", True)],
)
def test_reasoning_effort_goes_to_the_template(model: Model, effort: str | None, written: str, warns: bool) -> None:
    answer = model.ask(THINKS + final("Dry."), **({} if effort is None else {"reasoning_effort": effort}))
    assert f"Reasoning: {written}<|end|>" in PROMPTS[-1]
    assert ("warnings" in answer) is warns


def test_no_reasoning_at_all(model: Model) -> None:
    message, _ = model.said(final("Dry."), reasoning_effort="none")
    assert message == {"role": "assistant", "content": "Dry."} and not model.forbidden
    model.said(THINKS + final("Dry."), reasoning_effort="none", max_tokens=9)
    assert model.forbidden


# --- tools --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_calls_after_reasoning(model: Model, early: bool, choice: Any) -> None:
    message, end = model.said(THINKS + call(early=early, city="Bonn"), tools=[WEATHER, CLOCK], tool_choice=choice)
    assert (calls(message), message["reasoning"], message["content"], end) == (
        [("weather", BONN)],
        "Rain?",
        None,
        "tool_calls",
    )
    assert not model.forbidden


def test_a_preamble_before_a_call(model: Model) -> None:
    message, end = model.said(THINKS + preamble("I look.") + call("clock"), tools=[WEATHER, CLOCK])
    assert (calls(message), message["content"], end) == ([("clock", {})], "I look.", "tool_calls")
    assert not model.forbidden


def test_an_answer_beside_tools(model: Model) -> None:
    message, end = model.said(THINKS + final("I know: it is to=functions.weather dry."), tools=[STRICT])
    assert (message["content"], end) == ("I know: it is to=functions.weather dry.", "stop") and not model.forbidden


def test_the_schema_is_enforced_for_strict_tools_and_in_calls_only(model: Model) -> None:
    thinks = THINKS.replace("Rain?", 'to=functions.weather {"town": 1}')
    message, _ = model.said(thinks + call(town=1), tools=[WEATHER])
    assert calls(message) == [("weather", {"town": 1})] and not model.forbidden
    model.said(thinks + call(town=1), tools=[STRICT], max_tokens=150)
    (place,) = {entry.partition(" behind ")[0] for entry in model.forbidden[:1]}
    assert "t" in place
    message, _ = model.said(thinks + call("other", town=1), tools=[STRICT])
    assert calls(message) == [("other", {"town": 1})] and not model.forbidden


def test_only_allowed_tools_may_be_called(model: Model) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message, _ = model.said(call("clock"), tools=[WEATHER, CLOCK], tool_choice=choice)
    assert calls(message) == [("clock", {})] and not model.forbidden
    model.said(call(city="Bonn"), tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=40)
    assert model.forbidden


def test_a_call_that_must_be(model: Model) -> None:
    message, _ = model.said(THINKS + final("I would rather not."), tools=[CLOCK], tool_choice="required")
    assert model.forbidden and [name for name, _ in calls(message)] in ([], ["clock"])
    assert message["reasoning"] == "Rain?"


def test_the_output_does_not_end_before_the_call(model: Model) -> None:
    model.said("<|channel|>analysis<|message|>Rain?", tools=[CLOCK], tool_choice="required", max_tokens=40)
    assert "<|return|>" in model.forbidden[0]


def test_a_call_that_must_not_be(model: Model) -> None:
    message, _ = model.said(call(city="Bonn"), tools=[WEATHER], tool_choice="none", max_tokens=40)
    assert "tool_calls" not in message and model.forbidden


# --- formats ------------------------------------------------------------------------------------------------------
def test_a_document_after_reasoning(model: Model) -> None:
    thinks = THINKS.replace("Rain?", '{"not": 1} <|channel')
    message, end = model.said(thinks + final(json.dumps(BONN)), response_format=FORMAT)
    assert (message["content"], end) == ('{"city": "Bonn"}', "stop") and not model.forbidden
    typed = final(json.dumps(BONN)).replace("final", "final <|constrain|>json")
    message, _ = model.said(THINKS + typed, response_format=FORMAT)
    assert message["content"] == '{"city": "Bonn"}' and not model.forbidden
    model.said(THINKS + final('{"town"'), response_format=FORMAT, max_tokens=60)
    assert model.forbidden


def test_preambles_and_other_channels_are_no_document(model: Model) -> None:
    for says in (preamble("So:"), "<|channel|>musings<|message|>So:<|end|><|start|>assistant"):
        model.said(says + final('{"city": "Bonn"}'), response_format=FORMAT, max_tokens=60)
        assert model.forbidden


@pytest.mark.parametrize("outputs", [{"choice": ["yes", "no"]}, {"regex": "(yes|no)"}, {"grammar": 'start: "yes"'}])
def test_other_constraints_apply_to_the_answer(model: Model, outputs: dict[str, Any]) -> None:
    message, end = model.said(THINKS + final("yes"), structured_outputs=outputs)
    assert (message["content"], message["reasoning"], end) == ("yes", "Rain?", "stop") and not model.forbidden


def test_a_call_or_a_document(model: Model) -> None:
    fields = {"tools": [WEATHER], "response_format": FORMAT}
    message, end = model.said(THINKS + call(city="Bonn"), **fields)
    assert (calls(message), end) == ([("weather", BONN)], "tool_calls")
    message, end = model.said(THINKS + final('{"city": "Bonn"}'), **fields)
    assert (message["content"], end) == ('{"city": "Bonn"}', "stop") and not model.forbidden


# --- budgets ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [0, 10])
def test_a_budget_ends_the_reasoning(model: Model, budget: int) -> None:
    long = "<|channel|>analysis<|message|>" + "round and " * 20 + "<|end|><|start|>assistant" + final("So.")
    message, _ = model.said(long, thinking_token_budget=budget)
    assert model.forbidden
    if budget:
        assert message["reasoning"].endswith("answer.\n") and message["reasoning"].count("round") <= budget
    else:
        assert "reasoning" not in message


def test_a_budget_that_is_enough_changes_nothing(model: Model) -> None:
    for fields in ({}, {"tools": [WEATHER]}, {"response_format": FORMAT}):
        message, _ = model.said(THINKS + final('{"city": "Bonn"}'), thinking_token_budget=50, **fields)
        assert (message["reasoning"], message["content"]) == ("Rain?", '{"city": "Bonn"}') and not model.forbidden


# --- history ------------------------------------------------------------------------------------------------------
SPENT = "<|start|>assistant<|channel|>analysis<|message|>Rain?<|end|>"
CALLED = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Bonn"}<|call|>'
RESULT = '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"dry"<|end|>'


def chat_history(question: str) -> tuple[str, dict[str, Any]]:
    function = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    called = [{"id": "c", "type": "function", "function": function}]
    said = {"role": "assistant", "content": None, "reasoning": "Rain?", "tool_calls": called}
    result = {"role": "tool", "tool_call_id": "c", "content": "dry"}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": question}, said, result]}


def responses_history(question: str) -> tuple[str, dict[str, Any]]:
    items = [
        {"role": "user", "content": question},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Rain?"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": '{"city": "Bonn"}'},
        {"type": "function_call_output", "call_id": "c", "output": "dry"},
    ]
    return "/v1/responses", {"input": items}


def messages_history(question: str) -> tuple[str, dict[str, Any]]:
    said = [
        {"type": "thinking", "thinking": "Rain?", "signature": ""},
        {"type": "tool_use", "id": "c", "name": "weather", "input": BONN},
    ]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": "dry"}]
    told = [{"role": "user", "content": question}, {"role": "assistant", "content": said}]
    return "/v1/messages", {"messages": [*told, {"role": "user", "content": result}], "max_tokens": 90}


@pytest.mark.parametrize("history", [chat_history, responses_history, messages_history])
def test_reasoning_between_calls_reaches_the_prompt(
    model: Model, history: Callable[[str], tuple[str, dict[str, Any]]]
) -> None:
    path, body = history(model.question(final("It is dry.")))
    model.post(path, body)
    assert PROMPTS[-1].endswith(f"<|end|>{SPENT}{CALLED}{RESULT}<|start|>assistant")


# --- other APIs ---------------------------------------------------------------------------------------------------
SAYS = THINKS + preamble("I look.") + call(city="Bonn")


def test_responses_have_an_item_for_each_message(model: Model) -> None:
    tool = {"type": "function", **WEATHER["function"]}
    answer = model.post("/v1/responses", {"input": model.question(SAYS), "tools": [tool]})
    reasoning, message, called = answer["output"]
    assert [part["text"] for part in reasoning["content"]] == ["Rain?"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "I look.")
    assert (called["name"], json.loads(called["arguments"]), called["status"]) == ("weather", BONN, "completed")
    says = preamble("One.") + final("Two.")
    answer = model.post("/v1/responses", {"input": model.question(says), "reasoning": {"effort": "high"}})
    assert [item["content"][0]["text"] for item in answer["output"]] == ["One.", "Two."]
    assert "Reasoning: high" in PROMPTS[-1]
    assert model.said(says)[0]["content"] == "One.\n\nTwo."
    answer = model.post("/v1/responses", {"input": model.question(THINKS + preamble("One.") + THINKS + final("Two."))})
    items = [(item["type"], item["content"][0]["text"]) for item in answer["output"]]
    assert items == [("reasoning", "Rain?"), ("message", "One."), ("reasoning", "Rain?"), ("message", "Two.")]


def test_messages_have_a_block_for_each_message(model: Model) -> None:
    tool = {"name": "weather", "input_schema": CITY}
    told = [{"role": "user", "content": model.question(SAYS)}]
    body = {"messages": told, "tools": [tool], "max_tokens": 200, "thinking": {"type": "enabled", "budget_tokens": 99}}
    answer = model.post("/v1/messages", body)
    thinking, text, used = answer["content"]
    assert (thinking["thinking"], text["text"], used["input"]) == ("Rain?", "I look.", BONN)
    assert answer["stop_reason"] == "tool_use" and not model.forbidden


def test_an_answer_that_the_client_began(model: Model) -> None:
    told = [{"role": "user", "content": model.question("s dry.")}, {"role": "assistant", "content": "It i"}]
    answer = model.post("/v1/messages", {"messages": told, "max_tokens": 50})
    assert [block["text"] for block in answer["content"]] == ["s dry."]


# --- options ------------------------------------------------------------------------------------------------------
def test_options_go_before_what_the_tokens_say() -> None:
    with ScriptedServer(harmony(), script, ServerConfig(reasoning=False, tool_call_parser="none")) as server:
        model = Model(server)
        assert model.said(THINKS + final("Dry."))[0] == {"role": "assistant", "content": "Rain?\n\nDry."}
        fields = {"messages": [{"role": "user", "content": "?"}], "tools": [WEATHER]}
        assert "--tool-call-parser" in server.post("/v1/chat/completions", fields).text
        model.said(THINKS + final('{"city": "Bonn"}'), response_format=FORMAT, max_tokens=50)
        assert model.forbidden
    with ScriptedServer(harmony(), script, ServerConfig(tool_call_parser="harmony")) as server:
        assert calls(Model(server).said(call("clock"), tools=[CLOCK])[0]) == [("clock", {})]
