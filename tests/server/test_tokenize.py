"""/tokenize and /detokenize."""

from typing import Any

import pytest

from tests.server.live import LiveServer


def test_a_prompt(server: LiveServer) -> None:
    ids = server.tokenizer.encode("hello world")
    answer = server.post("/tokenize", {"prompt": "hello world", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 64,
        "tokens": ids,
        "token_strs": ["<|endoftext|>", "hello", " world"],
    }
    bare = server.post("/tokenize", {"prompt": "hello world", "add_special_tokens": False, "model": "fake"}).json()
    assert (bare["tokens"], bare["token_strs"]) == (ids[1:], None)


def test_messages(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = server.post("/tokenize", {"messages": messages}).json()
    server.post("/v1/chat/completions", {"messages": messages})
    assert answer["tokens"] == server.engine.requests[0].prompt_ids
    shorter = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["tokens"] == answer["tokens"][:-1]


def test_back_to_text(server: LiveServer) -> None:
    ids = server.tokenizer.encode("größer 日本")
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": "<|endoftext|>größer 日本"}
    assert server.post("/detokenize", {"tokens": [], "foo": 1}).json() == {"prompt": "", "warnings": ["foo"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}), ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"prompt": ["x"]}), ("/tokenize", {"messages": []}), ("/tokenize", {"prompt": "x", "tools": []}),
        ("/detokenize", {}), ("/detokenize", {"tokens": [400]}), ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)  # fmt: skip
def test_refusals(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
