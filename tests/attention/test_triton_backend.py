"""The Triton backend against the torch backend: on a GPU where there is one, else under Triton's interpreter."""

import random
from dataclasses import replace

import pytest
import torch

from roseinfer.attention.batch import ForwardBatch
from roseinfer.attention.heads import HeadNorms, HeadTransform
from roseinfer.attention.kv_scales import KVScales
from roseinfer.attention.rope import Rotary, default_frequencies
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.kernels.attention import prefill_shares
from roseinfer.kernels.attention.decode_few import MAX_ROWS as MAX_FEW_ROWS
from roseinfer.kernels.attention.prefill import MAX_SMALL_STEP_TOKENS
from roseinfer.kernels.common.fp8_codes import CODES
from roseinfer.kernels.common.triton_support import HAS_TRITON
from tests.helpers.attention import shape_of, spec_of, store_of
from tests.helpers.batches import Blocks, HandRow, make_batch
from tests.helpers.cases import cases, each_value
from tests.helpers.interpreter import hurry, round_codes
from tests.helpers.paged import assert_near

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from roseinfer.attention.triton_backend import TritonAttention

LAYERS, MAX_ROWS, MAX_LEN = 2, 40, 256

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _interpreter() -> None:
    hurry()
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def head_transform(
    heads: int, kv_heads: int, dim: int, device: torch.device, *, llama: bool, dtype: torch.dtype = torch.float32
) -> HeadTransform:
    """Return norms and rotation as in Qwen3, or neither as in GPT-2."""
    if not llama:
        return HeadTransform(spec_of(heads, kv_heads, dim))
    query, key = ((torch.rand(dim, device=device) + 0.5).to(dtype) for _ in range(2))
    norms = HeadNorms(query, key, torch.cat((query.expand(heads, -1), key.expand(kv_heads, -1))), 1e-6)
    frequencies = default_frequencies(dim, 10000.0).to(device)
    rotary = Rotary(frequencies, MAX_LEN)
    rotary.make_tables(MAX_LEN)  # which a CPU does not need
    return HeadTransform(spec_of(heads, kv_heads, dim), norms, rotary)


