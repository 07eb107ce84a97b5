"""Health, readiness, models, ids, wrong routes, the watchdog, and the OpenAPI document."""

from collections.abc import Callable

import anthropic
import openai
import pytest
from openai import OpenAI

from roseinfer.core.config.server import ServerConfig
from roseinfer.server import answer_shapes
from roseinfer.server.app import ModelParts, build_app, parts_of
from tests.server.fake_engine import Wait
from tests.server.live import LiveServer, http_post, read_all, read_error

Serve = Callable[..., LiveServer]


POOLING = ("/v1/embeddings", "/v2/embed", "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score")


def test_a_healthy_server(server: LiveServer) -> None:
    for path in ("/health", "/ping", "/ready"):
        assert server.get(path).status_code == 200
    with server.client() as client:
        assert client.post("/ping").status_code == 200
    assert server.get("/version").json() == {"version": build_app(parts_of([ModelParts(ServerConfig(), "x")])).version}
    assert server.get("/load").json() == {"server_load": 0}


@pytest.mark.parametrize("alive", [True, False])
def test_monitors_may_ask_for_the_head(server: LiveServer, alive: bool) -> None:
    server.engine.alive = alive
    with server.client() as client:
        for path in ("/health", "/ping", "/ready", "/version", "/metrics", "/v1/models"):
            head, answer = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (answer.status_code, b"")
            assert head.headers["content-type"] == answer.headers["content-type"]


@pytest.mark.parametrize(("alive", "age_s", "retry"), [(False, 0.0, "false"), (True, 61.0, None)])
def test_a_sick_engine(server: LiveServer, alive: bool, age_s: float, retry: str | None) -> None:
    server.engine.alive, server.engine.heartbeat_age_s = alive, age_s
    for path in ("/health", "/ping", "/ready"):
        answer = server.get(path)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unhealthy"
        assert answer.headers.get("x-should-retry") == retry and answer.headers["retry-after"]
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 503
    assert server.metric("roseinfer:engine_heartbeat_age_seconds") == age_s


def test_a_long_step_is_not_a_stall(server: LiveServer) -> None:
    server.engine.heartbeat_age_s = 59.0
    assert server.get("/health").status_code == 200


def test_a_stall_fails_open_requests(serve: Serve) -> None:
    server = serve(stall_timeout=0.1)
    server.engine.heartbeat_age_s = 0.0
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait()]
    with server.connect() as plain, server.connect() as stream:
        plain.sendall(http_post("/v1/completions", {"prompt": "x"}))
        stream.sendall(http_post("/v1/completions", {"prompt": "x", "stream": True}))
        assert stream.recv(15) == b"HTTP/1.1 200 OK"
        server.until(lambda: len(server.engine.live) == 2)
        server.engine.heartbeat_age_s = 1.0
        assert b" 503 " in read_error(plain)
        assert b'"code":"engine_unhealthy"' in read_all(stream)
    server.until(lambda: len(server.engine.cancelled) == 2)
    assert server.metric("vllm:request_success_total", finished_reason="error") == 2


def test_models(client: OpenAI, server: LiveServer) -> None:
    [card] = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("fake", "model", "roseinfer")
    assert client.models.retrieve("fake").id == "fake"
    found = server.get("/v1/models").json()["data"][0]
    assert found["max_model_len"] == 64
    assert (found["dtype"], found["weights"], found["kv_cache"]) == ("float32", "fp8 by block", "fp8")
    assert found["default_sampling"] == {}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("some/other")


def test_models_through_anthropics_client(server: LiveServer) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        [listed] = list(claude.models.list())
        assert listed == claude.models.retrieve("fake")
        assert (listed.id, listed.type, listed.display_name, listed.max_input_tokens) == ("fake", "model", "fake", 64)
        assert abs(listed.created_at.timestamp() - server.service.created) < 1
        with pytest.raises(anthropic.NotFoundError):
            claude.models.retrieve("other")


def test_served_names(serve: Serve) -> None:
    server = serve(served_model_name=("first", "org/second"))
    cards = server.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"]) for card in cards] == [("first", "fake"), ("org/second", "fake")]
    assert server.get("/v1/models/org/second").json()["id"] == "org/second"
    for name, answered in ((None, "first"), ("org/second", "org/second")):
        assert server.post("/v1/completions", {"prompt": "x", "model": name}).json()["model"] == answered
    assert server.post("/v1/completions", {"prompt": "x", "model": "fake"}).status_code == 404


def test_wrong_routes(server: LiveServer) -> None:
    missing = server.get("/v1/images")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "not_found_error"
    wrong = server.get("/v1/completions")
    assert wrong.status_code == 405 and wrong.json()["error"]["type"] == "invalid_request_error"
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/ping", "GET, HEAD, POST"), ("POST", "/metrics", "GET, HEAD"),
        ("DELETE", "/v1/chat/completions", "POST"), ("POST", "/v1/models/some/model", "GET"),
        ("GET", "/tokenize", "POST"), ("HEAD", "/load", "GET"),
    ],
)  # fmt: skip
def test_a_wrong_method_is_told_all_of_the_right_ones(server: LiveServer, method: str, path: str, allowed: str) -> None:
    with server.client() as client:
        answer = client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert method == "HEAD" or allowed in answer.json()["error"]["message"]


