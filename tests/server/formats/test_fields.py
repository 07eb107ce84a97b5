"""Fields that are rejected, fields that are ignored by name, and the ranges of the others."""

from typing import Any

import pytest

from tests.server.live import LiveServer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def error(server: LiveServer, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
    answer = server.post(path, BODIES[path] | fields)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code", "retryable"}
    assert not found["retryable"] and found["type"] == "invalid_request_error"
    assert not server.engine.requests
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [TOOL]), ("functions", []), ("function_call", "auto"),
        ("best_of", 2), ("best_of", "1"), ("use_beam_search", True),
        ("use_beam_search", 1), ("length_penalty", 0.5), ("early_stopping", True), ("suffix", "x"),
        ("prompt_embeds", "AAAA"), ("truncation_side", "right"), ("repetition_detection", {"max_pattern_size": 4}),
        ("return_prompt_text", True), ("include_reasoning", False),
        ("documents", [{"text": "x"}]),
        ("logprob_token_ids", [1]), ("watermarking", True), ("kv_transfer_params", {"do_remote_prefill": True}),
        ("ec_transfer_params", {"a": 1}), ("vllm_xargs", {"a": 1}), ("logits_processors", ["x"]),
        ("return_routed_experts", True), ("moderation", {"model": "x"}),
        ("regex", "a+"), ("json_schema", "{}"), ("ebnf", "x"), ("grammar", "x"), ("stop_regex", "a"),
        ("lora_path", "x"), ("custom_logit_processor", "x"), ("custom_params", {"a": 1}),
        ("return_hidden_states", True), ("typical_p", 0.5), ("guided_unheard_of", 1),
        ("chat_template", "{{ x }}"),
        ("modalities", ["audio"]), ("audio", {"voice": "x"}), ("mm_processor_kwargs", {"a": 1}),
        ("media_io_kwargs", {"a": 1}), ("web_search_options", {}),
    ],
)  # fmt: skip
def test_refused(server: LiveServer, path: str, name: str, value: Any) -> None:
    found = error(server, path, **{name: value})
    assert found["param"] == name and name in found["message"]
    assert found["code"] == "unsupported_field"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [TOOL]), ("tool_choice", "required"), ("tool_choice", {"type": "function"}),
        ("reasoning_effort", "low"), ("reasoning_effort", "none"), ("thinking_budget", 100),
        ("thinking_token_budget", 100),
    ],
)  # fmt: skip
def test_only_chats_have_tools_and_think(server: LiveServer, name: str, value: Any) -> None:
    found = error(server, **{name: value})
    assert found["param"] == name and found["code"] == "unsupported_field"


def test_guided_fields_name_their_successor(server: LiveServer) -> None:
    assert "structured_outputs" in error(server, guided_unheard_of={})["message"]


