"""The check of windows on a GPU, small, under Triton's interpreter; and that it notices a wrong window."""

from dataclasses import replace

import pytest
import torch

from benchmarks import attention_check
from benchmarks.attention_check import Bench, Sizes, WrongResultError, border_contexts, check_results
from roseinfer.kernels.triton_support import HAS_TRITON
from tests.helpers.attention import spec_of
from tests.helpers.interpreter import allow_loaded_loop_bounds

SMALL = Sizes(spec_of(4, 2, 16, window=24), longest=96, rows=20, chunk=40, dtype=torch.float32)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="runs under the interpreter")


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_loaded_loop_bounds(monkeypatch)
    torch.manual_seed(0)


def test_both_backends_agree(capsys: pytest.CaptureFixture[str]) -> None:
    check_results(Bench(SMALL, CPU))
    assert capsys.readouterr().out.count("relative error 0.0000") == 6


def test_contexts_lie_on_both_sides_of_the_border() -> None:
    contexts = border_contexts(SMALL)
    assert {23, 24, 25, 96} <= set(contexts) and len(contexts) <= SMALL.rows


def test_a_window_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SMALL, CPU)
    wrong = bench.by_kernels(25)
    monkeypatch.setattr(bench, "by_kernels", lambda window: replace(wrong, spec=replace(wrong.spec, window=25)))
    monkeypatch.setattr(attention_check, "TOLERANCE", 1e-3)
    with pytest.raises(WrongResultError, match="window 24"):
        check_results(bench)
