"""Steps that are compiled ahead: every number of rows, and again with adapters. Nothing is compiled here."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from roseinfer.core.plan import StepLimits
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.runner.forward import Columns, Forwarded
from roseinfer.runner.rows import SampleAt

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from roseinfer.runner import compile_ahead


@contextmanager
def pretending() -> Iterator[bool]:
    yield True


@pytest.mark.parametrize("slots", [None, torch.zeros(5)], ids=["no adapters", "adapters"])
def test_steps(slots: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "compiling", pretending)
    launched: list[tuple[bool, tuple[int, ...]]] = []
    seats = SimpleNamespace(adapter_slots=slots, adapted=set(), seats=[None] * 4)

    def run(columns: Columns) -> Forwarded:
        launched.append((not seats.adapted.isdisjoint(columns.seat), columns.count))
        return Forwarded(hidden=torch.zeros(0), sample_at=SampleAt(torch.zeros(0), torch.zeros(0)))

    assembly = SimpleNamespace(seats=seats, runner=None, forward=SimpleNamespace(run=run), draft_steps=None)
    model = SimpleNamespace(spec=SimpleNamespace(experts=None), normed=lambda hidden: hidden)
    compile_ahead.compile_ahead(assembly, model, StepLimits(4, 600))  # type: ignore[arg-type]
    steps = [(1,), (1,) * 2, (1,) * 4, (2,), (600,)]
    plain, adapted = ([count for with_one, count in launched if with_one is wanted] for wanted in (False, True))
    assert sorted(plain) == sorted(steps)
    assert sorted(adapted) == (sorted([*steps, (512,)]) if slots is not None else [])
    assert not seats.adapted