@pytest.mark.parametrize(("name", "instead"), [("functions", "use tools"), ("function_call", "use tool_choice")])
def test_deprecated_fields_of_chats_name_their_successor(server: LiveServer, name: str, instead: str) -> None:
    assert instead in error(server, "/v1/chat/completions", **{name: [{"name": "f"}]})["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}}, {"tool_choice": "none"}, {"parallel_tool_calls": True},
        {"bad_words": []}, {"suffix": ""}, {"length_penalty": 1}, {"length_penalty": 1.0}, {"early_stopping": False},
        {"truncation_side": "left"}, {"return_prompt_text": False}, {"documents": []}, {"include_reasoning": True},
        {"thinking_token_budget": -1}, {"logprob_token_ids": []}, {"watermarking": False}, {"vllm_xargs": {}},
        {"kv_transfer_params": {}}, {"verbosity": "medium"}, {"typical_p": 1.0}, {"repetition_detection": {}},
        {"allowed_token_ids": None, "truncate_prompt_tokens": None}, {"reasoning_effort": None},
        {"best_of": 1}, {"best_of": 2, "n": 2}, {"use_beam_search": False}, {"priority": 0},
        {"modalities": ["text"]}, {"mm_processor_kwargs": {}}, {"user": "me"}, {"tools": None},
        {"tools": []}, {"tool_choice": "auto"},
    ],
)  # fmt: skip
def test_asking_for_nothing_passes_without_a_warning(server: LiveServer, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": "x"} | fields)
    assert answer.status_code == 200 and "warnings" not in answer.json()


def test_unknown_fields_are_named(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "foo": 1, "bar": {"a": 2}, "baz": None})
    assert answer.json()["warnings"] == ["foo", "bar"]
    many = server.post("/v1/completions", {"prompt": "x"} | {f"field{'x' * 200}{i}": 1 for i in range(100)})
    assert len(many.json()["warnings"]) == 32 and max(map(len, many.json()["warnings"])) == 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"), ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": 2**63}, "seed"), ({"n": 0}, "n"), ({"n": 129}, "n"), ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"), ({"min_tokens": -1}, "min_tokens"),
        ({"stop": ["a"] * 65}, "stop"), ({"stop": ""}, "stop"), ({"stop": "x" * 1025}, "stop"), ({"stop": 3}, "stop"),
        ({"stop_token_ids": [400]}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {"400": 1}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"), ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"), ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": ["x" * 8193]}, "bad_words"), ({"bad_words": ["abcdefgh " * 300]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [400]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"), ({"allowed_token_ids": ["1"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
        ({"logprobs": 21}, "logprobs"), ({"logprobs": -1}, "logprobs"), ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"), ({"stream_interval": 0}, "stream_interval"),
        ({"cache_salt": ""}, "cache_salt"), ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"), ({"request_id": "x" * 129}, "request_id"),
        ({"prompt": ""}, None), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [400]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": None}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"), ({"stream": "yes"}, "stream"),
    ],
)  # fmt: skip
def test_out_of_range(server: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    if param is None:  # here the tokenizer's BOS makes even an empty text a prompt
        assert server.post("/v1/completions", fields).status_code == 200
        fields, param = fields | {"add_special_tokens": False}, "prompt"
        server.engine.requests.clear()
    assert error(server, **fields)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"), ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": "hi"}, "messages"), ({"echo": True}, "echo"),
    ],
)  # fmt: skip
def test_chat_out_of_range(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error(server, "/v1/chat/completions", **fields)["param"] == param


@pytest.mark.parametrize("asked", [30, 64, 65, 32_000])
def test_prompt_and_output_beyond_the_context_are_clamped(server: LiveServer, asked: int) -> None:
    server.engine.reply = "hello " * 64
    answer = server.post("/v1/completions", {"prompt": [5] * 60, "max_tokens": asked, "min_tokens": 20})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    params = server.engine.requests[0].prompt.params
    assert (params.max_tokens, params.min_tokens) == (4, 4)


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_prompt_beyond_the_context(server: LiveServer, length: int) -> None:
    found = error(server, prompt=[5] * length, max_tokens=1)
    assert found["code"] == "context_length_exceeded" and found["param"] == "prompt"
    assert found["message"].startswith(CONTEXT) and f"the prompt has {length} tokens" in found["message"]


# What LiteLLM (in any case of letters) and others look for in order to fall back to another model.
CONTEXT = "This model's maximum context length is 64 tokens. However, "


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "hello world " * 40}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 100_000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 64}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
    ],
)
def test_what_exceeds_the_context_is_said_in_the_words_that_clients_know(
    server: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    found = error(server, path, **fields)
    assert found["message"].startswith(CONTEXT)
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)


def test_truncated_prompts(server: LiveServer) -> None:
    """The last tokens, behind what the tokenizer itself puts before a text."""
    whole = server.tokenizer.encode("hello the world " * 40)
    for body, expected in (
        ({"prompt": "hello the world " * 40, "truncate_prompt_tokens": 5}, [[whole[0], *whole[-4:]]]),
        ({"prompt": [whole, [7]], "truncate_prompt_tokens": 5}, [whole[-5:], [7]]),
        ({"prompt": whole, "truncate_prompt_tokens": -1, "max_tokens": 10}, [whole[-54:]]),
        ({"prompt": "x" * 100_000, "truncate_prompt_tokens": 3}, None),
    ):
        server.engine.requests.clear()
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        sent = server.engine.requests
        assert answer.json()["usage"]["prompt_tokens"] == sum(len(request.prompt.ids) for request in sent)
        assert all(request.prompt.params.truncate_prompt_tokens is None for request in sent)
        if expected is not None:
            assert [request.prompt.ids for request in sent] == expected
    assert len(server.engine.requests[0].prompt.ids) == 3
    server.engine.requests.clear()
    chat = {"messages": [{"role": "user", "content": "hello " * 100}]}
    assert server.post("/v1/chat/completions", chat | {"truncate_prompt_tokens": 20}).status_code == 200
    assert server.post("/v1/chat/completions", chat | {"truncate_prompt_tokens": -1}).status_code == 200
    cut, fitted = server.engine.requests
    assert len(cut.prompt.ids) == 20 and cut.prompt.ids == fitted.prompt.ids[-20:]
    assert (len(fitted.prompt.ids), fitted.prompt.params.max_tokens) == (63, 1)


