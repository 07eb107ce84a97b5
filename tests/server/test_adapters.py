"""LoRA adapters of a server: named as models, loaded, replaced and dropped at run time."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roseinfer.core.adapters import Adapter
from roseinfer.core.errors import ADAPTER_UNREADABLE, TooManyReadsError, request_failure
from tests.server.conftest import Serve
from tests.server.console.feeds import looking
from tests.server.live import LiveServer

VERSE, PROSE = (Adapter("", digest * 64, "", 8, 1000) for digest in "ab")
MESSAGES = [{"role": "user", "content": "hello"}]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def loaded(server: LiveServer) -> Iterator[LiveServer]:
    """A server with one adapter."""
    server.engine.folders = {"verse": VERSE, "prose": PROSE}
    assert server.post("/v1/lora_adapters", {"name": "poet", "path": "verse"}).status_code == 200
    yield server
    for name in list(server.engine.adapters()):
        server.http.delete(f"/v1/lora_adapters/{name}")


def names(server: LiveServer) -> list[str]:
    return [card["id"] for card in server.get("/v1/models").json()["data"]]


def test_an_adapter_is_a_model_with_a_parent(loaded: LiveServer) -> None:
    assert names(loaded) == ["fake", "poet"]
    base, card = (loaded.get(f"/v1/models/{name}").json() for name in ("fake", "poet"))
    assert base["parent"] is None
    assert card == base | {"id": "poet", "display_name": "poet", "parent": "fake"}
    listed = loaded.get("/v1/lora_adapters").json()
    assert listed["data"] == [
        {"id": "poet", "object": "lora_adapter", "parent": "fake", "digest": "a" * 64, "rank": 8, "bytes": 1000}
    ]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
    ],
)
def test_a_request_names_it_as_its_model(loaded: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = loaded.post(path, body | {"model": "poet"})
    assert answer.status_code == 200 and answer.json()["model"] == "poet"
    loaded.post(path, body | {"model": "fake"})
    loaded.post(path, body if path == "/v1/completions" else body | {"model": "fake"})
    adapters = [request.prompt.meta.adapter for request in loaded.engine.requests]
    assert adapters == [VERSE._replace(name="poet", path="verse"), None, None]


def test_a_request_has_the_class_of_the_model(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text('[classes.slow]\nttft_ms = 1000\nallow_priority = false\n[models]\nfake = "slow"\n')
    server = serve(slo_classes=str(file))
    server.engine.folders = {"verse": VERSE}
    server.post("/v1/lora_adapters", {"name": "poet", "path": "verse"})
    for name in ("fake", "poet"):
        assert server.post("/v1/completions", {"prompt": "hello", "model": name}).status_code == 200
        assert server.engine.requests[-1].prompt.meta.slo.ttft_s == 1.0
        refused = server.post("/v1/completions", {"prompt": "hello", "model": name, "priority": -1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_unreadable_files_are_in_one_line_of_the_log(loaded: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    problem = f"{ADAPTER_UNREADABLE}'poet': verse holds no adapter_model.safetensors"
    loaded.engine.script = lambda request: [request_failure(problem)]
    with caplog.at_level(logging.INFO):
        answer = loaded.post("/v1/completions", {"model": "poet", "prompt": "hello"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "adapter_not_loaded")
    assert sum(problem in record.getMessage() for record in caplog.records) == 1


def test_a_name_can_be_given_to_another_adapter(loaded: LiveServer) -> None:
    answer = loaded.post("/v1/lora_adapters", {"name": "poet", "path": "prose"}).json()
    assert answer["digest"] == "b" * 64
    loaded.post("/v1/completions", {"prompt": "hello", "model": "poet"})
    assert loaded.engine.requests[-1].prompt.meta.adapter.digest == "b" * 64


def test_a_dropped_name_is_unknown_at_once(loaded: LiveServer) -> None:
    dropped = loaded.http.delete("/v1/lora_adapters/poet")
    assert dropped.json() == {"id": "poet", "object": "lora_adapter", "deleted": True}
    assert names(loaded) == ["fake"]
    answer = loaded.post("/v1/completions", {"prompt": "hello", "model": "poet"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    again = loaded.http.delete("/v1/lora_adapters/poet")
    assert again.status_code == 404 and again.json()["error"]["code"] == "adapter_not_found"


def test_an_unknown_model_is_answered_with_the_adapters(loaded: LiveServer) -> None:
    message = loaded.post("/v1/completions", {"prompt": "x", "model": "bard"}).json()["error"]["message"]
    assert "'fake', 'poet'" in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"name": "fake", "path": "verse"}, "name"),
        ({"name": "x", "path": "missing"}, "path"),
        ({"name": "x"}, "path"),
        ({"path": "verse"}, "name"),
        ({"name": "", "path": "verse"}, "name"),
        ({"name": "x", "path": 3}, "path"),
    ],
)
def test_refusals(loaded: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = loaded.post("/v1/lora_adapters", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
    assert names(loaded) == ["fake", "poet"]


def test_too_many_loads_at_once(loaded: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def put_adapter(name: str, path: str) -> Adapter:
        raise TooManyReadsError("64 adapters are being loaded: try again later")

    monkeypatch.setattr(loaded.engine, "put_adapter", put_adapter)
    answer = loaded.post("/v1/lora_adapters", {"name": "x", "path": "verse"})
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_adapter_loads"
    assert int(answer.headers["Retry-After"]) >= 1


def test_adapters_are_fixed_without_a_directory_for_more(loaded: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.engine, "info", replace(loaded.engine.info, adapters_change=False))
    for answer in (
        loaded.post("/v1/lora_adapters", {"name": "bard", "path": "verse"}),
        loaded.post(LOAD, {"lora_name": "bard", "lora_path": "verse"}),
        loaded.http.delete("/v1/lora_adapters/poet"),
        loaded.post(UNLOAD, {"lora_name": "poet"}),
    ):
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "adapters_fixed"
    assert names(loaded) == ["fake", "poet"]


def test_another_base_model(loaded: LiveServer) -> None:
    answer = loaded.post("/v1/lora_adapters", {"name": "x", "path": "verse", "model": "other"})
    assert answer.status_code == 404


def test_the_routes_of_vllm(loaded: LiveServer) -> None:
    again = loaded.post(LOAD, {"lora_name": "poet", "lora_path": "prose"})
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    assert loaded.post(LOAD, {"lora_name": "poet", "lora_path": "prose", "load_inplace": True}).status_code == 200
    assert loaded.engine.adapters()["poet"].digest == "b" * 64
    assert loaded.post(LOAD, {"lora_name": "bard", "lora_path": "verse"}).text.startswith("Success")
    assert names(loaded) == ["fake", "poet", "bard"]
    assert loaded.post(UNLOAD, {"lora_name": "bard", "lora_int_id": 1}).text.startswith("Success")
    assert loaded.post(UNLOAD, {"lora_name": "bard"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_name": "fake", "lora_path": "verse"}, "lora_name"),
        (LOAD, {"lora_name": "a\nb", "lora_path": "verse"}, "lora_name"),
        (LOAD, {"lora_name": "bard", "lora_path": "missing"}, "lora_path"),
        (UNLOAD, {"lora_name": "bard"}, "lora_name"),
    ],
)
def test_the_routes_of_vllm_name_the_fields_of_vllm(
    loaded: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = loaded.post(path, body)
    assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


def test_the_console_offers_it(loaded: LiveServer) -> None:
    with looking(loaded.url) as events:
        assert next(events)[1]["models"] == ["fake", "poet"]
