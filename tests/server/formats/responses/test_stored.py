"""Stored responses over HTTP, through openai's client: asked for, continued, deleted, run in the background."""

import sqlite3
from typing import Any

import openai
import pytest
from openai import OpenAI

from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError, EngineDeadError, EngineLostError
from roseinfer.core.outputs import FinishReason
from roseinfer.engine.api import SequenceChunk
from roseinfer.server.answer_shapes import ErrorBody
from roseinfer.server.app import ModelParts, parts_of
from roseinfer.server.formats.responses import earlier
from roseinfer.server.formats.responses.document import ItemList, ResponseObject
from roseinfer.server.response_store.database import Database
from tests.server.conftest import Serve
from tests.server.fake_engine import Wait
from tests.server.live import PATIENCE_S, LiveServer, http_post
from tests.server.real_server import until

PATH = "/v1/responses"


def prompt_of(server: LiveServer, index: int = -1) -> str:
    return server.tokenizer.decode(server.engine.requests[index].prompt.ids, skip_special_tokens=False)


def ended(client: OpenAI, id: str) -> Any:
    """A background response, once it runs no more."""
    until(lambda: client.responses.retrieve(id).status not in ("queued", "in_progress"))
    return client.responses.retrieve(id)


def refused(status: int, code: str | None, param: str, call: Any, **fields: Any) -> str:
    with pytest.raises(openai.APIStatusError) as raised:
        call(**fields)
    assert (raised.value.status_code, raised.value.code, raised.value.param) == (status, code, param)
    ErrorBody.model_validate_json(raised.value.response.content)
    return raised.value.message


# --- asked for later -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_unless_it_is_not_to_be(client: OpenAI, stream: bool) -> None:
    def created(**fields: Any) -> Any:
        made: Any = client.responses.create(model="fake", input="hello", max_output_tokens=3, stream=stream, **fields)
        return list(made)[-1].response if stream else made

    kept = created()
    assert kept.store is True and client.responses.retrieve(kept.id) == kept
    lost = created(store=False)
    assert lost.store is False
    refused(404, "response_not_found", "response_id", client.responses.retrieve, response_id=lost.id)


def test_compaction_is_rejected_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="inputs are not compacted here"):
        client.responses.compact(model="gpt-5", input="hello")


def test_a_deleted_response_is_gone(client: OpenAI, server: LiveServer) -> None:
    id = client.responses.create(model="fake", input="hello").id
    assert server.http.delete(f"{PATH}/{id}").json() == {"id": id, "object": "response", "deleted": True}
    for call in (client.responses.delete, client.responses.retrieve, client.responses.input_items.list):
        message = refused(404, "response_not_found", "response_id", call, response_id=id)
        assert id in message


def test_an_id_with_slashes(server: LiveServer) -> None:
    made = server.post(PATH, {"input": "x"}, headers={"X-Request-Id": "a/b"}).json()
    assert made["id"] == "resp_a/b"
    assert server.get(f"{PATH}/resp_a%2Fb").json() == made
    assert len(server.get(f"{PATH}/resp_a%2Fb/input_items").json()["data"]) == 1


def test_a_failed_stream_is_stored_as_failed(client: OpenAI, server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait(), EngineDeadError("gone")]
    stream = client.responses.create(model="fake", input="x", stream=True)
    id = next(stream).response.id
    server.call(server.engine.release)
    with pytest.raises(Exception, match=r"."):
        list(stream)
    failed = client.responses.retrieve(id)
    assert failed.status == "failed" and failed.error is not None and failed.output_text == "hello"


def test_a_response_cannot_be_streamed_again(client: OpenAI) -> None:
    id = client.responses.create(model="fake", input="hello").id
    refused(400, "unsupported_field", "stream", client.responses.retrieve, response_id=id, stream=True)


