"""`bench serve` with the flags of `vllm bench serve`, against a real server around a fake engine."""

import json
from collections.abc import Iterator

import pytest

from roseinfer.bench.arrivals import DatasetSample
from roseinfer.bench.codec import LocalCodec, ServerCodec, align_to_server
from roseinfer.cli import main as cli
from roseinfer.cli.commands.bench_serve import completed
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from tests.bench.slo_stub import LOADING, WRONG_KEY, stub
from tests.server.live import LiveServer
from tests.text.tokenizers import byte_level

SMALL = ["--num-prompts", "4", "--random-input-len", "12", "--random-output-len", "5", "--procs", "1"]


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with LiveServer(byte_level(), ServerConfig(api_key=("secret",))) as server:
        yield server


def bench(live: LiveServer, *argv: str) -> int:
    return cli.main(["bench", "serve", "--port", str(live.port), "--api-key", "secret", *argv])


def test_random_texts_and_the_files_of_vllm(live, tmp_path, capsys):
    """Send all requests at once, with exact lengths by the server's tokenizer."""
    live.call(live.engine.reset)
    options = ["--save-result", "--result-dir", str(tmp_path), "--metadata", "tp=1", "gpu=none", "--seed", "3"]
    assert (
        bench(live, *SMALL, *options, "--goodput", "ttft:60000", "e2el:60000", "--plot", str(tmp_path / "a.png")) == 0
    )
    printed = capsys.readouterr().out
    assert "Successful requests:                     4         \n" in printed and "4 ok" in printed
    (file,) = tmp_path.glob("openai-infqps-fake-*.json")
    assert f"Result:     {file}" in printed and (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(file.read_text())
    head = ["date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "tp", "gpu"]
    assert list(found)[:12] == [*head, "request_rate", "burstiness", "max_concurrency"]
    assert (found["request_rate"], found["max_concurrency"], found["tp"], found["label"]) == ("inf", None, "1", None)
    assert (found["completed"], found["total_output_tokens"], found["request_goodput"]) == (
        4,
        20,
        found["request_throughput"],
    )
    assert len(found["latencies"]) == len(found["queue_times"]) == 4
    requests = live.engine.requests
    assert {len(request.prompt.ids) for request in requests} == {12} and len({str(r.prompt.ids) for r in requests}) == 4
    assert all(request.prompt.params.ignore_eos for request in requests)


def test_chats_one_at_a_time_with_probes(live, tmp_path, capsys):
    live.call(live.engine.reset)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "hello there"}\n')
    options = ["--dataset-name", "custom", "--dataset-path", str(lines), "--custom-output-len", "4"]
    more = ["--backend", "openai-chat", "--max-concurrency", "1", "--request-rate", "500", "--probe-request-rate", "50"]
    kept = ["--append-result", "--save-detailed", "--result-filename", "r.json", "--result-dir", str(tmp_path)]
    sent = ["--num-warmups", "2", "--ready-check-timeout-sec", "5", "--request-id-prefix", "me-", "--token-itl"]
    body = ["--extra-body", '{"user": "x", "top_p": 0.5}', "--header", "x-a=1", "x-b=2", "--temperature", "0.25"]
    asked = ["--percentile-metrics", "e2el,client_queue_time,e2el_including_client_queue,itl", "--num-prompts", "3"]
    assert bench(live, *options, *more, *kept, *sent, *body, *asked) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    printed = capsys.readouterr().out
    assert "Maximum request concurrency:             1         " in printed and "Probe requests completed:" in printed
    assert found["completed"] == 3 and found["max_concurrent_requests"] == 1 and found["probe_completed"] >= 1
    assert found["request_rate"] == 500.0 and found["output_lens"] == [4, 4, 4] and all(found["generated_texts"])
    assert {f"p99_{name}_ms" for name in ("e2el", "client_queue_time", "e2el_including_client_queue")} <= set(found)
    assert "mean_ttft_ms" not in found and found["queue_times"][-1] > 0
    params = [request.prompt.params for request in live.engine.requests]
    assert {(p.top_p, p.temperature) for p in params} == {(0.5, 0.25)}
    ids = {request.request_id for request in live.engine.requests}
    assert len(params) >= 3 + 2 + 1 + 1 and len(ids) == len(params)


def test_a_stream_that_is_cut_off_has_failed(tmp_path, capsys):
    """Use the stub, which gives every request one token less than it claims, or refuses it by name."""
    classes = tmp_path / "classes.json"
    kinds = [{"name": "cut", "body": {"kind": "broken"}}, {"name": "no", "headers": {"x-slo-ttft-ms": "500"}}]
    classes.write_text(json.dumps(kinds))
    with stub() as (url, _):
        options = ["--num", "8", "--in-len", "3", "--out-len", "4", "--procs", "1", "--slo-classes", str(classes)]
        assert cli.main(["bench", "serve", "--url", url, *options]) == 1
    printed = capsys.readouterr().out
    assert "times: cut off: the stream ended without a finish_reason" in printed
    assert "times: 429 slo_unattainable (seats)" in printed
    assert "Successful requests:                     0         " in printed


FIXED = ["--num", "2", "--in-len", "3", "--out-len", "4", "--procs", "1", "--vocab", "100"]


def test_a_server_that_loads_is_named_by_its_own_words(capsys):
    with stub(LOADING) as (url, _):
        assert cli.main(["bench", "serve", "--url", url, *FIXED]) == 2
    assert f"--url: '{url}' answered 503: The model is still loading" in capsys.readouterr().err


def test_the_ready_check_waits_for_a_server_that_loads(monkeypatch, capsys):
    monkeypatch.setattr("roseinfer.bench.open_loop.READY_RETRY_S", 0.01)
    with stub(*[LOADING] * 3) as (url, asked):
        assert cli.main(["bench", "serve", "--url", url, "--ready-check-timeout-sec", "30", *FIXED]) == 0
    assert len(asked) == 1 + 2, "one request to see whether the server is ready, and the load"


def test_the_ready_check_does_not_wait_after_a_wrong_key(monkeypatch, capsys):
    monkeypatch.setattr("roseinfer.bench.open_loop.READY_RETRY_S", 0.01)
    with stub(WRONG_KEY) as (url, asked):
        assert cli.main(["bench", "serve", "--url", url, "--ready-check-timeout-sec", "30", *FIXED]) == 2
    assert not asked and f"--url: '{url}' answered 401: Incorrect API key" in capsys.readouterr().err


def test_a_server_without_a_tokenizer(capsys):
    with stub() as (url, _):
        assert cli.main(["bench", "serve", "--url", url, *SMALL]) == 2
    assert "--tokenizer: /tokenize failed with status 404" in capsys.readouterr().err


def test_another_tokenizer_is_aligned_to_the_servers(live):
    own = LocalCodec("tiny")
    texts = ["def add(a, b):\n    return a + b", "import os"]
    samples = [DatasetSample(ids, 1, text) for ids, text in zip(own.encode(texts), texts, strict=True)]
    found = align_to_server(samples, live.url, "fake", "secret")
    server = ServerCodec(live.url, "fake", "secret")
    assert [len(ids) for ids in server.encode([s.text for s in found])] == [len(s.prompt_ids) for s in samples]
    assert align_to_server(samples, live.url, "fake", "wrong") == samples, "as they are, where nobody counts"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"dataset_name": "random", "workload": "burst", "num": 1000}),
        ({"in_len": 5}, {"dataset_name": "ids", "workload": "burst", "in_len": 5}),
        ({"rate": 5.0}, {"dataset_name": "random", "workload": "gamma", "rate": 5.0, "num": 1000}),
        ({"rate": float("inf"), "num": 2}, {"dataset_name": "random", "workload": "burst", "num": 2}),
        (
            {"dataset_name": "random", "in_len": 5, "out_len": 6, "num": 2},
            {"random_input_len": 5, "random_output_len": 6},
        ),
        ({"dataset_name": "custom", "out_len": 6, "num": 2}, {"custom_output_len": 6}),
        ({"host": "::1", "in_len": 5}, {"url": "http://[::1]:8000"}),
        ({"max_concurrency": 3}, {"procs": 1}),
    ],
)
def test_what_follows_from_what_was_given(given, expected, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert expected.items() <= completed(given).items()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"host": "a", "url": "b"}, "either --url, or --host"),
        ({"dataset_name": "random", "cycle": "1"}, "cycle requires dataset_name ids"),
        ({"dataset_name": "random", "cycle": "1", "vocab": 9}, "cycle requires dataset_name ids"),
        ({"dataset_name": "random", "vocab": 9, "cycle": "1"}, "vocab requires dataset_name ids"),
        ({"dataset_name": "sharegpt", "in_len": 1}, "in_len requires"),
        ({"dataset_name": "timed_trace", "out_len": 1}, "out_len"),
        ({"max_concurrency": 3, "procs": 2}, "procs must be 1"),
        ({"ramp_up_strategy": "linear", "rate": 1.0}, "--ramp-up-strategy cannot be combined with --rate"),
    ],
)
def test_what_contradicts_itself_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        completed(given)


@pytest.mark.parametrize(
    "argv",
    [
        ["--ramp-up-strategy", "linear"],
        ["--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "5"],
        ["--header", "nothing"],
        ["--extra-body", "[1]"],
        ["--max-concurrency", "0"],
        ["--goodput", "ttft"],
    ],
)
def test_refused_by_name_before_anything_is_sent(argv, capsys):
    assert cli.main(["bench", "serve", "--url", "http://127.0.0.1:9", *argv]) == 2
    assert argv[0].partition("strategy")[0] in capsys.readouterr().err.splitlines()[-1]


def test_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "from-there")
    assert completed({})["api_key"] == "from-there" and completed({"api_key": "own"})["api_key"] == "own"
