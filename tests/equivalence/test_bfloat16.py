"""Whole models in bfloat16, on a GPU if there is one: every way of running them, compared with each other and float32.

`near_ties` defines the rule. The reference is this engine in float32 on a CPU with the same weights, which
`test_transformers` compares with transformers.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
import torch

from tests.equivalence.models import OTHER_SHAPES, SHAPES, SMALL_SHAPES, save_model
from tests.equivalence.near_ties import Compared, DifferentError, compare
from tests.equivalence.runs import CUDA, LENGTHS, PROMPTS, SETTINGS, Run, Runs, run, start
from tests.helpers.cases import cases

MODELS = {**SHAPES, **OTHER_SHAPES} if CUDA else SMALL_SHAPES
# Of log probabilities, where logits have a standard deviation of about 1 and are themselves rounded to 1/64 beyond 2.
TOLERANCE = 0.12

NORM_AFTER_ATTENTION = ("olmo2", "olmo3", "exaone4", "glm4", "gemma3")
ON_CUDA = ("graphs", "torch")  # elsewhere these are the plain setting
NAMES = [name for name in SETTINGS if CUDA or name not in ON_CUDA]
PAIRS = [("depth 2", "graphs" if CUDA else "plain"), *((name, "plain") for name in NAMES if name != "plain")]
# On a CPU the last setting, which contains the others, stands for them.
USUAL = [name for name in NAMES if CUDA or name in ("plain", "all at once")]
USUAL_MODELS = [name for name in MODELS if CUDA or name in ("qwen3", "gpt-oss-mxfp4")]
USUAL_PAIRS = [(name, other) for name, other in PAIRS if name in USUAL]


class Model:
    """Checkpoint with the results of its runs so far."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family, self._folder = family, folder
        self.path = save_model(family, MODELS[family], folder / "right")
        self._runs = Runs(self.path)

    @cached_property
    def reference(self) -> Run:
        core = start(self.path, "cpu", "float32")
        found = run(core)
        core.close()
        return found

    def run(self, setting: str) -> Run:
        return self._runs.run(setting, "cuda" if CUDA else "cpu", "bfloat16")

    def wrong(self, attention_gain: float) -> Run:
        gains = dict.fromkeys(("s.1.self_attn.o_proj.weight", "h.1.attn.c_proj.weight"), attention_gain)
        path = save_model(self.family, MODELS[self.family], self._folder / "wrong", gains)
        core = start(path, "cuda" if CUDA else "cpu", "bfloat16")
        found = run(core)
        core.close()
        return found


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in USUAL_MODELS else pytest.mark.exhaustive) for name in MODELS],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    yield Model(request.param, tmp_path_factory.mktemp(request.param))
    if CUDA:
        torch.cuda.empty_cache()


def check(ours: Run, theirs: Run) -> Compared:
    """Compare two runs. Check also that enough was compared, and that the tolerance fits the size of the logits."""
    seen = compare(ours, theirs, TOLERANCE)
    assert seen.tokens > len(PROMPTS["long"]) + sum(LENGTHS.values()) // 4
    assert -6.5 < sum(entry.logprob for entry in ours["short:0"]) / LENGTHS["short"] < -1
    print(seen)
    return seen


@cases("setting", USUAL, exhaustive=[name for name in NAMES if name not in USUAL])
def test_bfloat16_is_float32_but_for_near_ties(model: Model, setting: str) -> None:
    seen = check(model.run(setting), model.reference)
    assert seen.worst > 0, "nothing was rounded: was it bfloat16?"


@cases(("setting", "other"), USUAL_PAIRS, exhaustive=[pair for pair in PAIRS if pair not in USUAL_PAIRS])
def test_ways_of_running_agree_except_at_near_ties(model: Model, setting: str, other: str) -> None:
    check(model.run(setting), model.run(other))


def test_a_small_mistake_is_more_than_rounding(model: Model) -> None:
    """The mistake: one layer's attention is too large by 15%. A norm after the attention would undo it."""
    if model.family in NORM_AFTER_ATTENTION:
        pytest.skip("its norm undoes the mistake")
    wrong = model.wrong(attention_gain=1.15)
    for right in (model.reference, model.run("plain")):
        with pytest.raises(DifferentError):
            compare(wrong, right, TOLERANCE)