def test_input_items(client: OpenAI, server: LiveServer) -> None:
    turns: list[Any] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "world"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
        {"id": "msg_mine", "role": "user", "content": [{"type": "input_text", "text": "def"}]},
    ]
    id = client.responses.create(model="fake", input=turns, max_output_tokens=1).id
    ItemList.model_validate(server.get(f"{PATH}/{id}/input_items").json())
    items = list(client.responses.input_items.list(id, order="asc", limit=2))
    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
        "message",
    ], "pages follow each other"
    assert items[0].content[0].type == "input_text" and items[1].content[0].text == "world"
    ids = [item.id for item in items]
    assert len({*ids}) == 5 and ids[-1] == "msg_mine"
    assert [item.id for item in client.responses.input_items.list(id)] == ids[::-1], "the last first, if not asked"
    page = client.responses.input_items.list(id, order="asc", after=ids[2], limit=1)
    assert [item.id for item in page.data] == [ids[3]] and page.has_more
    for fields, param in (({"limit": 0}, "limit"), ({"limit": 101}, "limit"), ({"order": "up"}, "order")):
        refused(400, None, param, client.responses.input_items.list, response_id=id, **fields)
    refused(400, None, "after", client.responses.input_items.list, response_id=id, after="nobody")


# --- continued -------------------------------------------------------------------------------------------------------
def test_a_conversation_goes_on_without_being_sent_again(client: OpenAI, server: LiveServer) -> None:
    first = client.responses.create(model="fake", input="hello", instructions="brief")
    assert prompt_of(server) == "<|endoftext|><|system|>brief<|end|><|user|>hello<|end|><|assistant|>"
    second = client.responses.create(model="fake", input="def", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    said = "<|user|>hello<|end|><|assistant|>hello world, def words<|end|><|user|>def<|end|><|assistant|>"
    assert prompt_of(server) == f"<|endoftext|>{said}", "earlier instructions are not carried over"
    items = list(client.responses.input_items.list(second.id, order="asc"))
    first_items = list(client.responses.input_items.list(first.id))
    assert [item.id for item in items[:2]] == [first_items[0].id, first.output[0].id] and len(items) == 3
    client.responses.delete(first.id)
    client.responses.create(model="fake", input="x", previous_response_id=second.id, max_output_tokens=1)
    assert said + "hello world, def words<|end|><|user|>x" in prompt_of(server), "whatever became of the first"


def test_an_item_that_is_wrong_is_named_by_its_place_in_the_body(client: OpenAI) -> None:
    first = client.responses.create(model="fake", input="hello")
    turns: list[Any] = [{"role": "user", "content": "x"}, {"role": "nobody", "content": "x"}]
    create = client.responses.create
    assert "input.1.role" in refused(
        400, None, "input", create, model="fake", input=turns, previous_response_id=first.id
    )


@pytest.mark.parametrize("input", [{}, {"input": []}])
def test_a_response_is_continued_without_further_input(client: OpenAI, server: LiveServer, input: Any) -> None:
    first = client.responses.create(model="fake", input="hello")
    client.responses.create(model="fake", previous_response_id=first.id, **input)
    assert prompt_of(server).endswith("<|user|>hello<|end|><|assistant|>hello world, def words<|end|><|assistant|>")
    refused(400, None, "input", client.responses.create, model="fake", **input)


def test_items_are_referred_to_by_their_ids(client: OpenAI, server: LiveServer) -> None:
    first = client.responses.create(model="fake", input="hello")
    asked = client.responses.input_items.list(first.id).data[0].id
    turns: list[Any] = [{"type": "item_reference", "id": id} for id in (asked, first.output[0].id)]
    second = client.responses.create(model="fake", input=[*turns, {"role": "user", "content": "def"}])
    said = "<|user|>hello<|end|><|assistant|>hello world, def words<|end|><|user|>def<|end|><|assistant|>"
    assert prompt_of(server) == f"<|endoftext|>{said}"
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"] * 3
    untyped: list[Any] = [{"id": turn["id"]} for turn in turns]
    client.responses.create(model="fake", input=[*untyped, {"role": "user", "content": "def"}])
    assert prompt_of(server) == f"<|endoftext|>{said}"
    for wrong in ("msg_nobody_0", "nonsense", f"{asked}9"):
        turns = [{"type": "item_reference", "id": wrong}]
        message = refused(404, "item_not_found", "input", client.responses.create, model="fake", input=turns)
        assert wrong in message


def test_how_many_responses_a_request_may_refer_to(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "MAX_REFERENCED_RESPONSES", 2)
    body = {"input": "x", "max_output_tokens": 1}
    ids = [server.post(PATH, body).json()["output"][0]["id"] for _ in range(3)]

    def counted(ids: list[str]) -> Any:
        return server.post(f"{PATH}/input_tokens", {"input": [{"type": "item_reference", "id": id} for id in ids]})

    assert counted(ids[1:] * 2).status_code == 200, "as often as one likes"
    assert counted(ids).json()["error"]["param"] == "input"
    # What refers to what was said before brings it along.
    turns: list[dict[str, str]] = []
    for _ in range(5):
        made = server.post(PATH, {**body, "input": [*turns, {"role": "user", "content": "x"}]}).json()
        turns.append({"type": "item_reference", "id": made["output"][0]["id"]})
    assert counted([turn["id"] for turn in turns]).status_code == 200


def test_what_cannot_be_continued(client: OpenAI, server: LiveServer) -> None:
    create = client.responses.create
    message = refused(
        400,
        "previous_response_not_found",
        "previous_response_id",
        create,
        model="fake",
        input="x",
        previous_response_id="resp_nobody",
    )
    assert "resp_nobody" in message
    refused(400, "unsupported_field", "conversation", create, model="fake", input="x", conversation="conv_1")
    script = server.engine.default_script
    server.engine.script = lambda request: [Wait(), *script(request)]
    running = client.responses.create(model="fake", input="x", background=True)
    refused(
        400,
        "previous_response_not_finished",
        "previous_response_id",
        create,
        model="fake",
        input="x",
        previous_response_id=running.id,
    )
    server.call(server.engine.release)
    assert ended(client, running.id).status == "completed"


def test_input_tokens(client: OpenAI, server: LiveServer) -> None:
    first = client.responses.create(model="fake", input="hello", instructions="brief")
    assert first.usage is not None
    count: Any = client.responses.input_tokens.count
    assert count(model="fake", input="hello", instructions="brief").input_tokens == first.usage.input_tokens
    second = client.responses.create(model="fake", input="def", previous_response_id=first.id)
    assert second.usage is not None
    counted = count(model="fake", input="def", previous_response_id=first.id)
    assert counted.input_tokens == second.usage.input_tokens and counted.object == "response.input_tokens"
    assert count(model="fake", previous_response_id=first.id).input_tokens < counted.input_tokens
    assert len(server.engine.requests) == 2, "nothing was computed for it"
    refused(400, "previous_response_not_found", "previous_response_id", count, previous_response_id="resp_x")
    assert server.post(f"{PATH}/input_tokens", {}).status_code == 400


def test_a_conversation_is_no_larger_than_a_body(serve: Serve) -> None:
    server = serve(max_body_bytes=20_000)
    silent = [{"role": "user", "content": "", "note": "x" * 7000}]
    ids = [server.post(PATH, {"input": silent}).json()["id"]]
    answers = []
    while len(answers) < 3:
        answers.append(server.post(PATH, {"input": silent, "previous_response_id": ids[-1]}))
        ids += [answers[-1].json()["id"]] if answers[-1].is_success else []
    assert [answer.status_code for answer in answers] == [200, 400, 400]
    error = answers[-1].json()["error"]
    assert (error["code"], error["param"]) == ("conversation_too_large", "previous_response_id")
    references = [{"type": "item_reference", "id": server.get(f"{PATH}/{id}").json()["output"][0]["id"]} for id in ids]
    for given, status in ((references[:1], 200), (references, 400)):
        assert server.post(f"{PATH}/input_tokens", {"input": given[::-1]}).status_code == status


# --- keys ------------------------------------------------------------------------------------------------------------
def test_no_other_key_sees_a_response(serve: Serve) -> None:
    server = serve(api_key=("one", "two"))
    mine, theirs = (
        OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S) for key in ("one", "two")
    )
    first = mine.responses.create(model="fake", input="hello")
    item = first.output[0].id
    for call in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.input_items.list):
        refused(404, "response_not_found", "response_id", call, response_id=first.id)
    refused(404, "response_not_found", "response_id", theirs.responses.cancel, response_id=first.id)
    create = theirs.responses.create
    refused(
        400,
        "previous_response_not_found",
        "previous_response_id",
        create,
        model="fake",
        input="x",
        previous_response_id=first.id,
    )
    turns: list[Any] = [{"type": "item_reference", "id": item}]
    refused(404, "item_not_found", "input", create, model="fake", input=turns)
    # The same id with another key is another response.
    again = theirs.responses.create(model="fake", input="x", extra_headers={"X-Request-Id": first.id[5:]})
    assert again.id == first.id and mine.responses.retrieve(first.id) == first
    mine.responses.delete(first.id)
    assert theirs.responses.retrieve(first.id) == again
    assert server.get(f"{PATH}/{first.id}").status_code == 401


