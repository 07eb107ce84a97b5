"""Whole models with weights and activations in int8: every way of running them, and the loss of quality.

Sums of codes are exact. Ways of running differ only by the order of attention's sums, which sometimes changes a code.
"""

from pathlib import Path

import pytest
import torch.nn.functional as F

from roseinfer.quant.int8_product import unsupported_reason
from tests.equivalence.models import SMALL_SHAPES, save_model
from tests.equivalence.near_ties import DifferentError, compare
from tests.equivalence.runs import SETTINGS, Run, Runs
from tests.helpers.cases import cases
from tests.helpers.held_out import cosine, held_out_logits, held_out_tokens, loss_of

pytestmark = pytest.mark.skipif(
    unsupported_reason() is not None, reason=f"int8 is not supported: {unsupported_reason()}"
)

# Of log probabilities, which differ by .1 and more from those in float32.
TOLERANCE = 0.05
# The last setting contains the others.
NAMES = [name for name in SETTINGS if name not in ("plain", "graphs", "torch")]


class Model:
    def __init__(self, family: str, folder: Path) -> None:
        self._runs = Runs(save_model(family, SMALL_SHAPES[family], folder))

    def run(self, setting: str, quantization: str | None = "int8") -> Run:
        return self._runs.run(setting, quantization=quantization)


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@cases("setting", ["all at once"], exhaustive=[name for name in NAMES if name != "all at once"])
def test_ways_of_running_agree(model: Model, setting: str) -> None:
    seen = compare(model.run(setting), model.run("plain"), TOLERANCE)
    print(seen)
    assert seen.tokens > 100


def test_int8_differs_from_float32_by_more_than_the_tolerance(model: Model) -> None:
    """Otherwise the tolerance would show nothing."""
    with pytest.raises(DifferentError):
        compare(model.run("plain"), model.run("plain", None), TOLERANCE)


def test_a_trained_model_predicts_unseen_text_as_well() -> None:
    exact, found = held_out_logits(), held_out_logits(quantization="int8")
    assert 0.995 < cosine(found, exact) < 1.0
    assert F.cosine_similarity(found, exact).min() > 0.99, "of each token's logits, too"
    assert loss_of(found, held_out_tokens()) == pytest.approx(loss_of(exact, held_out_tokens()), rel=0.01)


def test_beside_activations_in_bfloat16() -> None:
    tokens = held_out_tokens()
    found = held_out_logits("bfloat16", quantization="int8")
    assert loss_of(found, tokens) == pytest.approx(loss_of(held_out_logits(), tokens), rel=0.01)
