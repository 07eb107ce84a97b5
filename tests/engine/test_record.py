"""Recording of a run, also after the engine ends unexpectedly."""

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from roseinfer import LLM, SamplingParams, StructuredOutputsParams
from roseinfer.cli import main as cli
from roseinfer.core.errors import ConfigError, InvalidRequestError
from roseinfer.core.plan import RowResult, StepPlan, StepResult
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add
from roseinfer.engine.record import RecordingCore, engine_recorder
from roseinfer.sim.parity import parity_of
from roseinfer.sim.replay import read_recording, replay
from tests.helpers.drafters import Script
from tests.helpers.engines import make_core
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.guides import ArithmeticGuides
from tests.helpers.process_table import alive
from tests.server.real_server import RealServer, priced, until

COUNT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in file.read_text().splitlines()]


def recording(core: EngineCore, file: Path) -> RecordingCore:
    """Return a recording core with the parts of another core."""
    return RecordingCore(engine_recorder(file), core.scheduler, core.runner, core.clock, eos_ids=(3,), vocab_size=50)


def run_all(core: EngineCore) -> None:
    while core.busy:
        core.step()
    core.close()


def test_the_offline_engine_records_too(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with LLM("tiny", threads=1, record=str(file)) as llm:
        (said,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    found = read_recording(str(file))
    assert [add.prompt.ids for add in found.requests] == [[5, 6, 7]]
    assert list(found.outputs["0:0"].values()) == said.outputs[0].token_ids
    assert found.ends["0:0"].tokens == 8
    assert parity_of(str(file)).plans_agree


def test_the_file_is_private_and_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    for _ in range(2):
        run_all(recording(make_core(), file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [list(line) for line in lines(file)] == [["setup"]]


def test_an_existing_file_becomes_private(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.touch(0o644)
    run_all(recording(make_core(), file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_start_that_is_refused_keeps_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text("earlier\n")
    with pytest.raises(ConfigError, match="cannot record an engine with LoRA adapters"):
        LLM("tiny", threads=1, num_kv_blocks=16, enable_lora=True, record=str(file))
    assert file.read_text() == "earlier\n"


class FailingRunner(FakeRunner):
    """Runner in which one request of a step fails."""

    def collect(self, handle: StepPlan) -> StepResult:
        result = super().collect(handle)
        rows = [RowResult(r.request_id, error="broken") if r.request_id == "b:0" else r for r in result.rows]
        return StepResult(result.step, rows, result.duration_s)


def test_a_request_that_fails_fails_again(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    core = recording(make_core(runner=FailingRunner(64, 4, 50), scheduling_policy="fifo"), file)
    for name in ("a", "b"):
        core.add(Add(name, Prompt([5, 6, 7], SequenceParams(max_tokens=4))))
    run_all(core)
    found = read_recording(str(file))
    assert found.ends["b:0"].reason == "error"
    assert replay(found).plans == found.plans


def test_drafts_and_guides_cannot_be_recorded(tmp_path: Path) -> None:
    for number, options in enumerate(({"drafter": Script()}, {"guides": ArithmeticGuides()})):
        core = make_core(**options)
        guides = {name: given for name, given in options.items() if name == "guides"}
        recorder = engine_recorder(tmp_path / f"{number}.jsonl")
        with pytest.raises(ConfigError, match="cannot record a run with drafts or guides"):
            RecordingCore(recorder, core.scheduler, core.runner, core.clock, vocab_size=50, **guides)


def test_an_engine_that_records_rejects_constraints(tmp_path: Path) -> None:
    with LLM("tiny", threads=1, num_kv_blocks=16, record=str(tmp_path / "run.jsonl")) as llm:
        guided = SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(choice=["a"]))
        with pytest.raises(
            InvalidRequestError, match=r"an engine that records \(--record\) cannot constrain outputs"
        ) as raised:
            llm.generate("x", guided)
        assert raised.value.param is None, "a guide is no field of a request"
        assert llm.generate("x", SamplingParams(max_tokens=2))[0].outputs[0].token_ids


def test_rejected_requests_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    core = recording(make_core(), file)
    with pytest.raises(Exception, match="vocabulary"):
        core.add(Add("a", Prompt([99], SequenceParams())))
    run_all(core)
    assert read_recording(str(file)).requests == []


def test_a_run_that_was_cut_off_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    core = recording(make_core(), file)
    core.add(Add("a", Prompt([5, 6, 7], SequenceParams(max_tokens=6, ignore_eos=True))))
    run_all(core)
    whole = read_recording(str(file))
    text = file.read_text()
    file.write_text(text[: text.index('{"step":3') + 20])
    cut = read_recording(str(file))
    assert cut.turns == whole.turns[:3] and not cut.ends
    assert replay(cut).plans == whole.plans[:3]


def test_a_full_disk_ends_the_recording_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no full disk to write to")
    recorder = engine_recorder(Path("/dev/full"))
    inner = make_core()
    core = RecordingCore(recorder, inner.scheduler, inner.runner, inner.clock, eos_ids=(3,), vocab_size=50)
    core.add(Add("a", Prompt([5, 6, 7], SequenceParams(max_tokens=6, ignore_eos=True))))
    recorder.flush(1e9)
    run_all(core)
    assert "cannot write the recording" in caplog.text


def test_an_unwritable_path_stops_the_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "no" / "run.jsonl", tmp_path):
        with pytest.raises(ConfigError, match="cannot write"):
            LLM("tiny", record=str(path))
    assert cli.main(["serve", "tiny", "--port", "0", "--record", str(tmp_path / "no" / "run.jsonl")]) == 2
    assert "--record" in capfd.readouterr().err


def test_a_server_writes_its_run_and_loses_little_when_its_engine_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    options = ("--record", str(file), *priced(tmp_path, step_s=0.005))
    with RealServer(*options) as server:
        assert server.http.post("/v1/completions", json=COUNT).is_success
        server.process.terminate()
        assert server.exit_code() == 0
    parity = parity_of(str(file))
    assert parity.plans_agree and parity.requests == 1 and parity.turns >= 40
    with RealServer(*options) as server:
        with server.http.stream("POST", "/v1/completions", json={**COUNT, "max_tokens": 1200, "stream": True}) as said:
            text = said.iter_lines()  # closes the stream when it is forgotten
            assert said.is_success and next(text)
            begun = file.stat().st_size
            until(lambda: file.stat().st_size > begun)  # written while it runs
            os.kill(server.engine, signal.SIGKILL)
        until(lambda: not alive(server.engine))
    parity = parity_of(str(file))
    assert parity.plans_agree and parity.turns > 1 and parity.compared == 0
