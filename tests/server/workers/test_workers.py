"""`roseinfer serve --api-workers 2`: real processes as clients see them, also when one dies or hangs."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.process_table import alive, children
from tests.server.real_server import HTTP_ERROR, PATIENCE_S, RealServer, priced, until

pytestmark = pytest.mark.long

WORKERS = 2
LOGS = ("--log-format", "json")
LONG: dict[str, Any] = {"model": "tiny", "prompt": "import os\n", "extra_body": {"ignore_eos": True}, "stream": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Yield a server whose engine has no model, which makes no difference to its workers."""
    engine = priced(tmp_path_factory.mktemp("engine"), step_s=0.005)
    options = ("--max-num-queued-reqs", "6", "--worker-timeout", "5", *LOGS)
    with RealServer("--api-workers", str(WORKERS), *engine, *options) as server:
        yield server


@pytest.fixture
def fleet(shared: RealServer) -> Iterator[RealServer]:
    """Yield the shared server, which every test leaves idle and with all its workers."""
    yield shared
    until_whole(shared)
    until(lambda: shared.fresh("/load").json() == {"server_load": 0})


def until_whole(server: RealServer) -> None:
    """Wait by the log until all restarted workers take requests. An HTTP request could be answered by another one."""
    until(lambda: len(server.workers()) == WORKERS)
    until(lambda: server.log().count("takes requests") == server.log().count("it is restarted"))


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RealServer]:
    """Yield a server that the test ends."""
    with RealServer("--api-workers", str(WORKERS), *priced(tmp_path)) as server:
        yield server


class Streams:
    """Streams that have begun, each on a connection of its own: equally many on each worker."""

    def __init__(self, server: RealServer, count: int, tokens: int) -> None:
        self._clients = [server.client() for _ in range(count)]
        self.streams = [client.completions.create(**LONG, max_tokens=tokens) for client in self._clients]
        for stream in self.streams:
            next(stream)

    def ends(self) -> list[str]:
        """Return the finish reason or error code of each stream."""
        return [self._end(stream) for stream in self.streams]

    def _end(self, stream: Any) -> str:
        try:
            return [chunk.choices[0].finish_reason for chunk in stream][-1] or "cut"
        except openai.APIError as error:
            return error.code or "cut"
        except HTTP_ERROR:
            return "cut"

    def __enter__(self) -> "Streams":
        return self

    def __exit__(self, *exc: object) -> None:
        for client in self._clients:
            client.close()


