"""/tokenize and /detokenize."""

import json
from pathlib import Path
from typing import Any

import pytest

from roseinfer.text.tokenizer import Tokenizer
from tests.server.live import LiveServer
from tests.text import tokenizers as build


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
    assert answer["tokens"] == server.engine.requests[0].prompt.ids
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
        ("/tokenize", {"prompt": ["x"]}), ("/tokenize", {"messages": []}),
        ("/tokenize", {"prompt": "x", "truncate_prompt_tokens": 3}),
        ("/detokenize", {}), ("/detokenize", {"tokens": [400]}), ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "x"}),
    ],
)  # fmt: skip
def test_refusals(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_what_the_tokenizer_is(server: LiveServer) -> None:
    answer = server.get("/tokenizer_info").json()
    tokenizer = server.tokenizer
    assert answer["chat_template"] == tokenizer.chat_template
    assert answer["tokenizer_class"] == "PreTrainedTokenizerFast"
    for name, text in tokenizer.special_tokens.items():
        assert answer[name] == text


def test_the_tokenizer_is_told_as_its_config_has_it(tmp_path: Path) -> None:
    """The answer leaves out the tokenizer's original path, and gives special tokens as texts."""
    build.byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    config = {
        "tokenizer_class": "LlamaTokenizerFast",
        "eos_token": {"content": "<|end|>", "lstrip": False},
        "bos_token": None,
        "model_max_length": 1000000000000000019884624838656,
        "chat_template": "not this",
        "name_or_path": "/home/somebody/model",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with LiveServer(Tokenizer.from_folder(tmp_path)) as server:
        assert server.get("/tokenizer_info").json() == {
            "tokenizer_class": "LlamaTokenizerFast",
            "eos_token": "<|end|>",
            "bos_token": None,
            "model_max_length": 1000000000000000019884624838656,
            "chat_template": "{{ messages }}",
        }
