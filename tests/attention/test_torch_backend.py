"""The torch backend against attention written as plainly as possible, in float64."""

import random

import pytest
import torch

from roseinfer.attention import softmax, torch_backend
from roseinfer.attention.torch_backend import TorchAttention
from tests.helpers.attention import spec_of, store_of
from tests.helpers.batches import Blocks, HandRow, make_batch
from tests.helpers.cases import cases, each_value

CPU = torch.device("cpu")
LAYERS = 3


class Case:
    """Sequences with random K and V; the store contains the tokens before a row's start."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        *,
        dtype: torch.dtype = torch.float32,
        windows: tuple[int | None, ...] = (None,) * LAYERS,
        skips_first: tuple[bool, ...] = (False,) * LAYERS,
        sinks: bool = False,
    ) -> None:
        kinds = zip(windows, skips_first, strict=True)
        self.specs = [
            spec_of(heads, kv_heads, dim, window=window, skips_first=skips, sinks=sinks) for window, skips in kinds
        ]
        # From sinks that take nothing to such that take nearly all.
        self.sinks = torch.linspace(-6, 9, LAYERS * heads).view(LAYERS, heads) if sinks else None
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.blocks = Blocks(4096 // block_size, block_size)
        self.store = store_of(4096 // block_size, LAYERS, block_size, kv_heads, dim, dtype, CPU)
        self.store.data.fill_(float("nan"))
        self.rows: list[HandRow] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.queries: list[torch.Tensor] = []

    def add(self, start: int, count: int, write_from: int = 0) -> None:
        context = start + count
        table = self.blocks.table(context)
        k, v = (torch.randn(LAYERS, context, self.kv_heads, self.dim, dtype=self.dtype) for _ in range(2))
        for position in range(max(start, write_from)):
            block, offset = table[position // self.store.block_size], position % self.store.block_size
            self.store.data[block, :, 0, offset] = k[:, position]
            self.store.data[block, :, 1, offset] = v[:, position]
        row = HandRow(tokens=[0] * context, table=table, start=start, count=count, write_from=write_from)
        self.rows.append(row)
        self.keys.append(k)
        self.values.append(v)
        self.queries.append(torch.randn(LAYERS, count, self.heads, self.dim, dtype=self.dtype))

    def packed(self, tensors: list[torch.Tensor], layer: int) -> torch.Tensor:
        """The step's own tokens, as views with gaps between tokens, as models pass them."""
        parts = [t[layer, -row.count :] for t, row in zip(tensors, self.rows, strict=True)]
        dense = torch.cat(parts)
        return torch.cat((dense, dense), dim=1)[:, : dense.shape[1]]

    def backend(self) -> TorchAttention:
        return TorchAttention(self.specs, self.dtype)

    def check(self, attention: TorchAttention, tolerance: float) -> None:
        attention.begin(make_batch(self.rows, self.store.block_size), self.store)
        for layer in reversed(range(LAYERS)):
            q, k, v = (self.packed(tensors, layer) for tensors in (self.queries, self.keys, self.values))
            out = attention.attend(layer, q, k, v, None, None if self.sinks is None else self.sinks[layer])
            assert out.dtype is self.dtype and out.shape == q.shape
            expected = torch.cat([self.plain(row, layer) for row in range(len(self.rows))])
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)

    def plain(self, index: int, layer: int) -> torch.Tensor:
        row, q = self.rows[index], self.queries[index][layer].double()
        k, v = (
            t[index][layer].double().repeat_interleave(self.heads // self.kv_heads, dim=1)
            for t in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.dim**0.5
        positions = torch.arange(row.start, row.start + row.count)[:, None]
        keys, window = torch.arange(k.shape[0]), self.specs[layer].window or 10**9
        skipped = (keys == 0) & (positions > 0) & self.specs[layer].skips_first
        scores.masked_fill_((keys > positions) | (keys <= positions - window) | skipped, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks[layer].double()[:, None, None].expand(-1, row.count, 1)
            scores = torch.cat((scores, sinks), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : k.shape[0]], v)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@each_value(block_size=[1, 2, 16, 256], shape=[(4, 4, 8), (6, 2, 16), (3, 1, 10)])
def test_random_mixed_batches(block_size: int, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    rng = random.Random(block_size + heads)
    attention = TorchAttention([spec_of(heads, kv_heads, dim)] * LAYERS, torch.float32)
    for _ in range(4):
        case = Case(heads, kv_heads, dim, block_size)
        for _ in range(rng.randint(1, 8)):
            start = rng.choice((0, 0, rng.randint(1, 150)))
            case.add(start, rng.choice((1, 1, 7, rng.randint(2, 40))))
        case.check(attention, 1e-5)


def test_equal_prompts_apart_and_side_by_side() -> None:
    case = Case(4, 2, 8, 4)
    for start, count in ((0, 6), (0, 6), (9, 1), (0, 6), (6, 6), (0, 6), (0, 6)):
        case.add(start, count)
    case.check(case.backend(), 1e-5)


@pytest.mark.parametrize("count", [255, 256, 257, 600])
def test_chunks_around_the_slice_length(count: int) -> None:
    case = Case(2, 1, 8, 16)
    case.add(33, count)
    case.add(0, count)
    case.check(case.backend(), 1e-5)


def test_decoding_is_split_when_it_would_gather_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "GATHER_BYTES", 3 * 128 * 2 * 8 * 4)
    case = Case(2, 2, 8, 16)
    for start in (100, 90, 5, 80, 70, 127, 300):
        case.add(start, 1)
    case.check(case.backend(), 1e-5)


def test_rows_that_do_not_write_leave_the_store_alone() -> None:
    case = Case(4, 2, 8, 4)
    case.add(15, 1, write_from=16)
    case.add(6, 5, write_from=9)
    case.add(3, 4, write_from=7)
    before = case.store.data.clone()
    case.check(case.backend(), 1e-5)
    written = (case.store.data.nan_to_num(1e9) != before.nan_to_num(1e9)).flatten(4).any(-1)
    assert written.sum() == LAYERS * 2 * 2, "two tokens, K and V of every layer"


def test_one_backend_serves_one_store_after_another() -> None:
    attention = TorchAttention([spec_of(2, 2, 8)] * LAYERS, torch.float32)
    for block_size in (8, 4, 8):
        case = Case(2, 2, 8, block_size)
        case.add(10, 3)
        case.add(20, 1)
        case.check(attention, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_half_precision(dtype: torch.dtype, tolerance: float) -> None:
    case = Case(4, 2, 16, 16, dtype=dtype)
    for start, count in ((0, 20), (30, 10), (40, 1), (90, 1)):
        case.add(start, count)
    case.check(case.backend(), tolerance)


@each_value(window=[1, 2, 15, 16, 17, 64, 300], shape=[(4, 4, 1), (6, 2, 16), (3, 1, 32)])
def test_windows(window: int, shape: tuple[int, int, int]) -> None:
    """Compute prompts and chunks shorter and longer than the window, and decodes on both sides of its border."""
    heads, kv_heads, block_size = shape
    rng = random.Random(window + heads)
    attention = TorchAttention([spec_of(heads, kv_heads, 8, window=window)] * LAYERS, torch.float32)
    near = [max(0, window + by) for by in (-2, -1, 0, 1)]
    for _ in range(3):
        case = Case(heads, kv_heads, 8, block_size, windows=(window,) * LAYERS)
        for _ in range(rng.randint(1, 8)):
            start = rng.choice((0, 0, rng.choice(near), rng.randint(1, 150)))
            case.add(start, rng.choice((1, 1, 7, window + 1, rng.randint(2, 40))))
        case.check(attention, 1e-5)


def test_a_window_across_slices_of_a_chunk() -> None:
    for window in (10, 255, 256, 257, 300):
        case = Case(2, 1, 8, 16, windows=(window,) * LAYERS)
        case.add(33, 600)
        case.add(0, 520)
        case.check(case.backend(), 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_sinks(heads: int, kv_heads: int, dtype: torch.dtype, tolerance: float) -> None:
    """Decodes of ragged lengths, whole prompts and chunks, in layers with and without a window of 128."""
    case = Case(heads, kv_heads, 16, 16, dtype=dtype, windows=(128, None, 5), sinks=True)
    for start, count in ((0, 7), (0, 7), (0, 300), (150, 20), (3, 1), (140, 1), (399, 1), (0, 1)):
        case.add(start, count)
    case.check(case.backend(), tolerance)


def test_sinks_without_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as on devices other than CPUs, whose kernels return no denominators."""
    monkeypatch.setattr(softmax, "FUSED_DEVICES", ())
    test_sinks(6, 2, torch.float32, 1e-5)


def test_layers_of_different_windows() -> None:
    case = Case(4, 2, 8, 4, windows=(None, 7, 20))
    for start, count in ((0, 6), (0, 9), (30, 1), (50, 1), (3, 1), (12, 30), (0, 25)):
        case.add(start, count)
    case.check(case.backend(), 1e-5)


def test_tokens_before_the_window_are_not_read() -> None:
    """Nor are its entries of the block table, since the blocks may belong to other requests by now."""
    case = Case(4, 2, 8, 4, windows=(6,) * LAYERS)
    for start, count in ((40, 1), (33, 1), (27, 3), (30, 20)):
        case.add(start, count)
    for row, keys, values in zip(case.rows, case.keys, case.values, strict=True):
        hidden = max(0, row.start - 6 + 1) // 4
        case.store.data[row.table[:hidden]] = float("nan")
        row.table[:hidden] = [-(10**6)] * hidden
        keys[:, : 4 * hidden], values[:, : 4 * hidden] = 1e9, 1e9
    case.check(case.backend(), 1e-5)


@pytest.mark.parametrize("window", [None, 1, 2, 20])
def test_layers_that_skip_the_first_key(window: int | None) -> None:
    """Beside a layer that does not: whole prompts and chunks of all starts, and decodes of all lengths."""
    rng = random.Random(window)
    skips = (True, False, True)
    attention = TorchAttention(Case(4, 2, 8, 4, windows=(window,) * LAYERS, skips_first=skips).specs, torch.float32)
    for _ in range(6):
        case = Case(4, 2, 8, rng.choice((4, 16)), windows=(window,) * LAYERS, skips_first=skips)
        for _ in range(rng.randint(1, 8)):
            start = rng.choice((0, 0, 1, 2, rng.randint(3, 150)))
            case.add(start, rng.choice((1, 1, 2, 7, 300)))
        case.check(attention, 1e-5)


@cases("seed", range(10), exhaustive=range(10, 40))
def test_a_windowed_prompt_in_any_chunks(seed: int) -> None:
    """Each position's output is that of the whole prompt, wherever chunks begin and end, including decodes."""
    rng = random.Random(seed)
    window, block_size, length = rng.randint(1, 70), rng.choice((1, 2, 16, 64)), rng.randint(1, 120)
    heads, skips = rng.choice(((2, 2), (4, 2), (6, 1))), (seed % 2 == 1,) * LAYERS
    case = Case(*heads, 8, block_size, windows=(window,) * LAYERS, skips_first=skips)
    attention = case.backend()
    case.add(0, length)
    whole, start = case.rows[0], 0
    while start < length:
        count = min(rng.choice((1, 1, block_size, window, rng.randint(2, 30))), length - start)
        row = HandRow(tokens=whole.tokens, table=whole.table, start=start, count=count)
        attention.begin(make_batch([row], block_size), case.store)
        part = slice(start, start + count)
        for layer in range(LAYERS):
            q, k, v = (tensors[0][layer, part] for tensors in (case.queries, case.keys, case.values))
            out = attention.attend(layer, q, k, v)
            torch.testing.assert_close(out.double(), case.plain(0, layer)[part], rtol=0, atol=1e-5)
        start += count
