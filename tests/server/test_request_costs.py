"""Limits on the cost of a request, and the thread that works on a large one."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from roseinfer.server.formats.schemas import MAX_ITEMS, MAX_OBJECTS, ChatRequest, CompletionRequest
from roseinfer.server.http import body
from roseinfer.server.http.errors import ApiError
from roseinfer.server.http.request_models import RequestModel, parse
from roseinfer.text.tokenizer import Tokenizer
from tests.server.live import LiveServer, events

Serve = Callable[..., LiveServer]
MESSAGE = {"role": "user", "content": "hello"}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [[1]] * (MAX_ITEMS + 1)}, "prompt"),
        (CompletionRequest, {"prompt": ["a"] * (MAX_ITEMS + 1)}, "prompt"),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * (MAX_ITEMS + 1)}, "stop"),
        (CompletionRequest, {"prompt": "a", "bad_words": ["a"] * (MAX_ITEMS + 1)}, "bad_words"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): "x" for i in range(MAX_ITEMS + 1)}}, "logit_bias"),
        (ChatRequest, {"messages": [MESSAGE] * (MAX_OBJECTS + 1)}, "messages"),
        (
            ChatRequest,
            {"messages": [MESSAGE | {"content": [{"type": "text", "text": "a"}] * (MAX_OBJECTS + 1)}]},
            "messages",
        ),
    ],
)
def test_lists_are_capped_while_they_are_parsed(kind: type[RequestModel], body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(kind, body)
    assert raised.value.status == 400 and raised.value.param == param
    most = MAX_OBJECTS if kind is ChatRequest else MAX_ITEMS
    assert f"at most {most} " in raised.value.message


def test_a_long_prompt_of_token_ids_is_no_long_list(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"prompt": [1] * (MAX_ITEMS + 1)})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_the_collector_rests_while_a_body_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of new lists would set off one full collection after the other."""
    seen: list[bool] = []

    def loads(data: bytes) -> Any:
        seen.append(gc.isenabled())
        raise ValueError

    monkeypatch.setattr(body.orjson, "loads", loads)
    with pytest.raises(ValueError):
        body.parse_object(b"{}")
    assert seen == [False] and gc.isenabled()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prompt": [5] * 10, "max_tokens": 10, "n": 5}, 200),
        ({"prompt": [5] * 10, "max_tokens": 11, "n": 5}, 400),
        ({"prompt": [[5] * 10] * 5, "max_tokens": 11}, 400),
        ({"prompt": [[5] * 10] * 2, "max_tokens": 20, "n": 2}, 400),
    ],
)
def test_the_tokens_of_all_samples_are_capped(serve: Serve, fields: dict[str, Any], status: int) -> None:
    server = serve(limits={"max_total_tokens": 100})
    answer = server.post("/v1/completions", fields)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "n" and "at most 100 " in answer.json()["error"]["message"]
        assert not server.engine.requests


def test_the_default_output_of_a_chat_counts_as_well(serve: Serve) -> None:
    server = serve(limits={"max_total_tokens": 200})
    assert server.post("/v1/chat/completions", {"messages": [MESSAGE], "n": 3}).status_code == 200
    assert server.post("/v1/chat/completions", {"messages": [MESSAGE], "n": 4}).status_code == 400


def test_an_absurdly_long_chat_is_not_tokenised(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "encode", lambda *args, **kwargs: pytest.fail("was tokenised"))
    parts = [{"type": "text", "text": "x" * 60_000}] * 2
    for content in ("x" * 100_000, parts):
        answer = server.post("/v1/chat/completions", {"messages": [MESSAGE | {"content": content}]})
        assert answer.status_code == 400
        found = answer.json()["error"]
        assert (found["code"], found["param"]) == ("context_length_exceeded", "messages")


def test_a_chat_beyond_the_context_names_its_messages(server: LiveServer) -> None:
    answer = server.post("/v1/chat/completions", {"messages": [MESSAGE | {"content": "hello " * 100}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "messages"


def test_logprobs_of_an_echoed_prompt_are_rendered_off_the_event_loop(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    real = Tokenizer.token_str

    def token_str(self: Tokenizer, id: int) -> str:
        threads.add(threading.current_thread().name.rpartition("_")[0] or "the loop's")
        return real(self, id)

    monkeypatch.setattr(Tokenizer, "token_str", token_str)
    body = {"prompt": [5] * 20, "max_tokens": 1, "echo": True, "logprobs": 2, "stream": True}
    streamed = events(server.post("/v1/completions", body).text)
    assert len(streamed[0]["choices"][0]["logprobs"]["tokens"]) == 21
    assert threads == {"roseinfer-text"}


def test_text_offsets_count_special_tokens_that_are_shown(server: LiveServer) -> None:
    """The first token of the reply, `<|end|>`, is part of the text only if it is not skipped."""
    server.engine.reply = "<|end|>hello"
    for skip, offsets in ((True, [0, 0]), (False, [0, 7])):
        body = {"prompt": "x", "logprobs": 0, "skip_special_tokens": skip}
        [choice] = server.post("/v1/completions", body).json()["choices"]
        assert choice["logprobs"]["text_offset"] == offsets
