"""Whole models with K and V in FP8: every way of running them, and the loss of quality.

In float32, ways of running differ only by the order of sums, which sometimes changes the code of a key or value. On a
GPU these are the Triton kernels, with and without graphs.
"""

from pathlib import Path

import pytest

from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.build import build_engine
from roseinfer.engine.messages import Add
from roseinfer.engine.options import make_engine_config
from tests.equivalence.models import SMALL_SHAPES, save_model
from tests.equivalence.near_ties import DifferentError, compare
from tests.equivalence.runs import CUDA, SETTINGS, Run, Runs
from tests.helpers.cases import cases
from tests.helpers.held_out import TINY, held_out_tokens

# Of log probabilities, which differ by .1 and more from those with K and V as they are computed.
TOLERANCE = 0.01
NAMES = [name for name in SETTINGS if name != "plain" and (CUDA or name not in ("graphs", "torch"))]


class Model:
    def __init__(self, folder: Path) -> None:
        self._runs = Runs(save_model("qwen3", {**SMALL_SHAPES["qwen3"], "attention_bias": False}, folder))

    def run(self, setting: str, kept: str = "fp8") -> Run:
        return self._runs.run(setting, "cuda" if CUDA else "cpu", kv_cache_dtype=kept)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("qwen3"))


@cases("setting", NAMES if CUDA else NAMES[-1:], exhaustive=() if CUDA else NAMES[:-1])
def test_ways_of_running_agree(model: Model, setting: str) -> None:
    assert compare(model.run(setting), model.run("plain"), TOLERANCE).tokens > 100


def test_fp8_differs_from_16_bits_by_more_than_the_tolerance(model: Model) -> None:
    """Otherwise the tolerance would show nothing."""
    with pytest.raises(DifferentError):
        compare(model.run("plain"), model.run("plain", "auto"), TOLERANCE)


def embedded_loss(kept: str) -> float:
    """Return the embedded model's mean negative log likelihood per token of held-out text, in nats, in float32."""
    config = make_engine_config(model="tiny", device="cpu", dtype="float32", num_kv_blocks=96, kv_cache_dtype=kept)
    core = build_engine(config, TINY)[0]
    params = SequenceParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for number, ids in enumerate(held_out_tokens()):
        core.add(Add(str(number), Prompt(list(ids), params)))
    found: list[float] = []
    while core.busy:
        for output in core.step():
            assert output.end is None or output.end.error is None, output
            found += [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
    core.close()
    assert len(found) == sum(len(ids) - 1 for ids in held_out_tokens())
    return -sum(found) / len(found)


def test_held_out_loss() -> None:
    assert abs(embedded_loss("fp8") / embedded_loss("auto") - 1) < 0.005
