"""Parsed outputs in chat streams and whole answers, which must agree."""

import json
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from roseinfer.core.outputs import End, FinishReason, FirstToken, RequestTimes, SequenceOutput
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.api import SequenceChunk
from roseinfer.engine.output import ParsedSequenceText, merge
from roseinfer.server.formats import chat_events
from roseinfer.server.formats.chat import ChatFormat, plain_messages
from roseinfer.server.formats.schemas import ChatMessage
from roseinfer.server.request.job import Job, StreamChoices, Usage
from roseinfer.text.output import Text, TextBreak
from tests.helpers.parsers import BracketParser
from tests.helpers.tokenizers import EOS_ID, byte_tokenizer
from tests.server.live import events as events_of

TOKENIZER = byte_tokenizer()
TIMES = RequestTimes(1.0, 2.0, 3.0, 9.0)
USAGE = Usage(3, 9, 0, 4)


def chunks(said: str, end: FinishReason = FinishReason.STOP, **params: Any) -> list[SequenceChunk]:
    """A token each; the last one is EOS if it ends with `stop`."""
    tokens = [*said.encode()] + ([EOS_ID] if end is FinishReason.STOP else [])
    text, found = ParsedSequenceText(0, SequenceParams(**params), TOKENIZER, BracketParser()), []
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        ended = End(end, TIMES, stop_token=EOS_ID if token == EOS_ID else None) if last else None
        started = FirstToken(0, 1.0, 2.0, 3.0) if i == 0 else None
        chunk = text.take(SequenceOutput("a:0", (token,), None, None, started, ended), 5.0)
        assert chunk is not None
        found.append(chunk)
        if text.ended:
            break
    return found


def job_of(stream: StreamChoices | None = None, **fields: Any) -> Job:
    prompt = Prompt(ids=[1, 2, 3], params=SequenceParams())
    head = {
        "api": "chat",
        "id": "chatcmpl-1",
        "request_id": "1",
        "model": "m",
        "created": 1,
        "arrival_s": 0.0,
    }
    return Job(**head, prompts=(prompt,), parser=BracketParser, stream=stream, **fields)


def streamed(given: list[SequenceChunk], **fields: Any) -> list[dict[str, Any]]:
    """The first choice of every event but the last two (usage, [DONE])."""
    encoder = ChatFormat().events(job_of(StreamChoices(), **fields), TOKENIZER, lambda: USAGE)
    sent = b""
    for chunk in given:
        plain = encoder.plain(0, chunk)
        if plain is None and encoder.add(0, chunk):
            plain = encoder.encode(encoder.take())
        sent += plain or b""
    *found, done = events_of((sent + encoder.tail(USAGE)).decode())
    assert done == "[DONE]"
    return found


def whole(given: list[SequenceChunk], **fields: Any) -> dict[str, Any]:
    body = ChatFormat().whole(job_of(**fields), TOKENIZER)
    for chunk in given:
        body.add(0, chunk)
    return json.loads(json.dumps(body.body(USAGE)))


def deltas(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in found]


def folded(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Assemble a stream as openai's client does."""
    state = ChatCompletionStreamState()
    for event in found:
        state.handle_chunk(ChatCompletionChunk.model_validate(event))
    choice = state.current_completion_snapshot.model_dump()["choices"][0]
    message = choice["message"]
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message["tool_calls"] or ()
    ]
    return {
        "content": message["content"] or None,
        "reasoning": message.get("reasoning"),
        "reasoning_content": message.get("reasoning_content"),
        "calls": calls,
        "finish": choice["finish_reason"],
    }


def of_whole(answer: dict[str, Any]) -> dict[str, Any]:
    choice = ChatCompletion.model_validate(answer).model_dump()["choices"][0]
    message = answer["choices"][0]["message"]
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
    return {
        "content": message["content"] or None,
        "reasoning": message.get("reasoning"),
        "reasoning_content": message.get("reasoning_content"),
        "calls": calls,
        "finish": choice["finish_reason"],
    }


