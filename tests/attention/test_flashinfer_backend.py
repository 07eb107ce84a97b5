"""The FlashInfer backend: with FlashInfer on a GPU where there are both, else with a double of its wrappers on the CPU.

The double computes what a plan describes, so that what the backend plans is checked everywhere.
"""

import random
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from roseinfer.attention import flashinfer_backend
from roseinfer.attention.base import AttentionShape
from roseinfer.attention.flashinfer_backend import FlashInferAttention, why_not
from roseinfer.attention.flashinfer_rows import Geometry
from roseinfer.attention.heads import HeadTransform
from roseinfer.core.errors import ConfigError
from roseinfer.kernels.triton_support import HAS_TRITON
from tests.helpers.attention import shape_of, spec_of, store_of
from tests.helpers.batches import Blocks, HandRow, make_batch
from tests.helpers.interpreter import hurry

ON_GPU = torch.cuda.is_available() and find_spec("flashinfer") is not None
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
LAYERS = 2
NAN = float("nan")

gpu_only = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA GPU and flashinfer")


def attention_shape(heads: int = 4, kv_heads: int = 2, dim: int = 64, **other: object) -> AttentionShape:
    sizes = {"max_rows": 256, "max_tokens": 4096, "max_model_len": 2048}
    given = {"dtype": torch.bfloat16, "device": DEVICE, **sizes, **other}
    return shape_of(*[spec_of(heads, kv_heads, dim)] * LAYERS, **given)


class Double:
    """A wrapper of either kind. What `plan` is given is kept, and read by `run`, as by FlashInfer's kernels."""

    def __init__(self, scratch: torch.Tensor, layout: str, **options: object) -> None:
        assert layout == "NHD" and not scratch.any()
        self.options = options
        self.plans: list[list[int]] = []

    def reset_workspace_buffer(self, scratch: torch.Tensor, plan: torch.Tensor) -> None:
        assert not plan.any()

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        rows = len(self.last_tokens)
        assert q.shape == out.shape and q.shape[0] == self.query_starts[-1] and q.shape[1] == self.heads
        for row in range(rows):
            first, last = int(self.starts[row]), int(self.starts[row + 1])
            context = (last - first - 1) * self.page_size + int(self.last_tokens[row])
            tokens = slice(int(self.query_starts[row]), int(self.query_starts[row + 1]))
            k, v = (cache[self.blocks[first:last].long()].flatten(0, 1)[:context] for cache in kv)
            out[tokens] = plain(q[tokens], k, v).to(out.dtype)

    def keep(
        self, starts, blocks, last_tokens, num_qo_heads, num_kv_heads, page_size, sm_scale, q_data_type, kv_data_type
    ):
        assert len(starts) == len(last_tokens) + 1 and len(blocks) >= starts[-1] and num_qo_heads % num_kv_heads == 0
        assert q_data_type is kv_data_type and sm_scale > 0
        self.starts, self.blocks, self.last_tokens = starts, blocks, last_tokens
        self.heads, self.page_size = num_qo_heads, page_size
        self.plans.append(starts.tolist())


class DecodeDouble(Double):
    def plan(self, starts, blocks, last_tokens, *, head_dim, disable_split_kv=False, **common):
        self.query_starts = range(len(starts))
        self.keep(starts, blocks, last_tokens, **common)


class PrefillDouble(Double):
    def plan(self, query_starts, starts, blocks, last_tokens, *, head_dim_qk, causal, max_token_per_sequence, **common):
        assert causal and max_token_per_sequence == max((query_starts[1:] - query_starts[:-1]).tolist())
        self.query_starts = query_starts
        self.keep(starts, blocks, last_tokens, **common)