# --- without a store, and where it fails -----------------------------------------------------------------------------
def test_without_a_store(serve: Serve) -> None:
    server = serve(response_store="off")
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        asked = client.responses.create(model="fake", input="x", store=True)
        assert asked.store is False and asked.to_dict()["warnings"] == ["store"]
        silent = client.responses.create(model="fake", input="x")
        assert silent.store is False and "warnings" not in silent.to_dict()
        message = refused(404, "response_not_found", "response_id", client.responses.retrieve, response_id=asked.id)
        assert "stores no responses" in message
        for name, value in (("previous_response_id", asked.id), ("background", True)):
            given: dict[str, Any] = {"model": "fake", "input": "x", name: value}
            assert "--response-store" in refused(400, "unsupported_field", name, client.responses.create, **given)
        turns: list[Any] = [{"type": "item_reference", "id": asked.output[0].id}]
        refused(400, "unsupported_field", "input", client.responses.create, model="fake", input=turns)


def test_a_temporary_file_that_cannot_be_made_costs_no_server(tmp_path: Any) -> None:
    missing = tmp_path / "missing" / "db"
    parts = parts_of([ModelParts(ServerConfig(), "fake")], response_file=missing)
    assert parts.responses is None
    with pytest.raises(ConfigError, match="cannot be used"):
        parts_of([ModelParts(ServerConfig(response_store=str(missing)), "fake")], response_file=missing)


