"""Sliding windows on a GPU: the Triton backend against plain torch, captured against eager, and what a window saves.

    python -m benchmarks.attention_check

One layer with the heads and the window of Mistral 7B v0.1. Needs torch, Triton and a CUDA GPU with 16 GB free; ends
with an error if a result is wrong. Takes a minute.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from roseinfer.attention.base import CHUNK_FIELDS, AttentionBackend, AttentionShape
from roseinfer.attention.batch import ForwardBatch, Paging
from roseinfer.attention.heads import HeadTransform
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec
from roseinfer.attention.torch_backend import TorchAttention
from roseinfer.attention.triton_backend import TritonAttention
from roseinfer.kernels.prefill_shares import PARTS
from roseinfer.kernels.triton_support import cdiv

# Of the norm of a result, the norm of the difference: both sides round to bfloat16, in different order.
TOLERANCE = 1e-2
TIMED_CALLS = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """`longest`: tokens of the longest context; `rows`: that decode when timed; `chunk`: tokens of a prompt's chunk."""

    spec: AttentionSpec
    longest: int
    rows: int
    chunk: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16


MISTRAL_7B = Sizes(
    AttentionSpec(heads=32, kv_heads=8, head_dim=128, scale=128**-0.5, window=4096), longest=16384, rows=64, chunk=2048
)


class Bench:
    """One layer's store, filled with noise, and sequences whose blocks are scattered over it."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        each = cdiv(sizes.longest, sizes.block_size)
        generator = torch.Generator().manual_seed(0)
        self.tables = torch.randperm(sizes.rows * each, generator=generator).view(sizes.rows, each).int().to(device)
        self.store = KVStore(sizes.rows * each, sizes.block_size, [sizes.spec], sizes.dtype, device)
        self.store.data.normal_()
        self._shape = AttentionShape(
            specs=(sizes.spec,),
            max_rows=sizes.rows,
            max_tokens=max(sizes.rows, 2 * sizes.chunk),
            max_model_len=sizes.longest,
            block_size=sizes.block_size,
            dtype=sizes.dtype,
            kept=sizes.dtype,
            device=device,
        )

    def by_kernels(self, window: int | None) -> "Layer":
        spec = replace(self.sizes.spec, window=window)
        return Layer(TritonAttention(replace(self._shape, specs=(spec,))), spec, self.store)

    def in_torch(self, window: int | None) -> "Layer":
        spec = replace(self.sizes.spec, window=window)
        return Layer(TorchAttention([spec], self.store.dtype), spec, self.store)

    def batch(self, rows: Sequence[tuple[int, int]]) -> ForwardBatch:
        """rows: position of the first query and number of queries of each, rows of one query first."""
        starts, counts = [start for start, _ in rows], [count for _, count in rows]
        contexts = [start + count for start, count in rows]
        positions = torch.cat([torch.arange(start, start + count) for start, count in rows]).to(self.device)
        row_of = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts)).to(self.device)
        size = self.sizes.block_size
        slots = self.tables[row_of, positions // size].long() * size + positions % size
        ends = torch.tensor([0, *counts]).cumsum(0)
        return ForwardBatch(
            input_ids=positions,
            positions=positions,
            query_start=ends.int().to(self.device),
            context_len=torch.tensor(contexts, dtype=torch.int32).to(self.device),
            table_rows=torch.arange(len(starts), dtype=torch.int32, device=self.device),
            paging=(Paging(self.tables, slots),),
            logits_at=positions[:0],
            query_lens=counts,
            context_lens=contexts,
            max_query=max(counts),
            max_context=max(contexts),
            num_decodes=counts.count(1),
        )

    def qkv(self, batch: ForwardBatch) -> torch.Tensor:
        width = self.sizes.spec.qkv_width
        return torch.randn(len(batch.positions), width, device=self.device).to(self.sizes.dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """A backend for one layer, with its window or without."""

    backend: AttentionBackend
    spec: AttentionSpec
    store: KVStore

    def attend(self, batch: ForwardBatch, qkv: torch.Tensor) -> torch.Tensor:
        """[T, heads * D]. The step's K and V are written to their slots."""
        self.backend.begin(batch, self.store)
        return self.forward(qkv)

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        return self.backend.forward(0, qkv, HeadTransform(self.spec))


class WrongResultError(Exception):
    """Two ways to compute the same attention differ by more than rounding explains."""


