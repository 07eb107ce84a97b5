"""`roseinfer serve --replicas 2`, as its clients and its operator see it: deaths and restarts that nobody notices."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.real_server import RealServer, alive, children, until

STREAMS, TOKENS = 8, 150
LOAD: dict[str, Any] = {
    "model": "tiny", "prompt": "x", "max_tokens": 20, "stream": True, "extra_body": {"ignore_eos": True},
}  # fmt: skip
COST = {"cost": {"step_s": 0.01, "token_s": 1e-5, "pair_s": 0.0, "row_s": 1e-5, "context_s": 0.0}}


def asked(i: int) -> dict[str, Any]:
    """A seeded request: its text is the same whoever answers it."""
    greedy_too = 0.0 if i % 2 else 1.0
    return {"model": "tiny", "prompt": f"def f{i}(x):\n", "max_tokens": TOKENS, "seed": i, "temperature": greedy_too}


def read(stream: Any) -> tuple[str, str | None]:
    chunks = list(stream)
    return "".join(chunk.choices[0].text for chunk in chunks), chunks[-1].choices[0].finish_reason


def total(server: RealServer, name: str, **labels: str) -> float:
    return server.metrics(name, **labels)[0]


@pytest.fixture(scope="module")
def two() -> Iterator[RealServer]:
    """Two engines behind two API processes."""
    with RealServer("--replicas", "2", "--api-workers", "2") as server:
        yield server


def test_an_engine_killed_under_streams_is_not_noticed(two: RealServer) -> None:
    more: dict[str, Any] = {"stream": True, "extra_body": {"ignore_eos": True}}
    with two.client() as client:
        expected = [client.completions.create(**asked(i), extra_body={"ignore_eos": True}) for i in range(STREAMS)]
        streams = [client.completions.create(**asked(i), **more) for i in range(STREAMS)]
        begun = [next(stream) for stream in streams]
        os.kill(two.engine, signal.SIGKILL)
        for first, stream, whole in zip(begun, streams, expected, strict=True):
            text, reason = read(stream)
            assert (first.choices[0].text + text, reason) == (whole.choices[0].text, "length")
    assert total(two, "vllm:request_success_total", finished_reason="length") == 2 * STREAMS
    assert total(two, "roseinfer:slo_requests_total") == 2 * STREAMS, "none is counted twice"
    assert total(two, "roseinfer:engine_deaths_total") == total(two, "roseinfer:engine_deaths_total", engine="0") == 1
    resumed = total(two, "roseinfer:router_resumes_total", engine="0", cause="death")
    assert 1 <= resumed <= STREAMS and total(two, "roseinfer:router_resumes_total") == resumed
    assert total(two, "roseinfer:router_placements_total") == 2 * STREAMS
    until(lambda: [engine["state"] for engine in two.fresh("/health").json()["engines"]] == ["ready"] * 2)
    until(lambda: total(two, "vllm:num_requests_running") == total(two, "vllm:kv_cache_usage_perc") == 0)
    assert len(two.engines()) == 2


def test_it_ends_whole(two: RealServer) -> None:
    processes = children(two.process.pid)
    two.process.send_signal(signal.SIGTERM)
    assert two.exit_code() == 0
    assert len(processes) == 4 and not any(map(alive, processes)) and two.left_behind() == []


class Load:
    """Clients that ask one request after the other until `stop`, and what went wrong."""

    def __init__(self, server: RealServer, clients: int) -> None:
        self._server = server
        self._over = threading.Event()
        self.done = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._ask) for _ in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with self._server.client() as client:
            while not self._over.is_set():
                try:
                    stream = client.completions.create(**LOAD)
                    reason = read(stream)[1]
                    assert reason == "length", reason
                    self.done += 1
                except (openai.APIError, AssertionError) as error:
                    self.failures.append(repr(error))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def test_a_rolling_restart_under_load_fails_no_request(tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps(COST))
    with RealServer("--replicas", "2", "--device", "priced", "--cost", str(cost)) as server:
        before = server.engines()
        load = Load(server, clients=4)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: "rolling restart: done" in server.log())
        load.stop()
        assert load.failures == [] and load.done > 20
        assert not set(before) & set(server.engines()) and len(server.engines()) == 2
        assert server.metrics("roseinfer:engine_restarts_total", "roseinfer:engine_deaths_total") == [2, 0]
        assert total(server, "vllm:request_success_total", finished_reason="length") == load.done
        server.until_idle()
