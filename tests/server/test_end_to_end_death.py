"""End of the real server and its engine process: by signals, or by each other's death."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.process_table import alive
from tests.server.real_server import HTTP_ERROR, PATIENCE_S, RealServer, priced, until

LONG: dict[str, Any] = {"model": "tiny", "max_tokens": 300, "extra_body": {"ignore_eos": True}, "stream": True}
Kill = Callable[[RealServer], None]


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RealServer]:
    """Server that the test may end. Its engine has no model, but the same processes, and starts at once."""
    with RealServer(*priced(tmp_path)) as server:
        yield server


def begun(client: openai.OpenAI) -> list[Any]:
    """Return streams that have begun and are far from their end."""
    messages: Any = [{"role": "user", "content": "def fibonacci("}]
    streams: list[Any] = [
        client.completions.create(**LONG, prompt="import os\n", n=2),
        client.chat.completions.create(**LONG, messages=messages),
    ]
    for stream in streams:
        next(stream)
    return streams


def finish_reasons(streams: list[Any]) -> list[str]:
    """Read streams to their end and return the finish reasons. The client raises if one fails."""
    reasons = [chunk.choices[0].finish_reason for stream in streams for chunk in stream]
    return [reason for reason in reasons if reason is not None]


def test_a_killed_engine_fails_its_requests_and_is_replaced(own: RealServer) -> None:
    counters = ("vllm:generation_tokens_total", "roseinfer:engine_deaths_total", "roseinfer:engine_restarts_total")
    with own.client() as client:
        client.completions.create(model="tiny", prompt="x", max_tokens=20, extra_body={"ignore_eos": True})
        streams = begun(client)
        os.kill(own.engine, signal.SIGKILL)
        successor = own.hold_successor()
        for stream in streams:
            with pytest.raises(openai.APIError) as failed:
                list(stream)
            assert failed.value.code == "engine_dead"
        assert own.status("/health") == own.status("/ready") == (503, "engine_unhealthy")
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as refused:
                client.completions.create(model="tiny", prompt="x", stream=stream)
            assert (refused.value.status_code, refused.value.code) == (503, "engine_unhealthy")
            headers = refused.value.response.headers
            assert 1 <= int(headers["Retry-After"]) <= 60 and "x-should-retry" not in headers
        tokens, deaths, _ = own.metrics(*counters)
        assert tokens >= 20 and deaths == 1 and own.metrics("roseinfer:engine_up") == [0]
        os.kill(successor, signal.SIGCONT)
        until(lambda: own.status("/ready") == (200, None))
        client.completions.create(model="tiny", prompt="x", max_tokens=5, extra_body={"ignore_eos": True})
        assert own.metrics(*counters) == [tokens + 5, 1, 1], "counters survive the death"
    until(lambda: own.http.get("/load").json() == {"server_load": 0})
    own.process.send_signal(signal.SIGTERM)
    assert own.exit_code() == 0 and own.left_behind() == []


def kill_together(server: RealServer, engines: list[int]) -> None:
    """Stop the server until all of them are dead: on busy cores one may live longer than it waits for others."""
    server.process.send_signal(signal.SIGSTOP)
    for engine in engines:
        os.kill(engine, signal.SIGKILL)
    until(lambda: not any(map(alive, engines)))
    server.process.send_signal(signal.SIGCONT)


def check_end(stream: Any) -> None:
    """Check that a stream which all engines were taken from has failed, or continued on one that was back in time."""
    try:
        reasons = finish_reasons([stream])
    except openai.APIError as error:
        body: Any = error.body
        assert (body["code"], body["retryable"]) == ("engine_dead", True)
    else:
        assert reasons == ["length"]


def test_requests_that_have_sent_nothing_survive_several_engines(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 5, "extra_body": {"ignore_eos": True}}
    with (
        RealServer(*priced(tmp_path), "--replicas", "3", "--max-num-seqs", "1") as server,
        server.client(max_retries=0) as client,
        ThreadPoolExecutor(6) as threads,
    ):
        for killed in (2, 3):
            until(lambda: server.metrics("roseinfer:engine_up") == [3])
            streams = [client.completions.create(**ask | {"max_tokens": 100, "stream": True}) for _ in range(3)]
            for stream in streams:
                next(stream)
            waiting = [threads.submit(client.completions.create, **ask) for _ in range(6)]
            until(lambda: server.metrics("vllm:num_requests_waiting") == [6])
            kill_together(server, server.engines()[:killed])
            assert [answer.result().usage.completion_tokens for answer in waiting] == [5] * 6
            if killed == 2:
                assert finish_reasons(streams) == ["length"] * 3
                continue
            for stream in streams:
                check_end(stream)


def terminate(server: RealServer) -> None:
    server.process.send_signal(signal.SIGTERM)


def interrupt_group(server: RealServer) -> None:
    """Signal the group like a terminal on Ctrl-C."""
    os.killpg(server.process.pid, signal.SIGINT)


def terminate_group(server: RealServer) -> None:
    """Signal the group like a service manager."""
    os.killpg(server.process.pid, signal.SIGTERM)


def test_it_drains(own: RealServer) -> None:
    check_that_it_drains(own, terminate)


@pytest.mark.exhaustive  # `test_all_workers_drain_together` signals a group
@pytest.mark.parametrize("end", [interrupt_group, terminate_group])
def test_it_drains_on_a_signal_to_the_group(own: RealServer, end: Kill) -> None:
    check_that_it_drains(own, end)


def check_that_it_drains(own: RealServer, end: Kill) -> None:
    with own.client() as client, own.client() as late:
        streams = begun(client)
        end(own)
        until(lambda: own.status("/ready") == (503, "draining"))
        assert own.status("/health") == (200, None)
        with pytest.raises(openai.InternalServerError) as refused:
            late.completions.create(model="tiny", prompt="x")
        assert refused.value.code == "draining" and int(refused.value.response.headers["Retry-After"]) >= 1
        assert alive(own.engine)
        assert finish_reasons(streams) == ["length"] * 3
    assert own.exit_code() == 0
    assert not alive(own.engine)
    with pytest.raises(httpx.ConnectError):
        own.http.get("/health")


def test_an_idle_server_ends_at_once(own: RealServer) -> None:
    own.process.send_signal(signal.SIGTERM)
    assert own.exit_code() == 0
    assert not alive(own.engine) and own.left_behind() == []
    assert own.log() == "", "nothing to complain about"


def test_the_engine_does_not_outlive_a_killed_server(own: RealServer) -> None:
    with own.client() as client:
        streams = begun(client)
        own.process.kill()
        own.process.wait(PATIENCE_S)
        for stream in streams:
            with pytest.raises((openai.APIError, HTTP_ERROR)):
                list(stream)
    until(lambda: not alive(own.engine))
    assert own.left_behind() == []
