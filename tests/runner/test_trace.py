"""Traces of steps: which steps they contain, and that a viewer can read them."""

import json
import logging
from pathlib import Path

import pytest

from roseinfer import LLM, SamplingParams
from roseinfer.core.config.engine import ProfileConfig
from roseinfer.core.errors import ConfigError
from roseinfer.runner.trace import TraceObserver
from tests.server.real_server import RealServer

ENGINE = {"threads": 1, "num_kv_blocks": 64, "max_num_seqs": 4, "device": "cpu"}


def generate(tokens: int, folder: Path, **options) -> None:
    with LLM("tiny", **ENGINE, profile=str(folder), **options) as llm:
        llm.generate("def add(", SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True))


def spans(path: Path) -> list[str]:
    """Return our phases in a trace, in the order in which they begin."""
    events = json.loads(path.read_text())["traceEvents"]
    ours = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(ours, key=lambda event: event["ts"])]


def test_two_traces(tmp_path):
    generate(10, tmp_path / "new", profile_steps=2, profile_start=(5, 1))
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name for file in files] == ["trace-step-1.json", "trace-step-5.json"]
    for file in files:
        found = spans(file)
        assert [found.count(phase) for phase in ("plan", "forward", "sample", "collect")] == [1, 2, 2, 2]
        assert found[0] == "submit" and "prepare" in found and "commit" in found
        names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert any(str(name).startswith("aten::") for name in names)


def test_in_the_thread_of_an_overlapped_runner(tmp_path):
    generate(8, tmp_path, profile_steps=3, profile_start=(2,), overlap=True)
    assert spans(tmp_path / "trace-step-2.json").count("forward") == 3


def test_an_engine_that_ends_before_the_trace_does(tmp_path, caplog):
    generate(4, tmp_path, profile_start=(2,), profile_steps=50)
    assert spans(tmp_path / "trace-step-2.json").count("sample") == 2
    with caplog.at_level(logging.WARNING):
        generate(4, tmp_path / "none", profile_start=(99,))
    assert "no trace begins at step 99" in caplog.text and not list((tmp_path / "none").iterdir())


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="profile: cannot make"):
        TraceObserver(ProfileConfig(profile=str(tmp_path / "file" / "below")), cuda=False)


def test_a_trace_that_cannot_be_written_is_an_error_in_the_log(tmp_path, caplog):
    folder = tmp_path / "gone"
    traced = LLM("tiny", **ENGINE, profile=str(folder), profile_steps=2, profile_start=(1,))
    with caplog.at_level(logging.ERROR), traced as llm:
        folder.rmdir()
        llm.generate("def add(", SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [f"profile: a trace of 2 steps could not be written to {folder / 'trace-step-1.json'}"]


def test_options():
    assert ProfileConfig().profile is None and ProfileConfig().starts == (64,)
    assert ProfileConfig(profile_start=(30, 4)).starts == (4, 30)
    for options, named in [
        ({"profile_steps": 0}, "profile_steps"),
        ({"profile_start": (-1,)}, "profile_start"),
        ({"profile_start": (4, 10), "profile_steps": 7}, "overlap"),
    ]:
        with pytest.raises(ConfigError, match=named):
            ProfileConfig(**options)


@pytest.mark.exhaustive
def test_a_server_writes_traces(tmp_path):
    with RealServer("--profile", str(tmp_path), "--profile-start", "3", "--profile-steps", "2") as server:
        body = {"model": "tiny", "prompt": "def add(", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
        assert server.http.post("/v1/completions", json=body).status_code == 200
    assert spans(tmp_path / "trace-step-3.json").count("forward") == 2