def test_request_ids(client: OpenAI, server: LiveServer) -> None:
    answer = client.completions.with_raw_response.create(
        model="fake", prompt="x", extra_headers={"X-Request-Id": "head-1"}, extra_body={"request_id": "body-1"}
    )
    assert answer.headers["x-request-id"] == "head-1" and answer.parse().id == "cmpl-head-1"
    answer = client.completions.with_raw_response.create(model="fake", prompt="x", extra_body={"request_id": "body-1"})
    assert answer.headers["x-request-id"] == "body-1" and answer.parse().id == "cmpl-body-1"
    ids = {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
    assert all("head-1" in r.request_id or "body-1" in r.request_id for r in server.engine.requests)


def test_errors_carry_the_request_id(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="fake", prompt="x", n=0, extra_headers={"X-Request-Id": "mine"})
    assert raised.value.request_id == "mine"


def test_unusable_request_ids(server: LiveServer) -> None:
    for value in ("x" * 129, "a b", "a\tb", "é".encode("latin-1")):
        answer = server.get("/health", headers={"X-Request-Id": value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "X-Request-Id"
        assert len(answer.headers["x-request-id"]) == 32


def test_two_live_requests_may_have_one_id(server: LiveServer) -> None:
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    body = http_post("/v1/completions", {"prompt": "x", "request_id": "same"})
    with server.connect() as one, server.connect() as two:
        one.sendall(body)
        two.sendall(body)
        server.until(lambda: len(server.engine.live) == 2)  # the fake engine asserts that ids differ
        server.call(server.engine.release)
        for connection in (one, two):
            assert connection.recv(100).startswith(b"HTTP/1.1 200 ")


def test_docs_can_be_switched_off(serve: Serve, server: LiveServer) -> None:
    assert server.get("/docs").status_code == server.get("/openapi.json").status_code == 200
    bare = serve(enable_docs=False)
    assert bare.get("/docs").status_code == bare.get("/openapi.json").status_code == 404


def test_openapi_is_truthful(server: LiveServer) -> None:
    document = server.get("/openapi.json").json()
    assert set(document["paths"]) == {
        "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v2/embed", "/v1/models",
        "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score",
        "/v1/lora_adapters", "/v1/lora_adapters/{name}", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
        "/v1/models/{model_id}", "/tokenize", "/detokenize",
            "/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/input_items",
            "/v1/responses/{response_id}/cancel", "/v1/responses/input_tokens",
            "/v1/messages", "/v1/messages/count_tokens", "/v1/requests", "/v1/requests/{request_id}",
        "/v1/loads", "/v1/promise", "/tokenizer_info", "/health", "/ping", "/ready", "/version", "/load", "/metrics",
    }  # fmt: skip
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", *POOLING):
        route = document["paths"][path]["post"]
        assert set(route["responses"]) == {
            "200",
            "400",
            "401",
            "403",
            "404",
            "408",
            "413",
            "415",
            "429",
            "500",
            "503",
            "504",
        }
        streamed = {"text/event-stream"} if path not in POOLING else set()
        assert set(route["responses"]["200"]["content"]) == {"application/json"} | streamed
    fields = document["components"]["schemas"]["CompletionRequest"]
    assert fields["required"] == ["prompt"]
    assert not {"tools", "ebnf", "best_of", "suffix"} & set(fields["properties"])
    assert "ValidationError" not in document["components"]["schemas"]


def test_answers_have_the_documented_shapes(server: LiveServer) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body, shape in (
        ("/v1/completions", {"prompt": "x"}, answer_shapes.TextCompletion),
        ("/v1/completions", {"prompt": "x", "logprobs": 2, "echo": True, "foo": 1}, answer_shapes.TextCompletion),
        ("/v1/chat/completions", chat, answer_shapes.ChatCompletion),
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2, "n": 2}, answer_shapes.ChatCompletion),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, answer_shapes.Tokenized),
        ("/detokenize", {"tokens": [5]}, answer_shapes.Detokenized),
        ("/v1/completions", {"prompt": "x", "n": 0}, answer_shapes.ErrorBody),
    ):
        shape.model_validate(server.post(path, body).json())
    for path, shape in (
        ("/v1/models", answer_shapes.ModelList),
        ("/v1/models/fake", answer_shapes.ModelCard),
        ("/health", answer_shapes.Health),
        ("/version", answer_shapes.Version),
        ("/load", answer_shapes.Load),
        ("/tokenizer_info", answer_shapes.TokenizerInfo),
    ):
        shape.model_validate(server.get(path).json())
