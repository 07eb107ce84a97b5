"""`--length-predictor`: what a trained predictor says of a prompt goes to the engine with it."""

import asyncio
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from roseinfer.cli import main as cli
from roseinfer.config.hub import load_tokenizer
from roseinfer.core.config.engine import ModelConfig
from roseinfer.core.config.server import ServerConfig
from roseinfer.core.errors import ConfigError
from roseinfer.predictor.config import TrainConfig
from roseinfer.predictor.data import TrainingRows
from roseinfer.predictor.model import LengthPredictor
from roseinfer.predictor.train import train
from roseinfer.predictor.vocabulary import fingerprint
from roseinfer.server.observe.report import Observation
from roseinfer.server.request.length_prediction import LengthPrediction, length_prediction
from roseinfer.server.text_work.offload import Offload
from roseinfer.text.tokenizer import Tokenizer
from tests.helpers.engine_info import changed
from tests.server.fake_engine import INFO
from tests.server.live import LiveServer
from tests.server.real_server import RealServer, priced

OBJECTIVE = {"slo": {"ttft_ms": 60_000, "tpot_ms": 60_000}}
RATIO, SECONDS = "roseinfer:length_prediction_ratio", "roseinfer:length_prediction_seconds"
REPLY = "hello world, def words"


def trained(tokenizer: Tokenizer | None) -> LengthPredictor:
    """For a tokenizer's vocabulary, or, as older files, without a word on it."""
    rng, rows = random.Random(0), TrainingRows()
    for _ in range(80):
        rows.add([rng.randrange(2, 300) for _ in range(6)], rng.randrange(20, 200))
    known = "" if tokenizer is None else fingerprint(tokenizer.backend.get_vocab(with_added_tokens=True))
    return train(rows, TrainConfig(epochs=1), known).predictor


@pytest.fixture(scope="module")
def predictor(tokenizer: Tokenizer) -> LengthPredictor:
    return trained(tokenizer)


@pytest.fixture(scope="module")
def file(predictor: LengthPredictor, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("predictor") / "lengths")
    predictor.save(path)
    return path


@pytest.fixture(scope="module")
def shared(tokenizer: Tokenizer, file: str) -> Iterator[LiveServer]:
    """The server of this file's tests: it has a predictor, and room for what that predicts."""
    live = LiveServer(tokenizer, ServerConfig(length_predictor=file))
    live.info = changed(INFO, max_model_len=4096)
    with live:
        yield live


def send(server: LiveServer, **body: Any) -> list[int | None]:
    """The predictions that the engine got with a completion, prompt by prompt."""
    before = len(server.engine.requests)
    answer = server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 400, **body})
    assert answer.status_code == 200, answer.text
    return [request.prompt.meta.predicted_len for request in server.engine.requests[before:]]


def test_a_prediction_reaches_the_engine(server: LiveServer, predictor: LengthPredictor) -> None:
    assert send(server, **OBJECTIVE) == [predictor.predict([5, 6, 7])]
    prompts = [[5, 6, 7], [9] * 40, [8]]
    assert send(server, prompt=prompts, **OBJECTIVE) == predictor.predict_batch(prompts)


def test_chats_and_streams(server: LiveServer, predictor: LengthPredictor) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "stream": True, **OBJECTIVE}
    assert server.post("/v1/chat/completions", body).status_code == 200
    (request,) = server.engine.requests
    assert request.prompt.meta.predicted_len == predictor.predict(request.prompt.ids)


def test_only_for_requests_with_an_objective(server: LiveServer) -> None:
    before = server.metric(SECONDS + "_count")
    assert send(server) == [None]
    assert send(server, slo={}) == [None]
    assert server.metric(SECONDS + "_count") == before


def test_what_the_client_says_wins(server: LiveServer) -> None:
    before = server.metric(SECONDS + "_count"), server.metric(RATIO + "_count")
    assert send(server, pred_output_len=11, **OBJECTIVE) == [11]
    assert (server.metric(SECONDS + "_count"), server.metric(RATIO + "_count")) == before


def test_never_above_max_tokens(server: LiveServer) -> None:
    assert send(server, max_tokens=3, **OBJECTIVE) == [3]
    assert send(server, max_tokens=0, echo=True, **OBJECTIVE) == [None]


def test_several_choices_need_one_prediction(server: LiveServer) -> None:
    before = server.metric(SECONDS + "_count"), server.metric(RATIO + "_count")
    assert len(send(server, n=3, prompt=[[5], [6]], max_tokens=30, **OBJECTIVE)) == 2
    assert server.metric(SECONDS + "_count") == before[0] + 2
    assert server.metric(RATIO + "_count") == before[1] + 6, "each sample shows how true it was"


def test_the_ratio_is_of_outputs_that_ended_by_themselves(server: LiveServer, tokenizer: Tokenizer) -> None:
    tokens = len(tokenizer.encode(REPLY, add_special_tokens=False))
    before = server.metric(RATIO + "_sum"), server.metric(RATIO + "_count")
    (predicted,) = send(server, max_tokens=50, **OBJECTIVE)
    assert predicted is not None
    assert server.metric(RATIO + "_sum") - before[0] == pytest.approx(predicted / tokens)
    assert server.metric(RATIO + "_count") == before[1] + 1
    send(server, max_tokens=tokens - 1, **OBJECTIVE)
    assert server.metric(RATIO + "_count") == before[1] + 1, "this one was cut"