def test_an_echoed_prompt_is_the_truncated_one(server: LiveServer) -> None:
    body = {"prompt": "hello the world " * 40, "truncate_prompt_tokens": 4, "echo": True, "max_tokens": 1}
    text = server.post("/v1/completions", body | {"logprobs": 0}).json()["choices"][0]["text"]
    (request,) = server.engine.requests
    assert text.startswith(server.tokenizer.decode(request.prompt.ids)) and len(text) < 40


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_restricts_the_vocabulary_reaches_the_engine(server: LiveServer, path: str) -> None:
    body = BODIES[path] | {"bad_words": ["world", "x"], "allowed_token_ids": [3, 399], "n": 2}
    assert server.post(path, body).status_code == 200
    (request,) = server.engine.requests
    assert request.prompt.params.allowed_token_ids == (3, 399)
    spellings = [*server.tokenizer.spellings("world"), *server.tokenizer.spellings("x")]
    assert request.prompt.params.bad_token_ids == tuple(spellings) and request.prompt.params.bad_words == ()
    assert request.n == 2


def test_a_full_context_can_be_scored(server: LiveServer) -> None:
    body = {"prompt": [5] * 64, "max_tokens": 0, "echo": True, "logprobs": 0}
    assert server.post("/v1/completions", body).status_code == 200
    assert server.post("/v1/completions", body | {"prompt": [5] * 65}).status_code == 400


def test_absurdly_long_text_is_not_tokenised(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.tokenizer, "encode", lambda *args, **kwargs: pytest.fail("was tokenised"))
    assert error(server, prompt="x" * 100_000)["code"] == "context_length_exceeded"


def test_the_models_own_defaults_come_first(server: LiveServer) -> None:
    backend = server.service.backend
    defaults = backend.info.facts.default_sampling
    defaults.update(temperature=0.6, top_k=20, top_p=0.95)
    try:
        server.post("/v1/completions", {"prompt": "x", "top_k": -1})
    finally:
        defaults.clear()
    params = server.engine.requests[0].prompt.params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 0, 0.95)


def test_chat_echoes_nothing_when_told_not_to(server: LiveServer) -> None:
    answer = server.post("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"echo": False})
    assert answer.status_code == 200 and "warnings" not in answer.json()


def test_unknown_model(server: LiveServer) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        answer = server.post(path, body | {"model": "nope"})
        assert answer.status_code == 404
        assert answer.json()["error"] == {
            "message": "The model 'nope' does not exist; available: 'fake'",
            "type": "not_found_error",
            "param": "model",
            "code": "model_not_found",
            "retryable": False,
        }


def test_error_text_is_bounded(server: LiveServer) -> None:
    huge = {"stop": ["x"] * 3, "n": "y" * 10_000} | {"logit_bias": {f"k{i}": "z" * 1000 for i in range(1000)}}
    answer = server.post("/v1/completions", {"prompt": "x"} | huge)
    assert answer.status_code == 400 and len(answer.content) < 4000
    assert "yyy" not in answer.text and "zzz" not in answer.text


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "; did you mean /v1/chat/completions?"),
        ("/v1/v1/completions", "; did you mean /v1/completions?"),
        ("/v1/completions/", "; did you mean /v1/completions?"),
        ("/v1//completions", "; did you mean /v1/completions?"),
        ("/v1/health", "; did you mean /health?"),
        ("/api/chat", "; did you mean /v1/chat/completions?"),
        ("/api/tags", "; did you mean /v1/models?"),
        ("/v1/images", ""),
        ("/" + "x" * 9999, ""),
    ],
)
def test_a_path_that_is_not_there(server: LiveServer, path: str, meant: str) -> None:
    answer = server.post(path, {"prompt": "x"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"] == f"unknown path {path[:100]}{meant}" and error["type"] == "not_found_error"


def test_an_unknown_objective_lists_the_known_ones(server: LiveServer) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "slo": {"ttft": 200}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "slo.ttft")
    assert error["message"] == "slo.ttft: unknown field; the fields are ttft_ms, tpot_ms, e2e_ms, class, report, why"