def test_a_file_that_fails_costs_no_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(*given: Any) -> Any:
        raise sqlite3.OperationalError("database is locked")

    server = serve()
    with monkeypatch.context() as failing:
        failing.setattr(Database, "write", locked)
        id = server.post(PATH, {"input": "x"}).json()["id"]
        until(lambda: server.metric("roseinfer:responses_not_stored_total", reason="failed") == 1)
        assert server.get(f"{PATH}/{id}").status_code == 404, "it is not stored"
    for name in ("get", "totals", "delete"):
        monkeypatch.setattr(Database, name, locked)
    for answer in (
        server.get(f"{PATH}/{id}"),
        server.http.delete(f"{PATH}/{id}"),
        server.post(PATH, {"input": "x", "previous_response_id": id}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "response_store_failed")
    assert server.post(PATH, {"input": "x"}).status_code == 200
    assert server.get("/metrics").status_code == 200


def test_metrics(server: LiveServer) -> None:
    def counts() -> list[float]:
        names = ("stored_responses", "responses_stored_total")
        removed = server.metric("roseinfer:responses_removed_total", reason="deleted")
        return [*(server.metric(f"roseinfer:{name}") for name in names), removed]

    before = counts()
    id = server.post(PATH, {"input": "x"}).json()["id"]
    until(lambda: counts()[1] > before[1])  # written some time later
    assert server.metric("roseinfer:stored_response_bytes") > 500
    server.http.delete(f"{PATH}/{id}")
    until(lambda: [now - then for now, then in zip(counts(), before, strict=True)] == [0, 1, 1])
    for method, path, handler in (
        ("GET", f"{PATH}/{id}", "/v1/responses/{response_id}"),
        ("GET", f"{PATH}/{id}/input_items", "/v1/responses/{response_id}/input_items"),
        ("POST", f"{PATH}/{id}/cancel", "/v1/responses/{response_id}/cancel"),
    ):
        server.http.request(method, path)
        assert server.metric("http_requests_total", handler=handler, method=method, status="4xx") >= 1, handler


# --- in the background -----------------------------------------------------------------------------------------------
def test_a_background_response_runs_without_its_client(client: OpenAI, server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait(), *script(request)[1:]]
    queued = client.responses.create(model="fake", input="hello", background=True)
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    server.until(lambda: len(server.engine.live) == 1)
    until(lambda: client.responses.retrieve(queued.id).status == "in_progress")
    assert server.get("/load").json()["server_load"] == 1, "it has a place in the server"
    server.call(server.engine.release)
    done = ended(client, queued.id)
    assert (done.status, done.output_text) == ("completed", "hello world, def words")
    ResponseObject.model_validate(done.to_dict())
    assert done.usage is not None and done.usage.output_tokens > 0
    server.until(lambda: server.service.lifecycle.requests == 0)


def test_a_background_response_that_cannot_be_stored_is_refused(
    client: OpenAI, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roseinfer.server.response_store.store.MAX_PENDING_COUNT", 0)
    body = {"input": "hello", "background": True}
    answer = server.post(PATH, body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "response_store_failed")
    assert server.post(PATH, {"input": "hello"}).status_code == 200, "other answers do without the store"
    server.until(lambda: server.service.lifecycle.requests == 0)


@pytest.mark.parametrize("background", [False, True])
def test_an_input_nested_too_deep_is_refused(server: LiveServer, background: bool) -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    item = {"role": "user", "content": "x", "unknown": deep}
    answer = server.post(PATH, {"input": [item], "background": background})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_a_background_stream_takes_one_place(server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait(), *script(request)[1:]]
    body = {"input": "hello", "background": True, "stream": True}
    with server.connect() as connection:
        connection.sendall(http_post(PATH, body))
        server.until(lambda: len(server.engine.live) == 1)
        assert server.get("/load").json()["server_load"] == 1
        server.call(server.engine.release)
        server.until(lambda: server.service.lifecycle.requests == 0)


def test_a_background_stream_may_be_left(client: OpenAI, server: LiveServer) -> None:
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait(), *script(request)[1:]]
    body = {"input": "hello", "background": True, "stream": True, "request_id": "left"}
    with server.connect() as connection:
        connection.sendall(http_post(PATH, body))
        assert b"200 OK" in connection.recv(65536)
    server.call(server.engine.release)
    assert ended(client, "resp_left").output_text == "hello world, def words"


def test_a_client_that_does_not_read_does_not_hold_up_a_background_stream(serve: Serve) -> None:
    server = serve(write_timeout=0.2)
    text = "x" * 2**20
    chunks = [SequenceChunk(0, text, [5], num_output_tokens=n) for n in range(1, 17)]
    end = SequenceChunk(0, "", [5], num_output_tokens=17, finish_reason=FinishReason.STOP)
    server.engine.script = lambda request: [*chunks, end]
    body = {"input": "hello", "background": True, "stream": True, "request_id": "unread"}
    with server.connect() as connection:
        connection.sendall(http_post(PATH, body))
        until(lambda: server.get(f"{PATH}/resp_unread").json().get("status") == "completed")
    response = server.get(f"{PATH}/resp_unread").json()
    assert response["output"][0]["content"][0]["text"] == text * 16
    server.until(lambda: server.service.lifecycle.requests == 0)


def test_a_background_stream_says_the_same(client: OpenAI) -> None:
    events = list(client.responses.create(model="fake", input="hello", background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert client.responses.retrieve(events[-1].response.id) == events[-1].response


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_cancelling(client: OpenAI, server: LiveServer, begun: bool, stream: bool) -> None:
    script = server.engine.default_script
    first = [0] if begun else []
    server.engine.script = lambda request: [*(script(request)[i] for i in first), Wait(), *script(request)[1:]]
    id = "resp_cancelled"
    with server.connect() as connection:
        body = {"input": "hello", "background": True, "stream": stream, "request_id": "cancelled"}
        connection.sendall(http_post(PATH, body))
        server.until(lambda: len(server.engine.live) == 1)
        cancelled = client.responses.cancel(id)
        assert cancelled.status == "cancelled"
        server.until(lambda: len(server.engine.cancelled) == 1)
    assert client.responses.cancel(id) == client.responses.retrieve(id) == cancelled, "once more changes nothing"
    server.until(lambda: server.service.lifecycle.requests == 0)
    client.responses.delete(id)


def test_only_background_responses_can_be_cancelled(client: OpenAI) -> None:
    id = client.responses.create(model="fake", input="hello").id
    refused(400, "not_background", "response_id", client.responses.cancel, response_id=id)
    refused(404, "response_not_found", "response_id", client.responses.cancel, response_id="resp_nobody")
    finished = client.responses.create(model="fake", input="hello", background=True).id
    done = ended(client, finished)
    assert client.responses.cancel(finished) == done


def test_deleting_what_runs_ends_it(client: OpenAI, server: LiveServer) -> None:
    server.engine.script = lambda request: [Wait()]
    id = client.responses.create(model="fake", input="hello", background=True).id
    server.until(lambda: len(server.engine.live) == 1)
    client.responses.delete(id)
    server.until(lambda: len(server.engine.cancelled) == 1 and server.service.lifecycle.requests == 0)
    refused(404, "response_not_found", "response_id", client.responses.retrieve, response_id=id)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (EngineDeadError("gone"), {"code": "engine_dead", "retryable": True}),
        (EngineDeadError("gone", 4.0), {"code": "engine_dead", "retryable": True, "retry_after_s": 4}),
        (EngineLostError("x", only_suspect=True), {"code": "engine_lost", "retryable": False}),
    ],
)
def test_a_background_response_that_fails_says_so(
    client: OpenAI, server: LiveServer, begun: bool, error: Exception, advice: dict[str, Any]
) -> None:
    first = server.engine.default_script
    server.engine.script = lambda request: [*first(request)[:begun], error]
    failed = ended(client, client.responses.create(model="fake", input="hello", background=True).id)
    assert failed.status == "failed" and failed.error is not None
    fields = failed.error.model_dump(exclude_unset=True)
    assert fields.pop("message") and fields == advice


def test_a_drain_ends_what_runs_in_the_background(serve: Serve, tmp_path: Any) -> None:
    server = serve(response_store=str(tmp_path / "db"))
    server.engine.script = lambda request: [Wait()]
    id = server.post(PATH, {"input": "x", "background": True}).json()["id"]
    server.until(lambda: len(server.engine.live) == 1)
    server.run(server.service.wind_down(5.0))
    response = server.get(f"{PATH}/{id}").json()
    assert response["status"] == "failed" and response["error"]["code"] == "draining"
    assert response["error"]["retryable"]


def test_what_a_background_response_needs(client: OpenAI, server: LiveServer) -> None:
    given: dict[str, Any] = {"model": "fake", "input": "x", "background": True}
    refused(400, None, "background", client.responses.create, **given, store=False)
    refused(400, None, "temperature", client.responses.create, **given, temperature=3.0)
    assert server.engine.requests == []