def check(what: str, out: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    print(f"{what:56} relative error {error:.4f}", flush=True)
    if not error < TOLERANCE:  # NaN too
        raise WrongResultError(f"{what}: {error:.4f}")


def border_contexts(sizes: Sizes) -> list[int]:
    """Contexts that end within a window, on both sides of its border, and far behind it."""
    window = sizes.spec.window or sizes.longest
    near = [window - 1, window, window + 1, window + sizes.block_size, 2 * window, 3 * window + 1]
    rng = random.Random(0)
    contexts = [1, 2, *near, *(rng.randint(1, sizes.longest) for _ in range(8)), sizes.longest]
    return [min(context, sizes.longest) for context in contexts][: sizes.rows]


def check_results(bench: Bench) -> None:
    """Decodes, chunks and both, with the window and without, against plain torch."""
    sizes = bench.sizes
    window = sizes.spec.window or sizes.longest
    decodes = [(context - 1, 1) for context in border_contexts(sizes)]
    behind = sizes.longest - sizes.chunk
    chunks = [(0, sizes.chunk), (min(window - 7, behind), 40), (behind, sizes.chunk // 2), (0, min(window + 9, behind))]
    steps = {
        "decodes": decodes,
        "chunks": chunks,
        "decodes and chunks": [*decodes[: sizes.rows - 2], *chunks[1:3]],
    }
    for window_or_none in (sizes.spec.window, None):
        ours, theirs = bench.by_kernels(window_or_none), bench.in_torch(window_or_none)
        for name, rows in steps.items():
            batch = bench.batch(rows)
            qkv = bench.qkv(batch)
            expected = theirs.attend(batch, qkv.clone())
            check(f"{name}, window {window_or_none}", ours.attend(batch, qkv.clone()), expected)


def check_graph(bench: Bench) -> None:
    """A captured step of decodes, replayed for other lengths, against the same launched kernel by kernel."""
    contexts = border_contexts(bench.sizes)
    batch = bench.batch([(context - 1, 1) for context in contexts])
    qkv, layer = bench.qkv(batch), bench.by_kernels(bench.sizes.spec.window)
    layer.attend(batch, qkv.clone())
    graph, given = torch.cuda.CUDAGraph(), qkv.clone()
    with torch.cuda.graph(graph):
        out = layer.attend(batch, given)
    for lengths in (contexts, contexts[::-1], [1] * len(contexts), [bench.sizes.longest] * len(contexts)):
        now = bench.batch([(length - 1, 1) for length in lengths])
        expected = layer.attend(now, qkv.clone()).clone()
        batch.context_len.copy_(now.context_len)
        batch.paging[0].slots.copy_(now.paging[0].slots)
        out.fill_(float("nan"))
        graph.replay()
        check(f"captured, contexts {min(lengths)} to {max(lengths)}", out, expected)


def check_mixed_graph(bench: Bench) -> None:
    """A captured step of decodes and small chunks, replayed for other starts, against plain torch.

    Behind long contexts the chunks' contexts are divided, behind short ones they are not.
    """
    longest = bench.sizes.longest
    counts = [1] * 6 + [40, 18]
    room = max(counts)
    for window in (bench.sizes.spec.window, None):
        ours, theirs = bench.by_kernels(window), bench.in_torch(window)
        assert isinstance(ours.backend, TritonAttention)
        batch = as_captured(ours.backend, bench.batch([(0, count) for count in counts]))
        given = bench.qkv(batch)
        ours.attend(batch, given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ours.attend(batch, given)
        for start in (0, 100, longest // 3, longest - room):
            now = bench.batch([(max(0, start - 11 * i), count) for i, count in enumerate(counts)])
            fresh = as_captured(ours.backend, now)
            for name in ("context_len", "decode_len", "chunk_map"):
                getattr(batch, name).copy_(getattr(fresh, name))
            batch.paging[0].slots.copy_(now.paging[0].slots)
            qkv = bench.qkv(now)
            expected = theirs.attend(now, qkv.clone())
            given.copy_(qkv)
            out.fill_(float("nan"))
            graph.replay()
            parts = int(fresh.chunk_map[0, PARTS]) if fresh.chunk_map is not None else 0
            check(f"captured chunks behind {start} in {parts} parts, window {window}", out, expected)


def as_captured(backend: TritonAttention, batch: ForwardBatch) -> ForwardBatch:
    """The same step in the form that graphs are made of: which rows decode is on the device alone."""
    decodes, rows, tokens = batch.num_decodes, batch.num_rows, len(batch.positions)
    room = backend.max_chunks(tokens, rows)
    found = backend.map_chunks(tokens, decodes, batch.query_lens[decodes:], batch.context_lens[decodes:], room)
    chunk_map = torch.full((room, CHUNK_FIELDS), -1, dtype=torch.int32)
    chunk_map[: len(found)] = torch.from_numpy(found)
    decode_len = batch.context_len.clone()
    decode_len[decodes:] = 0
    return replace(
        batch,
        query_lens=[1] * rows,
        context_lens=[1] * rows,
        num_decodes=rows,
        decode_len=decode_len,
        chunk_map=chunk_map.to(batch.context_len.device),
    )


def timed_us(launch: Callable[[], object]) -> float:
    """Device time of one call, from replays of a graph of several."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(TIMED_CALLS):
            launch()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / TIMED_CALLS * 1000


def measure(bench: Bench) -> None:
    """Microseconds of one layer: long contexts without a window and with one, and contexts of the window's length."""
    sizes = bench.sizes
    window = sizes.spec.window or sizes.longest
    behind = sizes.longest - sizes.chunk
    cases = {
        f"decode {sizes.rows} x {sizes.longest}": [(sizes.longest - 1, 1)] * sizes.rows,
        f"decode {sizes.rows} x {window}": [(window - 1, 1)] * sizes.rows,
        f"chunk of {sizes.chunk} behind {behind}": [(behind, sizes.chunk)],
        f"chunk of {sizes.chunk} behind {window}": [(window, sizes.chunk)],
        f"prompt of {sizes.chunk}": [(0, sizes.chunk)],
    }
    print(f"\n{'us a layer, captured':40} {'no window':>10} {'window':>10}")
    for name, rows in cases.items():
        batch = bench.batch(rows)
        qkv = bench.qkv(batch)
        times = []
        for layer in (bench.by_kernels(None), bench.by_kernels(sizes.spec.window)):
            layer.backend.begin(batch, bench.store)
            times.append(timed_us(lambda layer=layer, qkv=qkv: layer.forward(qkv)))  # type: ignore[misc]
        print(f"{name:40} {times[0]:10.1f} {times[1]:10.1f}", flush=True)


@torch.inference_mode()
def main() -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {MISTRAL_7B.spec}", flush=True)
    bench = Bench(MISTRAL_7B, device)
    check_results(bench)
    check_graph(bench)
    check_mixed_graph(bench)
    measure(bench)
    print("all results agree")


if __name__ == "__main__":
    main()
