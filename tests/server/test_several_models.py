"""Two models on one server: each request goes to the model that it names, and each model fails alone."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.config.server import ServerConfig
from roseinfer.server import answer_shapes
from roseinfer.server.app import Application, ModelParts, build_app, parts_of
from roseinfer.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, FakeEngine, Wait
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_fallback, byte_level

B_INFO = replace(INFO, facts=replace(INFO.facts, max_model_len=32, weights="int8"))
CHAT = [{"role": "user", "content": "x"}]


class TwoModels(LiveServer):
    """Model `a` with the names `a` and `a-too`, and model `b`, which has another tokenizer and a shorter context."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(
            tokenizer,
            ServerConfig(served_model_name=("a", "a-too"), max_num_queued_reqs=2, sse_keep_alive_interval=0.02),
        )
        self.other = FakeEngine(byte_fallback(), B_INFO, number=1)

    def _application(self, stored: Path | None) -> Application:
        config = replace(self.config, served_model_name=("b",))
        self.parts = parts_of(
            [ModelParts(self.config, "A"), ModelParts(config, "B", first_engine=1)], None, None, stored
        )
        self.parts.service.attach(self.engine, self.tokenizer)
        return build_app(self.parts)

    def load_other(self) -> None:
        self.call(lambda: self.parts.models.find("b").service.attach(self.other, self.other.tokenizer))


@pytest.fixture(scope="module")
def loading() -> Iterator[TwoModels]:
    with TwoModels(byte_level()) as server:
        yield server


@pytest.fixture
def both(loading: TwoModels) -> TwoModels:
    if not loading.parts.models.find("b").service.loaded:
        loading.load_other()
    loading.call(loading.engine.reset)
    loading.call(loading.other.reset)
    loading.other.reply = "hello"
    return loading


def ask(server: LiveServer, model: Any = None, **more: Any) -> Any:
    named = {} if model is None else {"model": model}
    return server.post("/v1/completions", {"prompt": "x", "temperature": 0, **named, **more})


def test_one_model_serves_while_the_other_loads(loading: TwoModels) -> None:
    assert ask(loading, "a").status_code == 200
    refused = ask(loading, "b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
    for path in ("/health", "/ready", "/v1/models/b"):
        answer = loading.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "model 'b': The model is still loading"
        assert answer.headers["Retry-After"] == refused.headers["Retry-After"]
    assert [card["id"] for card in loading.get("/v1/models").json()["data"]] == ["a", "a-too"]
    assert [load["model"] for load in loading.get("/v1/loads").json()["loads"]] == ["a"]


def test_each_request_goes_to_the_model_that_it_names(both: TwoModels) -> None:
    for name, text in (("a", both.engine.reply), ("a-too", both.engine.reply), ("b", "hello")):
        answer = ask(both, name).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, text)
    chat = both.post("/v1/chat/completions", {"model": "a", "messages": CHAT}).json()
    message = both.post("/v1/messages", {"model": "a", "messages": CHAT, "max_tokens": 20}).json()
    response = both.post("/v1/responses", {"model": "a", "input": "x"}).json()
    assert [answer["model"] for answer in (chat, message, response)] == ["a"] * 3
    assert (len(both.engine.requests), len(both.other.requests)) == (5, 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 3}),
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/messages/count_tokens", {"messages": CHAT}),
        ("/v1/responses/input_tokens", {"input": "x"}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_a_request_must_name_a_known_model(both: TwoModels, path: str, body: dict[str, Any]) -> None:
    unknown, absent = both.post(path, body | {"model": "c"}), both.post(path, body)
    assert (unknown.status_code, absent.status_code) == (404, 400)
    assert "available: 'a', 'a-too', 'b'" in unknown.json()["error"]["message"]
    assert "this server has several models ('a', 'a-too', 'b')" in absent.json()["error"]["message"]
    assert both.post(path, body | {"model": 7}).status_code == 400
    assert both.engine.requests == both.other.requests == []


def test_the_record_of_a_request_names_the_engine_of_its_model(both: TwoModels) -> None:
    ids = [ask(both, name).json()["id"] for name in ("a", "b")]
    records = [both.get(f"/v1/requests/{id}").json() for id in ids]
    assert [(record["model"], record["engine"]) for record in records] == [("a", 0), ("b", 1)]


def test_an_unknown_model_has_openais_code(both: TwoModels) -> None:
    error = ask(both, "c").json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_route_of_another_task_names_the_model(both: TwoModels) -> None:
    for name in ("a", "b"):
        error = both.post("/v1/embeddings", {"model": name, "input": "x"}).json()["error"]
        assert error["code"] == "unsupported_task" and repr(name) in error["message"]


def test_tokenizer_context_and_template_are_the_models_own(both: TwoModels) -> None:
    counted = [both.post("/tokenize", {"prompt": "hello world", "model": name}).json() for name in ("a", "b")]
    assert [answer["max_model_len"] for answer in counted] == [64, 32]
    assert counted[0]["tokens"] != counted[1]["tokens"]
    too_long = ask(both, "b", prompt=[5] * 33)
    assert too_long.status_code == 400 and "32" in too_long.json()["error"]["message"]
    assert ask(both, "a", prompt=[5] * 33).status_code == 200
    assert both.get("/tokenizer_info", params={"model": "a"}).json()["chat_template"] is not None
    assert both.get("/tokenizer_info", params={"model": "b"}).json()["chat_template"] is None
    assert both.get("/tokenizer_info").status_code == 400
    assert both.get("/tokenizer_info", params={"model": "c"}).status_code == 404


def test_models_lists_all_with_their_own_facts(both: TwoModels) -> None:
    cards = both.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["max_model_len"], card["weights"]) for card in cards] == [
        ("a", "A", 64, "fp8 by block"),
        ("a-too", "A", 64, "fp8 by block"),
        ("b", "B", 32, "int8"),
    ]
    assert both.get("/v1/models/b").json() == cards[2]
    assert both.get("/v1/models/c").status_code == 404