def fast_decode_plan(wrapper, starts, blocks, last_tokens, *, head_dim, global_override_indptr_cpu, **common):
    """Keeps none of the tensors: those of the first plan are the graph's."""
    assert wrapper.options["use_cuda_graph"] and global_override_indptr_cpu is starts
    wrapper.plans.append(starts.tolist())


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    if ON_GPU:
        return
    hurry()
    if torch.cuda.is_available():
        pytest.skip("the doubles are for machines without a GPU; with one, install flashinfer")
    if not HAS_TRITON:
        pytest.skip("needs Triton")
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeDouble  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = PrefillDouble  # type: ignore[attr-defined]
    module.fast_decode_plan = fast_decode_plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_backend, "why_not", lambda specs, dtype, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(synchronize=lambda: None, record=lambda: None))


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [n, heads, D], of the last n of the tokens of k and v [context, kv_heads, D]. In float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / q.shape[-1] ** 0.5
    places = torch.arange(k.shape[0], device=k.device)
    scores.masked_fill_(places > places[-q.shape[0] :, None], float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class Case:
    """Rows in a store whose other slots are NaN. Packed projections have gaps of their own between the queries."""

    def __init__(self, shape: AttentionShape, num_blocks: int = 256) -> None:
        self.shape, self.spec = shape, shape.specs[0]
        self.blocks = Blocks(num_blocks, shape.block_size)
        self.store = store_of(
            num_blocks, LAYERS, shape.block_size, self.spec.kv_heads, self.spec.head_dim, shape.dtype, shape.device
        )
        self.store.data.fill_(NAN)
        self.rows: list[HandRow] = []
        self.contexts: list[torch.Tensor] = []

    def add(self, start: int, count: int) -> "Case":
        shape, context = self.shape, start + count
        table = self.blocks.table(context)
        kv = torch.randn(LAYERS, 2, context, self.spec.kv_heads, self.spec.head_dim).to(shape.device, shape.dtype)
        for position in range(start):
            self.store.data[table[position // shape.block_size], :, :, position % shape.block_size] = kv[:, :, position]
        self.rows.append(HandRow(tokens=[0] * context, table=table, start=start, count=count))
        self.contexts.append(kv)
        return self

    def batch(self):
        return make_batch(self.rows, self.shape.block_size, self.shape.device)

    def packed(self, layer: int) -> torch.Tensor:
        own = [kv[layer, :, -row.count :] for kv, row in zip(self.contexts, self.rows, strict=True)]
        k, v = torch.cat(own, dim=1)
        q = torch.randn(k.shape[0], self.spec.heads, self.spec.head_dim).to(k)
        return torch.cat((q, k, v), dim=1).flatten(1)

    def expected(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        q = qkv.view(qkv.shape[0], -1, self.spec.head_dim)[:, : self.spec.heads]
        parts = q.split([row.count for row in self.rows])
        attended = [plain(part, *kv[layer]) for part, kv in zip(parts, self.contexts, strict=True)]
        return torch.cat(attended).flatten(1)

    def transform(self) -> HeadTransform:
        return HeadTransform(self.spec)

    def check(self, attention: FlashInferAttention) -> None:
        attention.begin(self.batch(), self.store)
        for layer in reversed(range(LAYERS)):
            qkv = self.packed(layer)
            expected = self.expected(qkv, layer)
            close(attention.forward(layer, qkv, self.transform()), expected, self.shape.dtype)


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype is dtype
    error = (out.double() - expected).norm() / expected.norm()
    assert error < (2e-3 if dtype is torch.float16 else 1e-2), f"relative error {error:.2e}"


def random_case(shape: AttentionShape, seed: int) -> Case:
    rng = random.Random(seed)
    case = Case(shape)
    for _ in range(rng.randint(0, 5)):
        case.add(rng.choice((0, shape.block_size - 1, shape.block_size, rng.randint(1, 300))), 1)
    for _ in range(rng.randint(0 if case.rows else 1, 4)):
        case.add(rng.choice((0, rng.randint(1, 200))), rng.choice((2, shape.block_size, rng.randint(2, 150))))
    return case


@pytest.mark.parametrize("group", [1, 2, 4, 5])
@pytest.mark.parametrize("dim", [64, 128])
def test_decodes_chunks_and_both(group: int, dim: int) -> None:
    shape = attention_shape(2 * group, 2, dim)
    attention = FlashInferAttention(shape)
    count = 6 if ON_GPU else 2
    for number in range(count):  # others for each shape
        random_case(shape, 1000 * dim + 10 * group + number).check(attention)


@pytest.mark.parametrize("block_size", [32, 256])
def test_block_sizes(block_size: int) -> None:
    shape = attention_shape(block_size=block_size)
    attention = FlashInferAttention(shape)
    Case(shape).add(0, 1).add(block_size - 1, 1).add(block_size, 1).add(3, block_size).add(0, 5).check(attention)


def test_half_precision() -> None:
    shape = attention_shape(dtype=torch.float16)
    Case(shape).add(70, 1).add(0, 33).add(40, 20).check(FlashInferAttention(shape))


def test_one_backend_serves_one_store_after_another() -> None:
    shape = attention_shape()
    attention = FlashInferAttention(shape)
    for start in (5, 50):
        Case(shape).add(start, 1).add(start, 7).check(attention)


@pytest.mark.parametrize(("heads", "rows"), [(2, 3), (8, 3), (8, 40), (8, 200)])
def test_a_captured_batch_follows_the_lengths_on_the_device(heads: int, rows: int) -> None:
    """Without a GPU the launches are repeated instead of replayed."""
    shape = attention_shape(heads, 2)
    if not ON_GPU:
        rows = min(rows, 5)  # more than are split on the double's four multiprocessors
    attention = FlashInferAttention(shape)
    case = Case(shape, rows * 14)
    rng = random.Random(rows)
    for _ in range(rows):
        case.add(rng.randint(60, 200), 1)
    batch, qkv = case.batch(), case.packed(0)
    lengths, true_slots = batch.context_len.clone(), batch.paging[0].slots.clone()

    def launch() -> torch.Tensor:
        attention.prepare_capture(batch, case.store)
        return attention.forward(0, qkv, case.transform())

    batch.context_len.fill_(1)
    batch.paging[0].slots.fill_(-1)
    launch()
    if ON_GPU:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = launch()
    batch.context_len.copy_(lengths)
    batch.paging[0].slots.copy_(true_slots)
    attention.prepare_replay(rows, [length - 1 for length in lengths.tolist()])
    if ON_GPU:
        graph.replay()
    else:
        out = launch()
    close(out, case.expected(qkv, 0), shape.dtype)


def test_only_batches_that_can_be_split_are_planned_before_each_replay() -> None:
    shape = attention_shape(8, 2)
    limit = Geometry.of(shape).split_limit
    attention = FlashInferAttention(shape)
    for rows in (limit, limit - 1):
        case = Case(shape, 1024)
        for _ in range(rows):
            case.add(3, 1)
        attention.prepare_capture(case.batch(), case.store)
    assert [attention._graphs[rows].planned_once for rows in (limit, limit - 1)] == [True, False]


def test_padding_rows_are_planned_as_one_token() -> None:
    if ON_GPU:
        pytest.skip("looks into the double")
    shape = attention_shape(2, 2)
    attention = FlashInferAttention(shape)
    case = Case(shape).add(40, 1).add(9, 1).add(0, 1)
    attention.prepare_capture(case.batch(), case.store)
    attention.prepare_replay(3, [40, 9])
    assert attention._graphs[3]._wrapper.plans == [[0, 1, 2, 3], [0, 3, 4, 5]]


@gpu_only
def test_offsets_past_32_bits() -> None:
    """The last blocks of a store of more than 2^31 elements, decoded and prefilled."""
    shape = attention_shape(8, 8, 128, block_size=256)
    num_blocks = 2**31 // (LAYERS * 2 * 256 * 8 * 128) + 8
    case = Case(shape, 1)
    case.store = store_of(num_blocks, LAYERS, 256, 8, 128, shape.dtype, shape.device)
    tables = iter(([num_blocks - 1, num_blocks - 2], [num_blocks - 3, num_blocks - 4], [num_blocks - 5]))
    case.blocks = SimpleNamespace(table=lambda _: next(tables))  # type: ignore[assignment]
    case.add(300, 1).add(0, 1).add(30, 150)
    case.rows[1] = HandRow(tokens=[0], table=case.rows[1].table[:1], start=0, count=1)
    case.check(FlashInferAttention(shape))


@gpu_only
def test_steady_state_never_waits_for_the_device() -> None:
    shape = attention_shape(8, 2, 128)
    attention = FlashInferAttention(shape)
    case = Case(shape).add(100, 1).add(0, 1).add(40, 30)
    case.check(attention)
    batch, qkv = case.batch(), case.packed(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.begin(batch, case.store)
        attention.forward(0, qkv, case.transform())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"device": torch.device("cpu")}, "CUDA GPUs"),
        ({"dtype": torch.float32}, "not in float32"),
        ({"dim": 80}, "not 80"),
    ],
)
def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch, changed: dict, reason: str) -> None:
    monkeypatch.setattr(flashinfer_backend, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_backend, "why_not", why_not)
    with pytest.raises(ConfigError, match=reason):
        FlashInferAttention(attention_shape(**{"device": torch.device("cuda"), **changed}))


def test_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "find_spec", lambda name: None)
    monkeypatch.setattr(flashinfer_backend, "why_not", why_not)
    with pytest.raises(ConfigError, match="pip install"):
        FlashInferAttention(attention_shape())
