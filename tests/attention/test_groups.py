"""Layers that differ in heads or in KV groups: each kind in its part of the store, each group with its block tables."""

from dataclasses import replace

import pytest
import torch

from roseinfer.attention.base import AttentionBackend
from roseinfer.attention.batch import ForwardBatch, Paging
from roseinfer.attention.groups import KVGroups
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.kernels.common.triton_support import HAS_TRITON
from tests.helpers.attention import shape_of, spec_of
from tests.helpers.batches import Blocks, HandRow, make_batch
from tests.helpers.interpreter import hurry
from tests.helpers.paged import assert_near

BLOCK, LENGTH, WINDOW = 4, 40, 9
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    hurry()
    torch.manual_seed(0)


def make_store(specs: list[AttentionSpec], groups: KVGroups | None = None) -> KVStore:
    store = KVStore(64, BLOCK, specs, torch.float32, DEVICE, groups, [64] if groups else ())
    for part in store.parts:
        part.fill_(float("nan"))
    return store


def steps(table: list[int]) -> list[ForwardBatch]:
    """Run a prompt in two chunks, then decodes, of one sequence."""
    spans = [(0, 17), (17, 20), (37, 1), (38, 1), (39, 1)]
    rows = [HandRow(tokens=[0] * (start + count), table=table, start=start, count=count) for start, count in spans]
    return [make_batch([row], BLOCK, DEVICE) for row in rows]


def projections(specs: list[AttentionSpec], batch: ForwardBatch) -> list[torch.Tensor]:
    return [torch.randn(len(batch.input_ids), spec.qkv_width, device=DEVICE) for spec in specs]


def run(backend: AttentionBackend, store: KVStore, batch: ForwardBatch, specs, qkvs) -> list[torch.Tensor]:
    backend.begin(batch, store)
    return [
        backend.forward(layer, qkv.clone(), HeadTransform(spec))
        for layer, (spec, qkv) in enumerate(zip(specs, qkvs, strict=True))
    ]


def test_layers_of_different_heads_in_one_store() -> None:
    """The results are those of a model for each kind of layer."""
    specs = [spec_of(4, 2, 8), spec_of(2, 1, 16, window=WINDOW), spec_of(4, 2, 8, window=WINDOW), spec_of(6, 2, 8)]
    together, store = TorchAttention(specs, torch.float32), make_store(specs)
    apart = [(TorchAttention([spec], torch.float32), make_store([spec])) for spec in specs]
    for batch in steps(Blocks(64, BLOCK).table(LENGTH)):
        qkvs = projections(specs, batch)
        out = run(together, store, batch, specs, qkvs)
        for (backend, alone), spec, qkv, got in zip(apart, specs, qkvs, out, strict=True):
            assert_near(got, run(backend, alone, batch, [spec], [qkv])[0])


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_layer_takes_tables_and_slots_of_its_group(backend: str) -> None:
    """The window's group frees blocks as soon as they precede the window, and other requests write to them."""
    if backend == "triton" and not HAS_TRITON:
        pytest.skip("Triton is not installed")
    specs = [spec_of(4, 2, 16), spec_of(4, 2, 16, window=WINDOW), spec_of(4, 2, 16)]
    ours, one_group = make_backend(backend, specs), TorchAttention(specs, torch.float32)
    store, expected_store = make_store(specs, KVGroups.by_window(specs, LENGTH)), make_store(specs)
    blocks = Blocks(64, BLOCK)
    full, windowed = blocks.table(LENGTH), blocks.table(LENGTH)
    for ordinary, of_window in zip(steps(full), steps(windowed), strict=True):
        qkvs = projections(specs, ordinary)
        hidden = max(0, int(of_window.positions[0]) - WINDOW + 1) // BLOCK
        for cache in store.layer(1):
            cache[windowed[:hidden]] = float("nan")
        tables = of_window.paging[0].tables.clone()
        tables[:, :hidden] = -(10**6)
        grouped = replace(ordinary, paging=(*ordinary.paging, Paging(tables, of_window.paging[0].slots)))
        out = run(ours, store, grouped, specs, qkvs)
        for got, wanted in zip(out, run(one_group, expected_store, ordinary, specs, qkvs), strict=True):
            assert_near(got, wanted)
    assert store.layer(1)[0][full].isnan().all(), "the window's layer keeps nothing in the other group's blocks"


def test_layers_form_groups_by_their_windows() -> None:
    full, short, long = spec_of(4, 2, 8), spec_of(4, 2, 8, window=9), spec_of(4, 2, 8, window=20)
    assert KVGroups.by_window([long, full, short, long], 40) == KVGroups((2, 0, 1, 2), (9, 20))
    assert KVGroups.by_window([long, full, short, long], 20) == KVGroups((0, 0, 1, 0), (9,))
    assert KVGroups.by_window([long, short], 20) == KVGroups((0, 1), (9,))
    assert KVGroups.by_window([long, short], 21) == KVGroups.single(2), "each layer has a window"
    assert KVGroups.by_window([full, full], 40) == KVGroups.single(2)
    assert KVGroups((0, 1, 0), (9,)).specs_of(0, [full, short, long]) == [full, long]


def make_backend(name: str, specs: list[AttentionSpec]) -> AttentionBackend:
    if name == "torch":
        return TorchAttention(specs, torch.float32)
    from roseinfer.attention.triton_backend import TritonAttention

    return TritonAttention(shape_of(*specs, device=DEVICE, block_size=BLOCK))
