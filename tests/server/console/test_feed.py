"""The console's feed of events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from roseinfer.core.outputs import OffloadStats, PolicyStats, SchedulerStats
from roseinfer.engine.api import StepRecord
from roseinfer.server.console import engines, feed
from roseinfer.server.console.steps import MAX_STEPS
from tests.server.console.feeds import looking, ticks
from tests.server.fake_engine import INFO, Wait
from tests.server.live import LiveServer, http_post

Serve = Callable[..., LiveServer]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "INTERVAL_S", 0.01)


def test_hello_and_ticks(server: LiveServer) -> None:
    stats = SchedulerStats(running=3, waiting=2, blocks_used=7, blocks_total=80, generation_tokens=50)
    offload = OffloadStats(25, 100, hits=60, loaded=5, stored=6)
    server.engine.snapshot = stats._replace(policy=PolicyStats(0.5, step_budget_s=0.02), offload=offload)
    server.engine.fleet = [replace(report, info=INFO) for report in server.engine.reports()]
    server.call(lambda: server.engine.step(StepRecord(8, 0.01)))
    with looking(server.url) as events:
        name, hello = next(events)
        assert name == "hello"
        assert hello["models"] == ["fake"] and hello["engines"] == 1 and hello["max_num_seqs"] == 8
        assert hello["sampling"] == {"temperature": 0.7, "top_p": 0.95}
        assert hello["policy"] == {"name": "slack", "sheds": True, "priorities": True}
        name, first = next(events)
        assert name == "tick" and [step[6] for step in first["steps"]] == [8]
        (engine,) = first["engines"]
        assert (engine["state"], engine["running"], engine["waiting"]) == ("ready", 3, 2)
        assert (engine["kv_blocks_used"], engine["kv_blocks"], engine["generation_tokens"]) == (7, 80, 50)
        assert (engine["utilisation"], engine["budget_ms"], engine["speed"]) == (0.5, 20.0, None)
        assert (engine["host_blocks_used"], engine["host_blocks"], engine["host_hits"]) == (25, 100, 60)
        assert (engine["host_loaded_bytes"], engine["host_stored_bytes"]) == (5000, 6000)
        server.call(lambda: server.engine.step(StepRecord(9, 0.01)))
        steps = next(tick["steps"] for _, tick in events if tick["steps"])
        assert [step[6] for step in steps] == [9]


def test_requests_as_they_run_and_end(server: LiveServer) -> None:
    server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}, headers={"X-Request-Id": "before"})
    script = server.engine.default_script
    server.engine.script = lambda request: [script(request)[0], Wait(), *script(request)[1:]]
    with looking(server.url) as events, server.connect() as request:
        told = ticks(events)
        assert [record["request_id"] for record in next(told)["requests"]] == ["before"]
        request.sendall(http_post("/v1/completions", {"prompt": "x"}, "x-request-id: now"))
        (live,) = next(tick["requests"] for tick in told if tick["requests"])
        assert (live["request_id"], live["state"], live["output_tokens"]) == ("now", "live", 1)
        server.call(server.engine.release)
        records = (record for tick in told for record in tick["requests"])
        ended = next(record for record in records if record["state"] == "ended")
        assert (ended["request_id"], ended["id"], ended["finish"]) == ("now", live["id"], "stop")


def test_classes_are_named(serve: Serve, tmp_path: Any) -> None:
    path = tmp_path / "classes.toml"
    path.write_text("[classes.chat]\nttft_ms = 300\ntpot_ms = 50\n")
    server = serve(slo_classes=str(path))
    with looking(server.url) as events:
        assert next(events)[1]["classes"] == {"chat": {"ttft_ms": 300.0, "tpot_ms": 50.0, "e2e_ms": None}}


def test_an_engine_that_is_gone_holds_nothing(server: LiveServer) -> None:
    server.engine.snapshot = SchedulerStats(running=3, blocks_used=7, blocks_total=80, generation_tokens=50)
    server.engine.alive, server.engine.returns = False, True
    with looking(server.url) as events:
        next(events)
        (engine,) = next(events)[1]["engines"]
    assert "host_blocks" not in engine, "an engine without host memory"
    assert (engine["state"], engine["running"], engine["kv_blocks_used"]) == ("dead", 0, 0)
    assert engine["generation_tokens"] == 50


def test_there_are_so_many_feeds_and_no_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_FEEDS", 1)
    server = serve()
    with looking(server.url) as events:
        next(events)
        answer = server.get("/console/events")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "too_many_feeds"
        assert answer.headers["retry-after"]
    for _ in range(100):  # the place is free again as soon as the server knows that the reader has left
        with server.client() as client, client.stream("GET", "/console/events") as answer:
            if answer.status_code == 200:
                return
    raise AssertionError("the place of a feed that has ended is never free again")


def test_a_drain_ends_feeds_at_once_and_lets_requests_finish(serve: Serve) -> None:
    server = serve()
    server.engine.script = lambda request: [Wait(), *server.engine.default_script(request)]
    with looking(server.url) as events, server.connect() as request:
        next(events)
        assert server.get("/load").json() == {"server_load": 0}, "a feed is no request"
        request.sendall(http_post("/v1/completions", {"prompt": "x"}))
        server.until(lambda: len(server.engine.live) == 1)
        server.call(server.service.lifecycle.begin_drain)
        for _ in events:  # a proper end: httpx would complain about another
            pass
        answer = server.get("/console/events")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
        server.call(server.engine.release)
        assert request.recv(100).startswith(b"HTTP/1.1 200 ")


@contextmanager
def stopped(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A feed whose reader takes nothing any more: uvicorn's object of its connection."""
    monkeypatch.setattr(engines, "MAX_STEPS_PER_EVENT", MAX_STEPS)  # to fill what the kernel holds
    with server.connect() as reader:
        reader.sendall(b"GET /console/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert reader.recv(15) == b"HTTP/1.1 200 OK"

        def full() -> bool:
            for _ in range(MAX_STEPS):
                server.engine.step(StepRecord(8, 0.01))
            (connection,) = server.connections()
            return connection.flow.write_paused

        server.until(full)
        yield next(iter(server.connections()))


def test_who_does_not_read_is_not_written_to_and_cut_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(write_timeout=0.2)
    with stopped(server, monkeypatch) as connection:
        sizes: list[int] = []

        def gone() -> bool:
            server.engine.step(StepRecord(8, 0.01))
            sizes.append(connection.transport._transport.get_write_buffer_size())
            return not server.connections()

        server.until(gone)
        assert max(sizes) == sizes[0], "not a byte more than what was on its way"


def test_a_drain_does_not_wait_for_who_does_not_read(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(write_timeout=60)
    with stopped(server, monkeypatch):
        server.call(server.service.lifecycle.begin_drain)
        server.until(lambda: not server.connections())
