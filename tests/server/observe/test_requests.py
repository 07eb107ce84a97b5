"""Request records by id and as a list, and explanations in `usage`."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from roseinfer.core.clock import ManualClock
from roseinfer.core.errors import EngineDeadError
from roseinfer.core.outputs import RequestTimes
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.core.slo import Cause, Forecast, Why
from roseinfer.engine.api import GenerateRequest, Route
from roseinfer.server.formats.request_document import RequestList, RequestState
from roseinfer.server.http.errors import ApiError
from roseinfer.server.observe.records import MAX_ENDED_RECORDS, MAX_REJECTED_RECORDS, RequestRecords
from roseinfer.server.request.job import (
    Job,
    JobProgress,
    Outcome,
    PromptRun,
    RequestEnd,
    SampleRecord,
    UnreadRequest,
)
from tests.server.fake_engine import Step, Wait, rejected, timed_out
from tests.server.live import PATIENCE_S, LiveServer, http_post

Serve = Callable[..., LiveServer]
BODY = {"prompt": "a secret", "max_tokens": 5}
PROMPT = Prompt(ids=[1, 2, 3], params=SequenceParams(max_tokens=5))
WHY = Why(((Cause.SEATS, 0.25),), Forecast(0.5, 0.1), chunks=1, steps=5, sat_out=0)


@pytest.fixture
def timed(server: LiveServer) -> Iterator[LiveServer]:
    """Server with a scripted clock: a seat after 0.25 s, the first token after 0.5 s, then 0.125 s each."""
    clock = ManualClock(1000.0)
    service, engine = server.service, server.engine
    real, service.clock = service.clock, clock

    def script(request: GenerateRequest) -> list[Step]:
        first, *rest, last = engine.default_script(request)
        now_s = clock.now()
        times = RequestTimes(now_s, now_s + 0.25, now_s + 0.5, now_s + 1.0)
        steps: list[Step] = [lambda: clock.advance(0.5), replace(first, why=WHY)]
        for chunk in rest:
            steps += [lambda: clock.advance(0.125), chunk]
        return [*steps, lambda: clock.advance(0.125), replace(last, why=WHY, times=times, preemptions=0)]

    engine.script = script
    yield server
    service.clock = real


def record(server: LiveServer, id: str) -> dict[str, Any]:
    answer = server.get(f"/v1/requests/{id}")
    assert answer.status_code == 200, answer.text
    RequestState.model_validate_json(answer.content)
    return answer.json()


def listed(server: LiveServer, query: str = "") -> list[dict[str, Any]]:
    answer = server.get(f"/v1/requests{query}")
    assert answer.status_code == 200, answer.text
    RequestList.model_validate_json(answer.content)
    return answer.json()["data"]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.005)


def test_a_record_has_times_outcome_and_explanation(timed: LiveServer) -> None:
    answer = timed.post("/v1/completions", BODY | {"slo": {"ttft_ms": 400, "tpot_ms": 130}})
    found = record(timed, answer.headers["x-request-id"])
    assert found == record(timed, answer.json()["id"])
    assert found["id"] == answer.json()["id"] and found["request_id"] == answer.headers["x-request-id"]
    assert (found["api"], found["model"], found["stream"], found["state"]) == ("completions", "fake", False, "ended")
    assert (found["status"], found["finish"], found["outcome"]) == (200, "length", "missed_ttft")
    assert found["class"] == "custom" and found["objectives"] == {"ttft_ms": 400, "tpot_ms": 130, "e2e_ms": None}
    assert found["predicted"] == {"ttft_ms": 500, "tpot_ms": 100}
    assert found["seen"] == {"ttft_ms": 500, "tpot_ms": 125, "e2e_ms": 1000}
    usage = answer.json()["usage"]
    assert (found["prompt_tokens"], found["output_tokens"]) == (usage["prompt_tokens"], 5)
    assert (found["choices"], found["engine"], found["routing"]) == (1, 0, None)
    why = found["why"]
    assert why["verdict"] == "seats" and why["waited_ms"] == {"seats": 250.0} and why["refused"] is None
    assert "250 ms" in why["summary"] and "400 ms" in why["summary"]
    phases = [(phase["phase"], phase["cause"], phase["from_ms"], phase["to_ms"]) for phase in why["timeline"]]
    assert phases == [("wait", "seats", 0, 250), ("prefill", None, 250, 500), ("decode", None, 500, 1000)]
    assert "secret" not in timed.get("/v1/requests").text


@pytest.mark.parametrize(
    ("path", "api", "body"),
    [
        ("/v1/chat/completions", "chat", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", "responses", {"input": "x"}),
        ("/v1/messages", "messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ],
)
def test_the_other_apis_leave_records_too(server: LiveServer, path: str, api: str, body: Any) -> None:
    for stream in (False, True):
        answer = server.post(path, body | {"model": "fake", "stream": stream})
        assert answer.status_code == 200
        found = record(server, answer.headers["x-request-id"])
        assert (found["api"], found["stream"], found["outcome"]) == (api, stream, "met")
        assert found["id"] in answer.text


def test_a_running_request_is_live(server: LiveServer) -> None:
    default = server.engine.default_script
    server.engine.script = lambda request: [replace(default(request)[0], why=WHY), Wait(), *default(request)[1:]]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", BODY | {"stream": True}, "x-request-id: mine"))
        server.until(lambda: bool(server.engine.live))
        server.until(lambda: server.service.lifecycle.requests == 1)
        eventually(lambda: record(server, "mine")["output_tokens"] == 1)
        found = record(server, "mine")
        assert (found["state"], found["outcome"], found["finish"]) == ("live", None, None)
        assert found["seen"]["ttft_ms"] > 0 and found["seen"]["e2e_ms"] is None and found["output_tokens"] == 1
        assert found["why"]["waited_ms"] == {"seats": 250.0} and found["why"]["timeline"][-1]["phase"] == "decode"
        assert [each["request_id"] for each in listed(server, "?state=live")] == ["mine"]
        server.call(server.engine.release)
        server.until(lambda: server.service.lifecycle.requests == 0)
    eventually(lambda: record(server, "mine")["state"] == "ended")
    assert record(server, "mine")["status"] == 200 and listed(server, "?state=live") == []


def test_a_rejected_request_names_its_cause(server: LiveServer) -> None:
    chunk = rejected("ttft", 0.812, Cause.UTILISATION)
    assert chunk.rejection is not None
    refusal = replace(chunk, rejection=chunk.rejection._replace(attainable_s=0.9), why=WHY)
    server.engine.script = lambda request: [refusal]
    answer = server.post("/v1/completions", BODY | {"slo": {"ttft_ms": 500}})
    assert answer.status_code == 429
    found = record(server, answer.headers["x-request-id"])
    assert (found["status"], found["outcome"], found["finish"]) == (429, "rejected", "rejected")
    assert found["predicted"] == {"ttft_ms": 812, "tpot_ms": 100} and found["seen"]["ttft_ms"] is None
    assert found["why"]["verdict"] == "utilisation"
    assert found["why"]["refused"] == {
        "objective": "ttft",
        "cause": "utilisation",
        "predicted_ttft_ms": 812.0,
        "attainable_ms": 900.0,
        "hopeless": False,
    }
    assert all(part in found["why"]["summary"] for part in ("500 ms", "900 ms"))
    assert "812 ms" not in found["why"]["summary"], "one number: what could be met now"


@pytest.mark.parametrize(
    ("steps", "status", "outcome", "verdict"),
    [
        ([timed_out()], 504, "timeout", "other"),
        ([EngineDeadError("gone")], 500, "failed", "engine"),
        ([RuntimeError("bug")], 500, "failed", None),
    ],
)
def test_failures_leave_records(server: LiveServer, steps: Any, status: int, outcome: str, verdict: Any) -> None:
    server.engine.script = lambda request: list(steps)
    answer = server.post("/v1/completions", BODY)
    assert answer.status_code == status
    found = record(server, answer.headers["x-request-id"])
    assert (found["status"], found["outcome"], found["why"]["verdict"]) == (status, outcome, verdict)


def test_an_aborted_request_has_a_record(server: LiveServer) -> None:
    server.engine.script = lambda request: [Wait()]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", BODY, "x-request-id: left"))
        server.until(lambda: len(server.engine.requests) == 1)
    server.until(lambda: server.service.lifecycle.requests == 0)
    found = record(server, "left")
    assert (found["status"], found["outcome"], found["finish"]) == (499, "aborted", "abort")
    assert found["why"]["verdict"] == "client"


def test_a_record_has_the_route_between_engines(server: LiveServer) -> None:
    server.engine.route = Route(1, "promise", retries=1)
    found = record(server, server.post("/v1/completions", BODY).headers["x-request-id"])
    assert found["engine"] == 1
    assert found["routing"] == {"reason": "promise", "retries": 1, "placed_again": 0, "resumes": 0}


def test_a_record_describes_the_worst_choice(timed: LiveServer) -> None:
    """Choices take turns: the second's first token comes half a second after the first's."""
    answer = timed.post("/v1/completions", BODY | {"n": 2, "prompt": ["a", "b"], "slo": {"ttft_ms": 5000}})
    found = record(timed, answer.headers["x-request-id"])
    assert found["choices"] == 4 and found["output_tokens"] == 20
    assert found["seen"]["ttft_ms"] == max(
        phase["to_ms"] for phase in found["why"]["timeline"] if phase["phase"] == "prefill"
    )


def test_usage_explains_latency_on_request(timed: LiveServer, client: openai.OpenAI) -> None:
    wishes: Any = {"extra_body": {"slo": {"ttft_ms": 400, "why": True}}, "model": "fake", "max_tokens": 5}
    usage: Any = client.completions.create(prompt="x", **wishes).usage
    assert usage.slo["met"] is False and usage.slo["why"]["verdict"] == "seats"
    messages: Any = [{"role": "user", "content": "x"}]
    *_, last = client.chat.completions.create(messages=messages, stream=True, **wishes)
    found: Any = last.usage
    assert found.slo["why"]["waited_ms"] == {"seats": 250.0} and "--max-num-seqs" in found.slo["why"]["summary"]
    response: Any = client.responses.create(input="x", model="fake", extra_body={"slo": {"why": True}})
    assert response.usage.slo["met"] is None and response.usage.slo["why"]["verdict"] is None


def test_the_list_has_the_newest_first(server: LiveServer) -> None:
    ids = [server.post("/v1/completions", BODY).headers["x-request-id"] for _ in range(3)]
    assert [each["request_id"] for each in listed(server, "?limit=3")] == ids[::-1]
    assert [each["request_id"] for each in listed(server, "?limit=1&state=ended")] == ids[-1:]


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", f"limit={MAX_ENDED_RECORDS + 1}", "limit=", "limit=%C2%B2", "state=dead"]
)
def test_an_invalid_query_is_rejected(server: LiveServer, query: str) -> None:
    answer = server.get(f"/v1/requests?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == query.partition("=")[0]


def test_an_unknown_request(server: LiveServer) -> None:
    for id in ("nobody", "a/b"):
        answer = server.get(f"/v1/requests/{id}")
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "request_not_found"


def test_records_need_the_api_key(serve: Serve) -> None:
    server = serve(api_key=("k",))
    for path in ("/v1/requests", "/v1/requests/x"):
        assert server.get(path).status_code == 401
    assert server.get("/v1/requests", headers={"authorization": "Bearer k"}).json()["data"] == []


def test_a_request_rejected_unread_has_a_record(serve: Serve) -> None:
    server = serve(max_num_queued_reqs=1)
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with server.connect() as connection:
        connection.sendall(http_post("/v1/completions", BODY, "x-request-id: first"))
        server.until(lambda: len(server.engine.requests) == 1)
        answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert answer.status_code == 503
        found = record(server, answer.headers["x-request-id"])
        server.call(server.engine.release)
        eventually(lambda: record(server, "first")["state"] == "ended")
    assert (found["api"], found["status"], found["outcome"], found["engine"]) == ("chat", 503, "rejected", None)
    assert found["why"]["verdict"] == "queue" and "--max-num-queued-reqs" in found["why"]["summary"]
    assert [each["request_id"] for each in listed(server)] == ["first", found["request_id"]]


def test_unread_rejections_do_not_displace_served_requests() -> None:
    """Each kind has its own ring; the list is sorted by age, newest first."""
    clock, wall = ManualClock(10.0), ManualClock(1e9)
    records = RequestRecords(2, wall.now)
    error = ApiError(503, "full", code="queue_full")
    records.rejected_unread(UnreadRequest("early", "/v1/responses", "m"), 0.0, error)
    for id in ("one", "two", "three"):
        job = Job(api="messages", id=id, request_id=id, model="m", created=0, arrival_s=clock.now(), prompts=(PROMPT,))
        progress = JobProgress([PromptRun(3, 5, clock.now(), [SampleRecord()])])
        records.started(job, progress, {"status": 0}, clock.now())
        wall.advance(1)
        clock.advance(1)
        records.ended(progress, clock.now(), RequestEnd(Outcome.ABORTED, "abort", status=499))
    assert [each.id for each in records.newest(9, clock.now())] == ["three", "two", "early"]
    for i in range(MAX_REJECTED_RECORDS):
        wall.advance(1)
        records.rejected_unread(UnreadRequest(str(i), "/v1/responses", "m"), 0.0, error)
    newest = [each.id for each in records.newest(MAX_ENDED_RECORDS, clock.now())]
    assert newest == [*map(str, reversed(range(MAX_REJECTED_RECORDS))), "three", "two"]
    assert records.find("one", clock.now()) is records.find("early", clock.now()) is None


def test_order_of_records_ignores_jumps_of_the_wall_clock() -> None:
    wall = ManualClock(1e9)
    records = RequestRecords(2, wall.now)
    job = Job(api="messages", id="last", request_id="last", model="m", created=0, arrival_s=5.0, prompts=(PROMPT,))
    progress = JobProgress([PromptRun(3, 5, 5.0, [SampleRecord()])])
    records.started(job, progress, {"status": 0}, 5.0)
    wall.advance(3600)
    records.rejected_unread(UnreadRequest("first", "/v1/responses", "m"), 0.0, ApiError(503, "full", code="queue_full"))
    records.ended(progress, 6.0, RequestEnd(Outcome.ABORTED, "abort", status=499))
    assert [each.id for each in records.newest(9, 6.0)] == ["last", "first"]
