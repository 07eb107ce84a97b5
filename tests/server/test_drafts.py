"""Answers of a server whose engine verifies drafts: those of one that does not, field by field."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from roseinfer.core.outputs import DraftStats
from tests.server.live import events
from tests.server.scripted_server import ScriptedServer
from tests.text.tokenizers import tool_caller

TEXT = "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — \N{GRINNING FACE} und noch einmal quer."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
THOUGHT = f"<think>\nThe user wants the weather.\n</think>\n\nLet me see. {CALL}\nThat is all."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def script(prompt: str) -> str:
    return THOUGHT if "weather" in prompt else TEXT


@pytest.fixture(scope="module")
def plain() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(thinks=True), script) as server:
        yield server


@pytest.fixture(scope="module")
def drafting() -> Iterator[ScriptedServer]:
    with ScriptedServer(tool_caller(thinks=True), script, wrong_every=4) as server:
        yield server


def drafts(server: ScriptedServer) -> DraftStats:
    found = {stats.proposer: stats for stats in server.call(server.engine.stats).drafts}
    assert found.keys() <= {"script", "forced"}
    return found.get("script", DraftStats("script", 0, (), ()))


COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
# Ends of the text that lie anywhere in a row of drafts.
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 7},
    {"stop": ["ßen S", "no such text"]},
    {"stop": ["\N{GRINNING FACE} u"], "include_stop_str_in_output": True, "logprobs": 0},
    {"stop": ["quer"], "min_tokens": 60, "logprobs": 0},
    {"stop": ["e"], "n": 2, "return_token_ids": True},
    {"n": 2, "logprobs": 1, "max_tokens": 33},
    {"logprobs": 1, "echo": True, "max_tokens": 30, "stop": ["ü"]},
    {"prompt": ["one", "two"], "stop": ["Deich"], "return_token_ids": True},
    {"ignore_eos": True, "max_tokens": 150, "skip_special_tokens": False, "logprobs": 0},
]
CHATS: list[dict[str, Any]] = [
    {},
    {"logprobs": True, "top_logprobs": 2, "stop": ["is a"]},
    {"max_tokens": 20},
    {"n": 2, "return_token_ids": True},
    {"tools": [WEATHER]},
    {"tools": [WEATHER], "n": 2, "logprobs": True},
    {"tools": [WEATHER], "tool_choice": "required"},
]
# Ids, times, and numbers of events.
DIFFER = ("id", "created", "created_at", "completed_at", "sequence_number", "slo")


def whole(server: ScriptedServer, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return without_ids(answer.json())


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(each) for name, each in value.items() if name not in DIFFER}
    return [without_ids(each) for each in value] if isinstance(value, list) else value


def streamed(server: ScriptedServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what the chunks of each choice add up to, with the usage."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, done = events(server.post(path, body | {"stream": True, "stream_options": options}).text)
    assert done == "[DONE]"
    found: dict[int, Any] = {}
    counted = 0
    for chunk in chunks:
        assert chunk["usage"]["completion_tokens"] >= counted
        counted = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            index = choice.pop("index")
            found[index] = added(found.get(index), without_ids(choice))
    return {"choices": found, "usage": chunks[-1]["usage"]}


def added(before: Any, now: Any) -> Any:
    """Join parts of a choice: text, lists and members; of anything else the newest."""
    if before is None or now is None:
        return before if now is None else now
    if isinstance(now, str) and isinstance(before, str):
        return before + now
    if isinstance(now, list):
        if now and isinstance(now[0], dict) and "index" in now[0]:  # tool calls
            calls = {each["index"]: each for each in before}
            for each in now:
                calls[each["index"]] = added(calls.get(each["index"]), {**each, "index": None})
                calls[each["index"]]["index"] = each["index"]
            return list(calls.values())
        return before + now
    if isinstance(now, dict):
        return {name: added(before.get(name), now.get(name)) for name in before | now}
    return now


def test_answers_in_blocks_are_those_without_drafts(plain: ScriptedServer, drafting: ScriptedServer) -> None:
    """Responses and Messages: whole, and what their deltas add up to."""
    messages = {"messages": [QUESTION], "max_tokens": 200}
    responses = {"input": "How is the weather?", "max_output_tokens": 200}
    for path, body, delta in (
        ("/v1/messages", messages | {"stop_sequences": ["is all"]}, "content_block_delta"),
        ("/v1/messages", messages | {"max_tokens": 25}, "content_block_delta"),
        ("/v1/responses", responses, "response.output_text.delta"),
        ("/v1/responses", responses | {"max_output_tokens": 90}, "response.output_text.delta"),
    ):
        assert whole(drafting, path, body) == whole(plain, path, body)
        with_drafts, without = (blocks(server, path, body, delta) for server in (drafting, plain))
        assert with_drafts == without and with_drafts[0]


def blocks(server: ScriptedServer, path: str, body: dict[str, Any], delta: str) -> tuple[dict[str, str], Any]:
    """Return the joined deltas by block and kind, and the last event."""
    found: dict[str, str] = {}
    text = server.post(path, body | {"stream": True}).text
    read = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
    for event in read:
        if event["type"] == delta:
            parts = event["delta"] if isinstance(event["delta"], dict) else {"text": event["delta"]}
            for kind, text in parts.items():
                key = f"{event.get('index', event.get('output_index'))} {kind}"
                found[key] = text if kind == "type" else found.get(key, "") + text
    return found, without_ids(read[-1] if path == "/v1/responses" else read[-2])


QUESTION = {"role": "user", "content": "How is the weather?"}
REQUESTS = [(COMPLETION, {"prompt": "Say it.", "max_tokens": 200, "seed": 3, **fields}) for fields in COMPLETIONS]
REQUESTS += [(CHAT, {"messages": [QUESTION], "max_tokens": 200, "seed": 3, **fields}) for fields in CHATS]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda value: None if isinstance(value, str) else short(value))
def test_answers_are_those_without_drafts(
    plain: ScriptedServer, drafting: ScriptedServer, path: str, body: dict[str, Any]
) -> None:
    expected, before = whole(plain, path, body), drafts(drafting)
    assert whole(drafting, path, body) == expected
    assert drafts(drafting).steps > before.steps, "an answer without drafts shows nothing"
    with_drafts = streamed(drafting, path, body)
    assert with_drafts == streamed(plain, path, body)
    assert with_drafts["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


def short(body: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in body.items() if name not in ("prompt", "messages", "seed")})[:60]


def test_drafts_are_counted_in_metrics_and_for_their_request(drafting: ScriptedServer) -> None:
    before = drafts(drafting)
    answer = drafting.post(COMPLETION, {"prompt": "Count.", "max_tokens": 60}).json()
    drafting.until(lambda: drafting.engine.stats().running == 0)
    now = drafts(drafting)
    record = drafting.get(f"/v1/requests/{answer['id']}").json()
    counted = record["why"]["drafts"]["script"]
    assert counted["drafted"] == sum(now.drafted) - sum(before.drafted) > 0
    assert counted["accepted"] == sum(now.accepted) - sum(before.accepted) > 0
    by = {"proposer": "script"}
    assert drafting.metric("roseinfer:spec_steps_total", **by) == now.steps
    for name, counts in (("drafted", now.drafted), ("accepted", now.accepted)):
        for position, count in enumerate(counts):
            assert drafting.metric(f"roseinfer:spec_{name}_tokens_total", position=str(position), **by) == count


def test_without_drafts_nothing_is_said_of_them(plain: ScriptedServer) -> None:
    answer = plain.post(COMPLETION, {"prompt": "Count.", "max_tokens": 20}).json()
    assert plain.get(f"/v1/requests/{answer['id']}").json()["why"]["drafts"] == {}
    assert "spec_" not in plain.get("/metrics").text