def test_the_deltas_of_reasoning_text_and_calls() -> None:
    found = streamed(chunks("(o)T[f|{}]"))
    named = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas(found) == [
        {"role": "assistant", "content": ""},
        {},
        {"reasoning_content": "o", "reasoning": "o"},
        {},
        {"content": "T"},
        {},
        {},
        {"tool_calls": [named]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
        {},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in found] == [None] * 11 + ["tool_calls"]


def test_the_message_of_a_whole_answer() -> None:
    answer = whole(chunks("(why)[f|{}][g|1]"))
    function = [{"name": "f", "arguments": "{}"}, {"name": "g", "arguments": "1"}]
    calls = [{"id": f"call_{i}", "type": "function", "function": function[i]} for i in (0, 1)]
    choice = answer["choices"][0]
    reasoning = {"reasoning_content": "why", "reasoning": "why"}
    assert choice["message"] == {"role": "assistant", "content": None, **reasoning, "tool_calls": calls}
    assert choice["finish_reason"] == "tool_calls"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_no_calls_no_key() -> None:
    message = whole(chunks("plain"))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "plain"}


@pytest.mark.parametrize("said", ["", "(why)"])
def test_an_answer_without_calls_has_a_text_that_a_later_request_may_contain(said: str) -> None:
    """A message of the assistant without calls needs its content, which the answer must therefore have."""
    message = whole(chunks(said))["choices"][0]["message"]
    assert message["content"] == ""
    plain, _ = plain_messages([ChatMessage.model_validate({"role": "assistant", "content": message["content"]})])
    assert plain == [{"role": "assistant", "content": ""}]


@pytest.mark.parametrize(
    ("said", "end", "stop", "finish"),
    [
        ("[f|{}]", FinishReason.STOP, (), "tool_calls"),
        ("T[f|{}]", FinishReason.STOP, (), "tool_calls"),
        ("[f|{}]", FinishReason.LENGTH, (), "length"),
        ("[f|{}][g|1", FinishReason.LENGTH, (), "length"),
        ("[f|{", FinishReason.STOP, (), "stop"),  # cut: there is nothing to answer
        ("[f|{}] then END", FinishReason.STOP, ("END",), "stop"),
        ("T", FinishReason.STOP, (), "stop"),
        ("(thinking", FinishReason.LENGTH, (), "length"),
    ],
)
def test_how_it_ends_and_that_both_ways_say_the_same(
    said: str, end: FinishReason, stop: tuple[str, ...], finish: str
) -> None:
    given = chunks(said, end, stop=stop)
    answer = of_whole(whole(given))
    assert answer["finish"] == finish
    assert folded(streamed(given)) == answer


@pytest.mark.parametrize("together", [2, 3, 100])
def test_a_slow_reader_is_told_the_same_in_fewer_events(together: int) -> None:
    given = chunks("(a)b[f|{}][g|12]c[h|]")
    expected = of_whole(whole(given))
    slow = []
    for i in range(0, len(given), together):
        chunk, *more = chunks("(a)b[f|{}][g|12]c[h|]")[i : i + together]
        for later in more:
            chunk = merge(chunk, later)
        slow.append(chunk)
    found = streamed(slow)
    assert folded(found) == expected
    assert len(found) < len(streamed(given)) or together == 1


def test_token_ids_are_there_while_text_is_held_back() -> None:
    found = streamed(chunks("[f|{}]"), return_token_ids=True)
    ids = [token for event in found for token in event["choices"][0].get("token_ids", ())]
    assert ids == [*b"[f|{}]", EOS_ID]


def test_texts_that_are_messages_of_their_own_become_paragraphs() -> None:
    said = [Text("a"), TextBreak(), Text("b")]
    parts = [json.loads(chat_events.delta(events))["content"] for events in ([said[0]], said[1:2], said[1:], said)]
    assert parts == ["a", "\n\n", "\n\nb", "a\n\nb"]
    assert chat_events.message(said)["content"] == "a\n\nb"
