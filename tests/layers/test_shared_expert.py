"""Layers with a shared expert: when it is one more of the stack, and when it has products of its own."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from roseinfer.layers import shared_expert
from roseinfer.layers.experts import RoutedExperts
from roseinfer.layers.shared_expert import SharedExperts
from roseinfer.quant.base import Build, ExpertNames, ExpertShape, WeightSource
from roseinfer.quant.expert_names import SharedExpertNames
from roseinfer.quant.fp8_format import Fp8Format
from roseinfer.quant.fp8_scheme import Fp8Scheme
from roseinfer.quant.int8_format import Int8Format
from roseinfer.quant.plain import PlainFormat
from tests.helpers.weights import BUILD, Named

SHAPE = ExpertShape(count=3, top_k=2, hidden=128, width=128, renormalise=True, activation="silu")
SHARED = SharedExpertNames(gate="shared.w1", up="shared.w3", down="shared.w2", factor="shared.gate")
NAMES = ExpertNames(router="gate", gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2", shared=SHARED)


def tensors(width: int, shared_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    found = {"gate.weight": torch.randn(3, 128), "shared.gate.weight": torch.randn(1, 128)}
    for owner, inner in (*((f"experts.{number}", 128) for number in range(3)), ("shared", width)):
        dtype = shared_dtype if owner == "shared" else torch.float32
        for name, shape in (("w1", (inner, 128)), ("w3", (inner, 128)), ("w2", (128, inner))):
            found[f"{owner}.{name}.weight"] = torch.randn(shape).to(dtype)
            if dtype is torch.float8_e4m3fn:
                found[f"{owner}.{name}.weight_scale_inv"] = torch.ones(1, 1)
    return found


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[ExpertShape]:
    """Pretend that kernels run here, and list the shapes of the experts that layers load."""
    found: list[ExpertShape] = []

    def load(self: RoutedExperts, source: WeightSource, names: ExpertNames) -> None:
        found.append(self._shape)

    monkeypatch.setattr(shared_expert, "has_triton", lambda device: True)
    monkeypatch.setattr(RoutedExperts, "load", load)
    return found


BLOCKS = Fp8Format(Fp8Scheme("block"), rounds=False, widens=True)
CASES: dict[str, tuple[bool, int, torch.dtype, dict[str, Any]]] = {
    "alike": (True, 128, torch.float32, {}),
    "wider": (False, 256, torch.float32, {}),
    "only the shared expert in FP8": (False, 128, torch.float8_e4m3fn, {"weight_format": BLOCKS}),
    "all rounded": (True, 128, torch.float32, {"weight_format": Fp8Format(None, rounds=True, widens=True)}),
    "all but the shared expert rounded": (
        False,
        128,
        torch.float32,
        {"weight_format": Fp8Format(Fp8Scheme("block", ignored=("shared",)), rounds=True, widens=True)},
    ),
    "int8": (False, 128, torch.float32, {"weight_format": Int8Format()}),
}


@pytest.mark.parametrize(("alike", "width", "dtype", "options"), CASES.values(), ids=CASES)
def test_what_is_stacked(
    alike: bool, width: int, dtype: torch.dtype, options: dict[str, Any], shapes: list[ExpertShape]
) -> None:
    build: Build = replace(BUILD, **options)
    SharedExperts(SHAPE, width).load(Named(tensors(width, dtype), build), NAMES)
    assert shapes == [replace(SHAPE, shared=alike)]


class Adapters:
    """Adapting that changes no product."""

    is_idle = True

    def adapt(self, matmul: Any, pieces: Any, epilogue: Any) -> Any:
        return matmul

    def begin(self, rows: Any) -> None:
        pass


def test_adapters_change_the_shared_expert_by_itself(shapes: list[ExpertShape]) -> None:
    build = replace(BUILD, adapting=Adapters(), weight_format=PlainFormat())
    SharedExperts(SHAPE, 128).load(Named(tensors(128), build), NAMES)
    assert shapes == [SHAPE]


def test_without_kernels_it_has_products_of_its_own() -> None:
    layer, source = SharedExperts(SHAPE, 128), Named(tensors(128))
    layer.load(source, NAMES)
    assert source.asked == source.tensors.keys()
