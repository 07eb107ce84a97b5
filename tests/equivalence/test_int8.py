"""Weights and activations in int8, in whole models: every way of running them, and what it costs in quality.

Sums of codes are exact, so ways differ by the order of attention's sums alone, which now and then makes the next code.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roseinfer.models.config import read_model_spec
from roseinfer.models.loader import load_model
from roseinfer.quant.int8_product import why_not
from tests.equivalence.models import SMALL_SHAPES, save_model
from tests.equivalence.near_ties import DifferentError, compare
from tests.equivalence.runs import SETTINGS, Run, check_what_happened, run, start
from tests.helpers.batches import HandRunner
from tests.helpers.held_out import TINY, all_logits, held_out_tokens, loss_of

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"int8 does not run here: {why_not()}")

# Of log probabilities, which differ by .1 and more from those in float32.
TOLERANCE = 0.05
NAMES = [name for name in SETTINGS if name not in ("plain", "graphs", "torch")]


class Model:
    def __init__(self, family: str, folder: Path) -> None:
        self._path = save_model(family, SMALL_SHAPES[family], folder)
        self._runs: dict[tuple[str, str | None], Run] = {}

    def run(self, setting: str, quantization: str | None = "int8") -> Run:
        """The second of two rounds, which meets a warm prefix cache if there is one."""
        if (setting, quantization) not in self._runs:
            core = start(self._path, "cpu", "float32", **{**SETTINGS[setting], "quantization": quantization})
            self._runs[setting, quantization] = [run(core) for _ in range(2)][1]
            check_what_happened(core, setting)
            core.close()
        return self._runs[setting, quantization]


@pytest.fixture(scope="module", params=["gpt2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("setting", NAMES)
def test_ways_of_running_agree(model: Model, setting: str) -> None:
    seen = compare(model.run(setting), model.run("plain"), TOLERANCE)
    print(seen)
    assert seen.tokens > 100


def test_it_is_not_what_floats_would_be(model: Model) -> None:
    """Or the tolerance would say nothing."""
    with pytest.raises(DifferentError):
        compare(model.run("plain"), model.run("plain", None), TOLERANCE)


def held_out(quantization: str | None, dtype: str = "float32") -> torch.Tensor:
    model = load_model(
        TINY,
        read_model_spec(TINY),
        dtype=dtype,
        device=torch.device("cpu"),
        load_format="auto",
        seed=0,
        quantization=quantization,
    )
    return all_logits(HandRunner(model, num_blocks=256), held_out_tokens())


def test_a_trained_model_foretells_unseen_text_as_well() -> None:
    exact, found = held_out(None), held_out("int8")
    assert 0.995 < float(F.cosine_similarity(found.flatten().double(), exact.flatten().double(), 0)) < 1.0
    assert F.cosine_similarity(found, exact).min() > 0.99, "of each token's logits, too"
    assert loss_of(found, held_out_tokens()) == pytest.approx(loss_of(exact, held_out_tokens()), rel=0.01)


def test_beside_activations_in_bfloat16() -> None:
    tokens = held_out_tokens()
    assert loss_of(held_out("int8", "bfloat16"), tokens) == pytest.approx(loss_of(held_out(None), tokens), rel=0.01)
