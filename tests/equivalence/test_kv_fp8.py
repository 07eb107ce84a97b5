"""K and V in FP8, in whole models: every way of running them, and what it costs in quality.

Computed in float32, ways differ by the order of sums alone, which now and then makes the next code of a key or value.
On a GPU these are the Triton kernels, with graphs and without.
"""

from pathlib import Path

import pytest

from tests.equivalence.models import SMALL_SHAPES, save_model
from tests.equivalence.near_ties import DifferentError, compare
from tests.equivalence.runs import CUDA, SETTINGS, Run, check_what_happened, run, start
from tests.helpers.loss import embedded_loss

# Of log probabilities, which differ by .1 and more from those with K and V as they are computed.
TOLERANCE = 0.01
NAMES = [name for name in SETTINGS if name != "plain" and (CUDA or name not in ("graphs", "torch"))]


class Model:
    def __init__(self, folder: Path) -> None:
        self._path = save_model("qwen3", {**SMALL_SHAPES["qwen3"], "attention_bias": False}, folder)
        self._runs: dict[tuple[str, str], Run] = {}

    def run(self, setting: str, kept: str = "fp8") -> Run:
        """The second of two rounds, which meets a warm prefix cache if there is one."""
        if (setting, kept) not in self._runs:
            device = "cuda" if CUDA else "cpu"
            core = start(self._path, device, "float32", **{**SETTINGS[setting], "kv_cache_dtype": kept})
            self._runs[setting, kept] = [run(core) for _ in range(2)][1]
            check_what_happened(core, setting)
            core.close()
        return self._runs[setting, kept]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("setting", NAMES)
def test_ways_of_running_agree(model: Model, setting: str) -> None:
    assert compare(model.run(setting), model.run("plain"), TOLERANCE).tokens > 100


def test_it_is_not_what_16_bits_would_be(model: Model) -> None:
    """Or the tolerance would say nothing."""
    with pytest.raises(DifferentError):
        compare(model.run("plain"), model.run("plain", "auto"), TOLERANCE)


def test_held_out_loss() -> None:
    assert abs(embedded_loss(kv_cache_dtype="fp8") / embedded_loss() - 1) < 0.005