def test_without_the_option_nothing_is_predicted_or_shown(serve: Callable[..., LiveServer]) -> None:
    server = serve()
    assert send(server, max_tokens=9, **OBJECTIVE) == [None]
    assert "length_prediction" not in server.get("/metrics").text


def test_a_failing_predictor_fails_no_request(server: LiveServer, monkeypatch, caplog) -> None:
    def fail(self: LengthPredictor, token_ids: Sequence[int]) -> int:
        raise MemoryError("planted")

    monkeypatch.setattr(LengthPredictor, "predict", fail)
    with caplog.at_level(logging.ERROR):
        assert send(server, prompt=[[5], [6]], **OBJECTIVE) == [None, None]
        assert send(server, **OBJECTIVE) == [None]
    assert sum("length predictor failed" in record.getMessage() for record in caplog.records) == 1


def test_it_predicts_off_the_event_loop(server: LiveServer, monkeypatch) -> None:
    threads: list[str] = []
    monkeypatch.setattr(
        LengthPredictor, "predict", lambda self, ids: threads.append(threading.current_thread().name) or 7
    )
    assert send(server, **OBJECTIVE) == [7]
    assert len(threads) == 1 and threads[0].startswith("roseinfer-text")


# --- the file -----------------------------------------------------------------------------------------------------
def loaded(path: str, tokenizer: Tokenizer) -> LengthPrediction | None:
    with closing(Offload()) as offload:
        return length_prediction(path, tokenizer, offload, lambda: Observation("fake").models[0].lengths())


def test_files_that_cannot_be_used(predictor: LengthPredictor, tokenizer: Tokenizer, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"length_predictor: there is no file .*nowhere"):
        loaded(str(tmp_path / "nowhere"), tokenizer)
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ConfigError, match=r"length_predictor: .* is no length predictor"):
        loaded(str(tmp_path / "text"), tokenizer)
    other = replace(predictor.settings, vocabulary="0123456789abcdef", tokenizer="somebody/else")
    LengthPredictor(other, predictor.weights).save(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="trained with the tokenizer of 'somebody/else'"):
        loaded(str(tmp_path / "other"), tokenizer)


def test_an_older_file_is_used_with_a_warning(tokenizer: Tokenizer, tmp_path, caplog) -> None:
    trained(None).save(str(tmp_path / "old"))
    with caplog.at_level(logging.WARNING):
        assert loaded(str(tmp_path / "old"), tokenizer) is not None
    assert "names no vocabulary" in caplog.text


@pytest.mark.parametrize("workers", ["1", "2"])
def test_serve_refuses_before_the_model_loads(workers: str, file: str, tmp_path, capsys, monkeypatch) -> None:
    """`file` was trained for the tests' tokenizer, not for the embedded model's."""

    async def never(*given: object) -> None:
        raise AssertionError("the server starts")

    monkeypatch.setattr("roseinfer.server.run.serve", never)
    monkeypatch.setattr("roseinfer.server.workers.manager.serve_with_workers", never)
    (tmp_path / "text").write_text("hello")
    cases = [
        (["--length-predictor", str(tmp_path / "nowhere")], "--length-predictor: there is no file"),
        (["--length-predictor", str(tmp_path / "text")], "is no length predictor"),
        (["--length-predictor", file], "which is not this model's"),
        (["--length-predictor", file, "--length-estimator", "ecdf"], "--length-estimator ecdf uses no predictions"),
        (["--length-predictor", file, "--scheduling-policy", "fifo"], "policy fifo uses no predictions"),
    ]
    for options, message in cases:
        assert cli.main(["serve", "tiny", "--port", "0", "--api-workers", workers, *options]) == 2
        assert message in capsys.readouterr().err


# --- all of it ----------------------------------------------------------------------------------------------------
def test_two_workers_and_a_priced_engine(tmp_path: Path) -> None:
    """The engine's recording shows the predictions that came with requests."""
    predictor, path, recording = trained(load_tokenizer(ModelConfig())), tmp_path / "lengths", tmp_path / "run.jsonl"
    predictor.save(str(path))
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 300, **OBJECTIVE}
    options = ("--api-workers", "2", "--length-predictor", str(path), "--record", str(recording))
    with RealServer(*priced(tmp_path, step_s=0.0), *options) as server:

        async def ask() -> list[httpx.Response]:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))

        answers = asyncio.run(ask())
        assert {answer.status_code for answer in answers} == {200}
        ended = sum(answer.json()["choices"][0]["finish_reason"] == "stop" for answer in answers)
        assert server.metrics(SECONDS + "_count", RATIO + "_count") == [8, ended], "of both workers"
        plain = server.http.post("/v1/completions", json=body | {"slo": None})
        assert plain.status_code == 200
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    predictions = [line["predicted_len"] for line in lines if "request" in line]
    assert predictions == [predictor.predict([5, 6, 7])] * 8 + [None]