class Case:
    """The same batches through both backends, each with a KV store of its own."""

    def __init__(
        self,
        transform: HeadTransform,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        windows: tuple[int | None, ...] = (None,) * LAYERS,
        max_len: int = MAX_LEN,
        kv_dtype: torch.dtype | None = None,
        skips_first: tuple[bool, ...] = (False,) * LAYERS,
    ) -> None:
        # In bfloat16 the torch backend rounds after norm, weight and rotation, the kernels only once.
        self.roundings = 4 if dtype == torch.bfloat16 else 1
        kv_dtype = kv_dtype or dtype
        spec = transform.spec
        kinds = zip(windows, skips_first, strict=True)
        specs = [replace(spec, window=window, skips_first=skips) for window, skips in kinds]
        self.transforms = [replace(transform, spec=own) for own in specs]
        self.transform, self.block_size, self.device, self.dtype = transform, block_size, device, dtype
        num_blocks = 2048 // block_size + MAX_ROWS
        self.stores = [
            store_of(num_blocks, LAYERS, block_size, spec.kv_heads, spec.head_dim, kv_dtype, device) for _ in range(2)
        ]
        self.stores[0].data.fill_(float("nan"))
        self.stores[1].data.fill_(float("nan"))
        self.blocks = Blocks(num_blocks, block_size)
        shape = shape_of(
            *specs,
            max_rows=MAX_ROWS,
            max_model_len=max_len,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            device=device,
        )
        self.backends = TritonAttention(shape), TorchAttention(specs, dtype)

    def step(self, rows: list[HandRow], *, captured: bool = False, short: bool = False, attended: int = LAYERS) -> None:
        """Run one step. Rows with one token come first. captured, short: pass the kernels a batch as for a captured
        graph, the one for any rows or that for short ones. attended: layers that attend; K and V of the later ones are
        only written.
        """
        batch = make_batch(rows, self.block_size, self.device)
        ours, theirs = self.backends
        given = self.as_captured(batch) if captured else self.as_short_rows(batch) if short else batch
        ours.begin(given, self.stores[0])
        theirs.begin(batch, self.stores[1])
        width = self.transform.spec.qkv_width
        for layer, transform in enumerate(self.transforms):
            qkv = torch.randn(len(batch.input_ids), width, device=self.device).to(self.dtype)
            if layer >= attended:
                for backend in self.backends:
                    backend.write(layer, qkv.clone(), transform)
                continue
            out, expected = (backend.forward(layer, qkv.clone(), transform) for backend in self.backends)
            assert out.shape == expected.shape
            assert_near(out, expected, self.roundings)
        ours, theirs = (store.data.to(self.dtype).nan_to_num(123.0) for store in self.stores)
        assert_near(ours, theirs, self.roundings)

    def as_captured(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch as for a captured graph, where only the device knows which rows decode."""
        decodes, rows = batch.num_decodes, batch.num_rows
        decode_len = batch.context_len.clone()
        decode_len[decodes:] = 0
        tokens = len(batch.input_ids)
        backend = self.backends[0]
        chunks = batch.query_lens[decodes:], batch.context_lens[decodes:]
        room = backend.max_chunks(tokens, rows, backend.may_divide(tokens))
        found = backend.map_chunks(tokens, decodes, *chunks, room)
        divided = backend.is_divided(found)
        longest = backend.max_chunks(tokens, rows, divided)
        assert len(found) <= longest
        chunk_map = torch.full((longest, 4), -1, dtype=torch.int32, device=self.device)
        chunk_map[: len(found)] = torch.from_numpy(found)
        return replace(
            batch,
            query_lens=[1] * rows,
            context_lens=[1] * rows,
            num_decodes=rows,
            decode_len=decode_len,
            chunk_map=chunk_map,
            divided=divided,
        )

    def as_short_rows(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch as for a captured graph of short rows, with two more rows that have no token."""
        query_start, context_len, seats = batch.query_start, batch.context_len, batch.table_rows
        rows, limits = batch.num_rows + 2, self.backends[0].short_rows(len(batch.input_ids))
        assert limits is not None and rows <= limits.rows
        return replace(
            batch,
            query_start=torch.cat((query_start, query_start[-1:].expand(2))),
            context_len=torch.cat((context_len, context_len.new_zeros(2))),
            table_rows=torch.cat((seats, seats[:1].expand(2))),
            query_lens=[1] * rows,
            context_lens=[1] * rows,
            max_query=limits.tokens,
            num_decodes=0,
        )

    def table(self, tokens: int) -> list[int]:
        return self.blocks.table(tokens)


def row(table: list[int], start: int, count: int, write_from: int = 0) -> HandRow:
    return HandRow(tokens=[0] * (start + count), table=table, start=start, count=count, write_from=write_from)


@cases(
    ("heads", "kv_heads", "dim", "llama", "block_size"),
    [(3, 1, 48, True, 16)],
    exhaustive=[(2, 2, 16, False, 16), (8, 2, 32, True, 64)],
)
def test_prompts_then_chunks_then_decodes(heads, kv_heads, dim, llama, block_size, device) -> None:
    case = Case(head_transform(heads, kv_heads, dim, device, llama=llama), block_size, device)
    tables = [case.table(90) for _ in range(4)]
    case.step([row(tables[0], 0, 1), row(tables[1], 0, 33), row(tables[2], 0, 16)])
    case.step([row(tables[0], 1, 1), row(tables[1], 33, 1), row(tables[2], 16, 20), row(tables[3], 0, 5)])
    case.step([row(tables[2], 36, 1), row(tables[0], 2, 1), row(tables[3], 5, 1), row(tables[1], 34, 1)])


@cases("count", [1, MAX_FEW_ROWS + 1], exhaustive=[MAX_FEW_ROWS])
def test_few_decodes_and_more(count, device) -> None:
    """Few rows take one launch a layer; each kernel reads what the other has written."""
    case = Case(head_transform(2, 1, 32, device, llama=True), 16, device, windows=(None, 9))
    tables = [case.table(64) for _ in range(count)]
    lengths = [17 if i == 2 else 2 + i % 2 for i in range(count)]
    case.step([row(table, 0, length) for table, length in zip(tables, lengths, strict=True)])
    for step in range(2):
        case.step([row(table, length + step, 1) for table, length in zip(tables, lengths, strict=True)])


def test_sinks(device) -> None:
    """Prompts, chunks and few decodes, and rows of a token with drafts, in layers with and without a window."""
    transform = head_transform(2, 1, 16, device, llama=True)
    spec = replace(transform.spec, sinks=True)
    transform = replace(transform, spec=spec, sinks=torch.linspace(-6, 9, 2, device=device))
    case = Case(transform, 16, device, windows=(40, None))
    tables = [case.table(180) for _ in range(3)]
    case.step([row(tables[0], 0, 1), row(tables[1], 0, 60), row(tables[2], 0, 16)])
    case.step([row(tables[0], 1, 1), row(tables[1], 60, 1), row(tables[2], 16, 20)])
    case.step([row(tables[2], 36, 1), row(tables[0], 2, 1), row(tables[1], 61, 1)])
    case.step([row(tables[1], 62, 4), row(tables[2], 37, 2)], short=True)


def test_heads_of_256_in_layers_of_two_rotations(device) -> None:
    """Prompts, chunks, few decodes, and rows of a token with drafts, in layers as Gemma 3 has them."""
    case = Case(head_transform(2, 1, 256, device, llama=True), 16, device, windows=(20, None))
    full = Rotary(default_frequencies(256, 1e6).to(device) / 8, MAX_LEN)
    full.make_tables(MAX_LEN)
    case.transforms[1] = replace(case.transforms[1], rotary=full)
    tables = [case.table(90) for _ in range(3)]
    case.step([row(tables[0], 0, 1), row(tables[1], 0, 33), row(tables[2], 0, 5)])
    case.step([row(tables[0], 1, 1), row(tables[1], 33, 1), row(tables[2], 5, 20)])
    case.step([row(tables[2], 25, 1), row(tables[0], 2, 1), row(tables[1], 34, 1)])
    case.step([row(tables[1], 35, 4), row(tables[2], 26, 2)], short=True)


@cases("window", [None], exhaustive=[9])
def test_short_rows(window, device) -> None:
    """Tokens and their drafts, of which the next step computes some again, between steps of other kernels."""
    case = Case(head_transform(2, 1, 16, device, llama=True), 16, device, windows=(None, window))
    tables = [case.table(90) for _ in range(3)]
    case.step([row(tables[0], 0, 16), row(tables[1], 0, 33), row(tables[2], 0, 20)])
    case.step([row(tables[0], 16, 1), row(tables[1], 33, 5), row(tables[2], 20, 2)], short=True)
    case.step([row(tables[0], 17, 8), row(tables[1], 35, 4)], short=True)
    case.step([row(tables[0], 18, 1), row(tables[1], 36, 1), row(tables[2], 21, 40)])
    case.step([row(tables[2], 61, 8), row(tables[1], 37, 2)])


@each_value(count=[2, MAX_FEW_ROWS + 1], codes=[False, True])
def test_a_layer_that_skips_the_first_key(count, codes, device) -> None:
    """Attend in steps of decodes and only write in the others, beside a layer that sees all keys."""
    round_codes()
    kv_dtype = CODES if codes else None
    case = Case(head_transform(4, 2, 16, device, llama=False), 16, device, skips_first=(False, True), kv_dtype=kv_dtype)
    tables = [case.table(64) for _ in range(count)]
    lengths = sorted(17 if i == 1 else 1 + i % 2 for i in range(count))
    case.step([row(table, 0, length) for table, length in zip(tables, lengths, strict=True)], attended=1)
    case.step([row(table, length, 1) for table, length in zip(tables, lengths, strict=True)])
    case.step([row(case.table(1), 0, 1)])


@each_value(windows=[(None, None), (24, 24), (None, 9)], captured=[True, False])
def test_random_batches(captured, windows, device) -> None:
    rng = random.Random(0)
    case = Case(head_transform(4, 2, 16, device, llama=True), 16, device, windows=windows)
    lengths = [0] * 6
    tables = [case.table(200) for _ in lengths]
    for _ in range(3):
        chosen = rng.sample(range(6), rng.randint(1, 6))
        counts = {seat: rng.choice((1, 1, rng.randint(2, 20))) for seat in chosen}
        chosen.sort(key=lambda seat: counts[seat] > 1)
        case.step([row(tables[seat], lengths[seat], counts[seat]) for seat in chosen], captured=captured)
        for seat in chosen:
            lengths[seat] += counts[seat]


@each_value(llama=[False, True], captured=[True, False])
def test_codes(llama, captured, device) -> None:
    """K and V in FP8, with scales of the checkpoint and without."""
    round_codes()
    transform = head_transform(4, 2, 16, device, llama=llama)
    if captured:
        transform = replace(transform, kv_scales=KVScales(*(0.1 + torch.rand(2, 2, device=device))))
    case = Case(transform, 16, device, windows=(None, 24), kv_dtype=CODES)
    if llama:
        case.roundings = 300  # different rounding of norm and rotation may lead to a neighbouring code
    tables = [case.table(90) for _ in range(3)]
    case.step([row(tables[0], 0, 1), row(tables[1], 0, 33)], captured=captured)
    case.step([row(tables[0], 1, 1), row(tables[1], 33, 1), row(tables[2], 0, 20)], captured=captured)
    case.step([row(tables[1], 34, 1), row(tables[2], 20, 9)], captured=captured)


@cases(("captured", "windows"), [(True, (250, 70))], exhaustive=[(False, (None, 30)), (True, (None, None))])
def test_long_contexts_are_divided(captured, windows, device, monkeypatch) -> None:
    """A chunk after a long context, with a short chunk and a decode; later steps reuse the workspace."""
    for constant in ("BEGIN_TILES", "MERGE_TILES", "FULL_MERGE_TILES"):  # so that dividing a short one pays
        monkeypatch.setattr(prefill_shares, constant, 0)
    monkeypatch.setattr(prefill_shares, "MIN_DIVIDED_TILES", 2)
    case = Case(head_transform(4, 2, 16, device, llama=False), 16, device, windows=windows, max_len=1024)
    long, short = case.table(400), case.table(100)
    case.stores[1].data.copy_(case.stores[0].data.normal_())
    for start in (0, 8):
        chunks = [row(long, 350 + start, 8), row(short, 1 + start, 5)]
        batch = make_batch(chunks, 16, device)
        entries = case.backends[0].map_chunks(14, 1, batch.query_lens, batch.context_lens)
        assert entries[0, 0] == 1 and entries[0, 3] > 1
        case.step([row(short, start, 1), *chunks], captured=captured)


def test_tokens_that_are_in_the_cache_already_are_not_written_again(device) -> None:
    case = Case(head_transform(4, 2, 16, device, llama=True), 16, device)
    table = case.table(64)
    case.step([row(table, 0, 32)])
    before = case.stores[0].data.clone()
    case.step([row(table, 31, 1, write_from=32)])
    assert torch.equal(case.stores[0].data.nan_to_num(9.0), before.nan_to_num(9.0))
    case.step([row(table, 28, 10, write_from=32)])


@pytest.mark.parametrize("tokens", [16, 640, 1024, 1025, 2048])
def test_the_map_of_a_captured_step_has_room_for_32_chunks_of_any_size(tokens, device) -> None:
    sizes = {"max_rows": 64, "max_tokens": 4096, "max_model_len": 8192, "dtype": torch.bfloat16}
    backend = TritonAttention(shape_of(spec_of(8, 2, 128), device=device, **sizes))
    rng = random.Random(tokens)
    for chunks in (1, 5, min(32, tokens // 2)):
        cuts = sorted(rng.sample(range(1, tokens // 2), chunks - 1))
        counts = [2 * (end - begin) for begin, end in zip([0, *cuts], [*cuts, tokens // 2], strict=True)]
        for divided in (False, backend.may_divide(tokens)):
            room = backend.max_chunks(tokens, chunks, divided)
            assert len(backend.map_chunks(tokens, 3, counts, counts, room)) <= room
    assert backend.max_chunks(tokens, 64) == backend.max_chunks(tokens, 32)
    drafted = [2] * min(64, tokens // 2)
    drafted[0] += tokens - sum(drafted)
    room = backend.max_chunks(tokens, 64, crowded=True)
    assert len(backend.map_chunks(tokens, 3, drafted, drafted, room)) <= room


@needs_gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "llama"), [(12, 12, 64, False), (32, 8, 128, True)])
def test_bfloat16(heads, kv_heads, dim, llama, device) -> None:
    transform = head_transform(heads, kv_heads, dim, device, llama=llama, dtype=torch.bfloat16)
    case = Case(transform, 16, device, torch.bfloat16)
    tables = [case.table(250) for _ in range(4)]
    case.step([row(table, 0, 100 + i) for i, table in enumerate(tables)])
    case.step([row(tables[0], 100, 1), row(tables[2], 102, 1), row(tables[1], 101, 140)])


def test_the_bulk_kernel_takes_all_chunks_of_large_steps_but_short_ones_beside_decodes(device) -> None:
    shape = shape_of(spec_of(8, 2, 128), device=device, max_tokens=8192)
    backend = TritonAttention(shape, bulk=True)

    def bulk(tokens: int, decodes: int, *rows: tuple[int, int]) -> bool:
        found = backend.map_chunks(tokens, decodes, [count for _, count in rows], [sum(row) for row in rows])
        kinds = set((found[:, prefill_shares.PARTS] == prefill_shares.IN_BULK).tolist())
        assert len(kinds) == 1, "one kernel for all of a step"
        return kinds.pop()

    assert bulk(2048, 0, (0, 1024), (0, 1024)) and bulk(8192, 0, (0, 8192))
    assert not bulk(2048, 230, (0, 1024), (0, 794))
    assert bulk(2048, 230, (4096, 1024), (0, 794)) and bulk(8192, 10, *[(0, 1024)] * 7)
    assert not bulk(MAX_SMALL_STEP_TOKENS, 0, (8192, MAX_SMALL_STEP_TOKENS))
    backend = TritonAttention(shape, bulk=False)
    assert not bulk(8192, 0, (0, 8192))