def metric(server: RealServer, name: str, **labels: str) -> float:
    """Return the sum of a metric, from any worker."""
    lines = server.fresh("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith((name + "{", name + " "))]
    fitting = [line for line in found if all(f'{key}="{value}"' in line for key, value in labels.items())]
    return sum(float(line.rsplit(" ", 1)[1]) for line in fitting)


def test_each_worker_reports_the_metrics_of_all(fleet: RealServer) -> None:
    def counts() -> list[float]:
        names = ("vllm:request_success_total", "vllm:generation_tokens_total", "vllm:request_prompt_tokens_count")
        answers = metric(fleet, "http_requests_total", handler="/v1/completions", status="2xx")
        return [answers, *(metric(fleet, name) for name in names)]

    before = counts()
    texts = set()
    for _ in range(6):
        with fleet.client() as client:
            answer = client.completions.create(model="tiny", prompt="def f(x):\n", max_tokens=8, temperature=0, seed=1)
            texts.add(answer.choices[0].text)
    assert len(texts) == 1, "the workers share one engine"
    for _ in range(2 * WORKERS):
        assert [now - then for now, then in zip(counts(), before, strict=True)] == [6, 6, 6 * 8, 6]
    steps = metric(fleet, "vllm:iteration_tokens_total_count")
    until(lambda: metric(fleet, "vllm:iteration_tokens_total_count") > max(steps, 1.0) or steps > 1)
    assert {fleet.fresh("/v1/models").json()["data"][0]["id"] for _ in range(WORKERS)} == {"tiny"}


def test_each_worker_lists_the_requests_of_all(fleet: RealServer) -> None:
    ids = []
    for _ in range(2 * WORKERS):
        with fleet.client() as client:
            ids.append(client.completions.create(model="tiny", prompt="x", max_tokens=2).id)
    for _ in range(2 * WORKERS):
        listed = fleet.fresh("/v1/requests?limit=4").json()["data"]
        assert [each["id"] for each in listed] == ids[::-1]
        assert fleet.fresh(f"/v1/requests/{ids[0]}").json() == listed[-1]
        assert listed[0]["why"]["timeline"][-1]["phase"] == "decode" and listed[0]["outcome"] == "met"
    assert fleet.fresh("/v1/requests/nobody").status_code == 404
    with Streams(fleet, WORKERS, tokens=1200):
        running = fleet.fresh("/v1/requests?state=live").json()["data"]
        assert len(running) == WORKERS and {each["state"] for each in running} == {"live"}


def test_the_queue_limit_counts_all_workers(fleet: RealServer) -> None:
    with Streams(fleet, 6, tokens=1200):
        assert fleet.fresh("/load").json() == {"server_load": 6}
        for _ in range(2 * WORKERS):
            assert fleet.fresh("/ready").json()["error"]["code"] == "queue_full"
            with fleet.client() as late, pytest.raises(openai.InternalServerError) as refused:
                late.completions.create(model="tiny", prompt="x", max_tokens=1)
            assert refused.value.code == "queue_full"
        refusals = metric(fleet, "vllm:admission_rejections_total", reason="max_num_queued_reqs")
        assert refusals == 2 * WORKERS, "each worker reports the refusals of all"
    until(lambda: fleet.fresh("/ready").status_code == 200)


def test_a_worker_that_dies_loses_only_its_own_requests_and_is_restarted(fleet: RealServer) -> None:
    done = metric(fleet, "vllm:request_success_total", finished_reason="length")
    computed = metric(fleet, "vllm:generation_tokens_total")
    with Streams(fleet, 4, tokens=600) as streams:
        victim = fleet.workers()[0]
        os.kill(victim, signal.SIGKILL)
        assert sorted(streams.ends()) == ["cut", "cut", "length", "length"]
    until(lambda: len(fleet.workers()) == WORKERS and victim not in fleet.workers())
    until(lambda: metric(fleet, "vllm:num_requests_running") == 0)
    assert metric(fleet, "vllm:kv_cache_usage_perc") == 0
    computed = metric(fleet, "vllm:generation_tokens_total") - computed
    assert computed < 3 * 600, "the dead worker's requests are aborted"
    for _ in range(2 * WORKERS):
        assert metric(fleet, "vllm:request_success_total", finished_reason="length") == done + 2
    assert fleet.fresh("/ready").status_code == 200, "a worker that loads gets no connections"
    until_whole(fleet)
    with Streams(fleet, 4, tokens=5) as streams:
        assert streams.ends() == ["length"] * 4
    assert "API worker" in fleet.log() and "it is restarted" in fleet.log()


def test_a_worker_that_hangs_gets_no_connections_and_is_restarted(fleet: RealServer) -> None:
    with Streams(fleet, 4, tokens=600) as streams:
        victim = fleet.workers()[0]
        os.kill(victim, signal.SIGSTOP)
        assert [fleet.fresh("/health").status_code for _ in range(4 * WORKERS)] == [200] * (4 * WORKERS)
        assert sorted(streams.ends()) == ["cut", "cut", "length", "length"]
    until(lambda: len(fleet.workers()) == WORKERS and victim not in fleet.workers())
    until(lambda: metric(fleet, "vllm:num_requests_running") == 0)
    assert metric(fleet, "vllm:kv_cache_usage_perc") == 0, "its requests are aborted"
    assert "no heartbeat for 5 s: killing it" in fleet.log()


def test_every_line_of_the_log_is_json(fleet: RealServer) -> None:
    """Lines about dying and hanging workers, from the tests above, are included."""
    with fleet.client() as client:
        id = client.completions.create(model="tiny", prompt="secret", max_tokens=2).id.removeprefix("cmpl-")
    until(lambda: id in fleet.log())
    lines = [json.loads(line) for line in fleet.log().splitlines()]
    [line] = [line for line in lines if line.get("request") == id]
    assert line["message"] == "request ended" and line["output_tokens"] == 2 and line["time"].endswith("Z")
    assert "secret" not in fleet.log()


def test_requests_of_a_client_that_disconnects_are_aborted(fleet: RealServer) -> None:
    streams = Streams(fleet, 3, tokens=1200)
    streams.__exit__()
    until(lambda: metric(fleet, "roseinfer:requests_aborted_total", reason="disconnect") >= 3)
    until(lambda: metric(fleet, "vllm:num_requests_running") == 0)


def test_no_process_outlives_a_killed_manager(shared: RealServer) -> None:
    """The last test of the shared server."""
    processes = children(shared.process.pid)
    with Streams(shared, 2, tokens=1200) as streams:
        shared.process.kill()
        shared.process.wait(PATIENCE_S)
        assert streams.ends() == ["cut"] * 2
    until(lambda: not any(map(alive, processes)))
    assert shared.left_behind() == []


def not_ready(server: RealServer) -> str | None:
    """Return the error code of `/ready`, None if the server is ready."""
    error = server.fresh("/ready").json().get("error")
    return None if error is None else error["code"]


def terminate(server: RealServer) -> None:
    server.process.send_signal(signal.SIGTERM)


def interrupt_group(server: RealServer) -> None:
    """Send the signal of Ctrl-C to the process group, as a terminal does."""
    os.killpg(server.process.pid, signal.SIGINT)


def check_draining(server: RealServer) -> None:
    """Assert that every worker lives and rejects requests, also one that is idle."""
    until(lambda: not_ready(server) == "draining")
    for _ in range(2 * WORKERS):
        assert server.fresh("/ready").json()["error"]["code"] == "draining"
        assert server.fresh("/health").status_code == 200
    with server.client() as late, pytest.raises(openai.InternalServerError) as refused:
        late.completions.create(model="tiny", prompt="x")
    assert refused.value.code == "draining"


def test_all_workers_drain_together(own: RealServer) -> None:
    processes = children(own.process.pid)
    with Streams(own, 1, tokens=400) as streams:
        interrupt_group(own)
        check_draining(own)
        assert streams.ends() == ["length"]
    assert own.exit_code() == 0
    assert len(processes) == WORKERS + 1 and not any(map(alive, processes))
    assert own.left_behind() == []


def test_a_second_signal_aborts_the_rest(own: RealServer) -> None:
    processes = children(own.process.pid)
    with Streams(own, 2, tokens=1200) as streams:
        terminate(own)
        check_draining(own)
        terminate(own)
        assert streams.ends() == ["draining"] * 2
    assert own.exit_code() == 0 and not any(map(alive, processes))
    assert own.log().count("finish=abort") == 2 and own.left_behind() == []


def test_all_workers_report_a_dead_engine_until_it_is_back(own: RealServer) -> None:
    victim = own.workers()[0]
    with Streams(own, 4, tokens=1200) as streams:
        os.kill(own.engine, signal.SIGKILL)
        successor = own.hold_successor()
        assert streams.ends() == ["engine_dead"] * 4
    for path in ("/health", "/ready", "/health", "/ready"):
        assert own.fresh(path).json()["error"]["code"] == "engine_unhealthy"
    os.kill(successor, signal.SIGCONT)
    os.kill(victim, signal.SIGKILL)
    until(lambda: len(own.workers()) == WORKERS and victim not in own.workers())
    until(lambda: all(own.fresh("/ready").status_code == 200 for _ in range(2 * WORKERS)))
    with Streams(own, 4, tokens=5) as streams:
        assert streams.ends() == ["length"] * 4
    terminate(own)
    assert own.exit_code() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--chat-template", "{template}"), "--chat-template: Expected an expression"),
        (("--max-model-len", "100000"), "--max-model-len"),
    ],
)
def test_an_error_of_a_worker_or_engine_at_the_start_is_one_line(
    tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if %}")
    given = [option.replace("{template}", str(template)) for option in options]
    server = RealServer("--api-workers", str(WORKERS), *priced(tmp_path), *given)
    code, log, left = server.exit_code(), server.log(), server.left_behind()
    server.close()
    *usage, reason = log.splitlines()
    assert len(usage) == 1, log
    assert reason.startswith("roseinfer: error: ") and message in reason
    assert (code, len(usage), left) == (2, 1, [])
