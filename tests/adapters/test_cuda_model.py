"""Whole models whose products are those of a GPU, under Triton's interpreter, and copies of loads to slots."""

import ctypes

import pytest
import torch

from roseinfer.adapters import adapting
from roseinfer.adapters.cuda_loads import copies_of
from roseinfer.adapters.cuda_sums import AdapterSums
from roseinfer.adapters.slots import DeviceSlots, HostAdapter, LayerShape
from roseinfer.kernels.common.triton_support import HAS_TRITON
from roseinfer.quant import plain
from tests.adapters.driving import Driver, assert_close, build
from tests.adapters.test_equivalence import Case, prompt
from tests.helpers.cases import cases
from tests.helpers.interpreter import hurry

REQUESTS = [(prompt(19, 1), "small"), (prompt(3, 2), None), (prompt(1, 3), "large")]


@pytest.mark.skipif(not HAS_TRITON or torch.cuda.is_available(), reason="needs Triton's interpreter")
@cases("family", ["phi3"], exhaustive=["llama3", "gpt2"])
def test_rows_equal_those_of_a_cpu(family, tmp_path, monkeypatch):
    """Steps of both kinds: prompts in tiles of rows, then decodes of a few rows."""
    case = Case(family, tmp_path)
    expected = Driver(build(case.model, *case.named)).run(REQUESTS, outputs=2)
    hurry()
    monkeypatch.setattr(adapting, "has_triton", lambda device: True)
    monkeypatch.setattr(plain, "has_triton", lambda device: True)
    calls = []
    sums_of = AdapterSums.of
    monkeypatch.setattr(AdapterSums, "of", lambda *args: calls.append(len(args[1])) or sums_of(*args))
    driver = Driver(build(case.model, *case.named))
    found = driver.run(REQUESTS, outputs=2)
    assert {3, 23} <= set(calls)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_copies_of_a_load_fill_the_slot_only():
    shapes = [LayerShape(24, (16, 8)), LayerShape(16, (40,)), LayerShape(8, (8,))]
    slots = DeviceSlots(shapes, 3, 20, torch.float32, torch.device("cpu"))
    adapter = HostAdapter.empty(shapes, [(4, 9), (0,), (24,)], torch.float32, pinned=False)
    adapter.flat.normal_()
    for target, source, size in copies_of(slots, 1, adapter).T.tolist():
        ctypes.memmove(target, source, size)
    assert slots.hold(1, adapter) == [16, 0, 24]
    for layer, content in zip(slots.layers, adapter.layers, strict=True):
        for memory in (layer.a, layer.b):
            assert not memory[[0, 2]].any() and (content is not None or not memory.any())
        if content is not None:
            a, b = layer.content(1)
            assert torch.equal(a, content.a) and torch.equal(b, content.b)
    nothing = HostAdapter.empty(shapes, [(0, 0), (0,), (0,)], torch.float32, pinned=False)
    assert copies_of(slots, 0, nothing).shape == (3, 0) and slots.hold(0, nothing) == [0, 0, 0]