def test_the_limit_of_prompts_is_the_models_own(both: TwoModels) -> None:
    full = ask(both, "a", prompt=["x"] * 2, stream=True)
    assert full.status_code == 200
    both.engine.script = lambda request: [Wait(), *both.engine.default_script(request)]
    with both.http.stream("POST", "/v1/completions", json={"model": "a", "prompt": ["x", "y"], "stream": True}):
        both.until(lambda: len(both.engine.live) == 2)
        refused = ask(both, "a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert ask(both, "b").status_code == 200
        both.call(both.engine.release)
    both.until(lambda: both.parts.models.requests() == 0)


def test_a_dead_engine_affects_its_model_only(both: TwoModels) -> None:
    both.other.alive = False
    assert ask(both, "a").status_code == 200
    refused = ask(both, "b")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unhealthy")
    for path in ("/health", "/ready"):
        answer = both.get(path)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "model 'b': The engine has failed"
    both.engine.alive = False
    assert both.get("/ready").json()["error"]["message"] == (
        "model 'a': The engine has failed; model 'b': The engine has failed"
    )


def test_engines_are_shown_with_their_models(both: TwoModels) -> None:
    health, load, loads = (both.get(path).json() for path in ("/health", "/load", "/v1/loads"))
    answer_shapes.Health.model_validate(health)
    answer_shapes.Load.model_validate(load)
    answer_shapes.EngineLoads.model_validate(loads)
    for engines in (health["engines"], both.get("/ready").json()["engines"], load["engines"]):
        assert [(each["engine"], each["model"]) for each in engines] == [(0, "a"), (1, "b")]
    assert [(each["dp_rank"], each["model"]) for each in loads["loads"]] == [(0, "a"), (1, "b")]
    assert both.get("/v1/loads?dp_rank=1").json()["loads"] == loads["loads"][1:]
    for query, status in (("&model=b", 200), ("", 400), ("&model=c", 404)):
        assert both.get(f"/v1/promise?prompt_tokens=5{query}").status_code == status


def test_metrics_records_and_log_lines_name_the_model(both: TwoModels, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "roseinfer.server.observe.report")
    before = [both.metric("vllm:request_success_total", model_name=name) for name in ("a", "b")]
    assert ask(both, "b").status_code == 200
    after = [both.metric("vllm:request_success_total", model_name=name) for name in ("a", "b")]
    assert (after[0] - before[0], after[1] - before[1]) == (0, 1)
    for model, engine in (("a", "0"), ("b", "1")):
        assert both.metric("roseinfer:engine_up", model_name=model, engine=engine) == 1
        assert both.metric("vllm:e2e_request_latency_seconds_count", model_name=model, engine=engine) >= 1
    assert both.get("/v1/requests?limit=1").json()["data"][0]["model"] == "b"
    assert [record.getMessage().endswith("slo=met model=b") for record in caplog.records] == [True]
    text = both.get("/metrics").text
    assert text.count("# TYPE vllm:e2e_request_latency_seconds histogram") == 1


def test_the_console_has_all_models(both: TwoModels) -> None:
    with both.http.stream("GET", "/console/events") as feed:
        lines = feed.iter_lines()
        hello = next(line for line in lines if line.startswith("data: "))
        tick = next(line for line in lines if line.startswith("data: "))
    assert '"models":["a","a-too","b"]' in hello and '"engines":2' in hello
    engines = json.loads(tick.removeprefix("data: "))["engines"]
    assert [(each["engine"], each["model"]) for each in engines] == [(0, "a"), (1, "b")]
    by_model = json.loads(hello.removeprefix("data: "))["by_model"]
    assert {name: each["max_model_len"] for name, each in by_model.items()} == {"a": 64, "a-too": 64, "b": 32}


def test_a_shutdown_ends_the_requests_of_all_models() -> None:
    with TwoModels(byte_level()) as server:
        server.load_other()
        server.other.script = lambda request: [Wait()]
        with server.http.stream("POST", "/v1/completions", json={"model": "b", "prompt": "x", "stream": True}):
            server.until(lambda: len(server.other.live) == 1)
            server.call(server.parts.models.begin_drain)
            assert [ask(server, name).json()["error"]["code"] for name in ("a", "b")] == ["draining"] * 2
            assert server.run(server.parts.models.wind_down(5.0)) == 1
        assert server.other.live == []
