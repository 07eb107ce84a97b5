"""Observation of a runner: it changes nothing, and reports every phase."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from roseinfer import LLM, SamplingParams
from roseinfer.core.observer import PHASES
from roseinfer.core.plan import Row, StepPlan
from roseinfer.runner.cuda_graphs import DecodeGraphs
from roseinfer.runner.forward import Columns, EagerForward
from roseinfer.runner.trace import ObservedRunner
from tests.runner.fake_graphs import FakeRecorder

ENGINE = {"threads": 1, "num_kv_blocks": 64, "max_num_seqs": 4, "device": "cpu"}
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


class Recorder:
    """Records the spans as paths, and the steps that begin and end."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.steps: list[str] = []
        self._open: list[str] = []

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        assert phase in PHASES
        self._open.append(phase)
        self.paths.append("/".join(self._open))
        try:
            yield
        finally:
            assert self._open.pop() == phase

    def step_begins(self, plan: StepPlan) -> None:
        self.steps.append(f"begin {plan.step}")

    def step_ends(self, plan: StepPlan) -> None:
        self.steps.append(f"end {plan.step}")

    def close(self) -> None:
        self.steps.append("close")


def texts(recorder: Recorder | None, **options) -> list[str]:
    with LLM("tiny", observer=recorder, **ENGINE, **options) as llm:
        return [answer.outputs[0].text for answer in llm.generate(["def add(", "import"], PARAMS)]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_phase_of_every_step(overlap):
    """Compare spans per thread: with two steps in flight on a CPU only the runner's thread has a fixed order."""
    recorder = Recorder()
    assert texts(recorder, overlap=overlap) == texts(None)
    begun = [step for step in recorder.steps if step.startswith("begin")]
    assert len(begun) >= 6 and recorder.steps[-1] == "close"
    assert len([step for step in recorder.steps if step.startswith("end")]) == len(begun)
    if overlap:
        return
    counts = {path: recorder.paths.count(path) for path in set(recorder.paths)}
    inside = {"submit/prepare", "submit/forward", "submit/forward/prepare"}
    assert counts.keys() == {"plan", "submit", "sample", "collect", "commit", *inside}
    assert counts["submit"] == counts["collect"] == counts["commit"] == counts["submit/prepare"] == len(begun)
    assert counts["submit/forward/prepare"] >= 6


class Inputs:
    """Fake of `CudaInputs`."""

    has_adapters = False

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def adapted(self, columns):
        return False

    def stage_decodes(self, columns: Columns, bucket: int) -> None:
        self._done.append(f"stage {bucket}")


def test_captured_graphs_report_their_phases():
    """Use `DecodeGraphs` as built for a GPU, with fakes for all that touches one."""
    done: list[str] = []
    spec = SimpleNamespace(vocab_size=3)
    model = SimpleNamespace(spec=spec, padded_vocab=4, dtype=torch.float32, device=torch.device("cpu"))
    eager = EagerForward(model, None, None, lambda columns: done.append("prepare"))
    graph_recorder = FakeRecorder([None, None], on_replay=lambda number: done.append("replay"))
    graphs = DecodeGraphs(eager, model, None, None, Inputs(done), [1, 2], SimpleNamespace(), graph_recorder)
    graphs.capture(None)
    done.clear()
    recorder = Recorder()
    graphs.observe(recorder.span)
    one, chunk = Row("a", 0, 4, 1, 1, True, 4, 0, ()), Row("b", 0, 0, 4, 1, True, 0, 0, ())
    graphs.run(Columns.of([one]))
    assert done == ["stage 1", "replay"] and recorder.paths == ["prepare"]
    with pytest.raises(AttributeError):  # nothing was prepared
        graphs.run(Columns.of([chunk]))
    assert done[2:] == ["prepare"] and recorder.paths[1:] == ["prepare"]


def test_a_failed_phase_ends():
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("out of order")

    recorder = Recorder()
    runner = ObservedRunner(SimpleNamespace(submit=fail), recorder)
    with pytest.raises(RuntimeError, match="out of order"):
        runner.submit(StepPlan(0, []))
    with recorder.span("plan"):
        assert recorder.paths[-1] == "plan"
