"""Prompt chunks behind long contexts on a GPU: the Triton kernel with contexts undivided and divided, and its results.

    python -m benchmarks.prompt_attention [--tune]

Microseconds of one layer, captured in a CUDA graph, each call with K and V of another layer, so that short contexts
are not read from the cache of the one before: "undivided > divided (parts)". Then steps of several chunks, what a
captured step pays for a map that could divide but does not, and TFLOP/s of large steps by each kernel, with K and V in
16 bits and in FP8. Results are compared with float32. `--tune` tries tiles and numbers of programs. Needs torch, Triton
and a CUDA GPU with 24 GB free; ends with an error if a result is wrong. Takes a minute or two.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import torch

from benchmarks.gpu_table import gpu, torch_versions
from roseinfer.bench.report import host
from roseinfer.kernels.fp8_codes import CODES
from roseinfer.kernels.prefill_attention import (
    SMALL_STEP,
    PrefillConfig,
    choose_prefill_config,
    prefill_attention,
    prefill_attention_reference,
    queries_per_block,
)
from roseinfer.kernels.prefill_bulk import BLOCK_M, BulkPages, bulk_supports, prefill_bulk
from roseinfer.kernels.prefill_shares import IN_BULK, PARTS, Division, PrefillWorkspace, map_blocks, merge_parts

LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (0, 512, 2048, 8192, 16384, 28672)
HEADS = ((32, 8, 128), (16, 8, 128))
LAYERS, CALLS, BLOCK = 6, 12, 16
TOLERANCE = 1e-2  # of the norm of a result; both sides round to bfloat16
TRIED = (
    PrefillConfig(64, 64, 4, 2),
    PrefillConfig(64, 64, 4, 3),
    PrefillConfig(64, 128, 4, 2),
    PrefillConfig(128, 64, 8, 2),
    PrefillConfig(128, 64, 8, 3),
    PrefillConfig(128, 128, 8, 2),
)

Rows = Sequence[tuple[int, int]]  # position of the first query and number of queries of each


class WrongResultError(Exception):
    """A kernel's result differs from the reference by more than rounding explains."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer's arguments for some rows; K and V of several layers."""

    rows: Rows
    q: torch.Tensor
    out: torch.Tensor
    tables: torch.Tensor
    table_rows: torch.Tensor
    query_start: torch.Tensor
    context_len: torch.Tensor

    def map(self, config: PrefillConfig, group: int, division: Division | None) -> np.ndarray:
        counts = [length for _, length in self.rows]
        contexts = [start + length for start, length in self.rows]
        return map_blocks(0, counts, contexts, queries_per_block(config, group), division)


class Bench:
    """K and V of some layers for one head shape, filled with noise, in scattered blocks."""

    def __init__(self, heads: int, kv_heads: int, dim: int, tokens: int) -> None:
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.blocks = tokens // BLOCK
        size = (LAYERS, 2, self.blocks, BLOCK, kv_heads, dim)
        self.caches = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
        self.order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(0)).int().cuda()
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def division(self, config: PrefillConfig) -> Division:
        return Division.of(self.processors, self.kv_heads, config.block_n)

    def step(self, rows: Rows) -> Step:
        contexts = [start + length for start, length in rows]
        pages = [-(-context // BLOCK) for context in contexts]
        tables = torch.zeros((len(rows), max(pages)), dtype=torch.int32, device="cuda")
        at = 0
        for row, wanted in enumerate(pages):
            tables[row, :wanted] = self.order[at : at + wanted]
            at += wanted
        starts = torch.tensor([0, *(length for _, length in rows)]).cumsum(0)
        q = torch.randn(int(starts[-1]), self.heads, self.dim, device="cuda").bfloat16()
        context_len = torch.tensor(contexts, dtype=torch.int32).cuda()
        table_rows = torch.arange(len(rows), dtype=torch.int32, device="cuda")
        return Step(rows, q, torch.empty_like(q), tables, table_rows, starts.int().cuda(), context_len)

    def calls(
        self, step: Step, config: PrefillConfig, block_map: np.ndarray, slots: int | None, *, merge: bool = True
    ) -> Callable[[], None]:
        """`slots`: of the workspace; None for the kernel that knows of no parts."""
        on_device = torch.from_numpy(block_map).cuda()
        parts = None
        if slots is not None:
            parts = PrefillWorkspace.allocate(slots, self.kv_heads, config.block_m, self.dim, self.caches.device)
        layers = count()

        def call() -> None:
            k, v = self.caches[next(layers) % LAYERS]
            given = (step.q, k, v, step.tables, step.table_rows, step.query_start, step.context_len, step.out)
            prefill_attention(*given, on_device, self.dim**-0.5, config, 0, parts)
            if parts is not None and merge:
                merge_parts(on_device, step.query_start, parts, step.out)

        return call

    def planned(self, step: Step, config: PrefillConfig, division: Division) -> tuple[Callable[[], None], int]:
        """As an eager step runs, and into how many parts its longest context is divided."""
        found = step.map(config, self.group, division)
        divided = int(found[0, PARTS])
        return self.calls(step, config, found, division.slots, merge=divided > 1), divided

    def large(self, step: Step, caches: torch.Tensor, config: PrefillConfig | None) -> Callable[[], None]:
        """A large step by tiles, or without a `config` in bulk. caches: `self.caches`, or their codes."""
        found = step.map(config or PrefillConfig(BLOCK_M, 0, 0, 0), self.group, None)
        found[:, PARTS] = IN_BULK if config is None else 1
        blocks = torch.from_numpy(found).cuda()
        scales, scale, layers = self.scales(caches), self.dim**-0.5, count()
        pages = [BulkPages.of(*kv) for kv in caches] if config is None else []

        def call() -> None:
            layer = next(layers) % LAYERS
            k, v = caches[layer]
            where = (step.tables, step.table_rows, step.query_start, step.context_len, step.out, blocks, scale)
            if config is None:
                prefill_bulk(step.q, pages[layer], *where, BLOCK)
            else:
                prefill_attention(step.q, k, v, *where, config, 0, None, scales)

        return call

    def scales(self, caches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of codes."""
        if caches.dtype != CODES:
            return None
        one = torch.ones(self.kv_heads, device="cuda")
        return one, one

    def check(self, step: Step, call: Callable[[], None], caches: torch.Tensor | None = None) -> float:
        """The relative error of a call. It has to be the first of the call's. caches: default `self.caches`."""
        step.out.fill_(float("nan"))
        call()
        caches = self.caches if caches is None else caches
        k, v = caches[0]
        given = (step.q, k, v, step.tables, step.table_rows, step.query_start, step.context_len)
        expected = prefill_attention_reference(*given, self.dim**-0.5, 0, self.scales(caches))
        error = float((step.out.float() - expected.float()).norm() / expected.float().norm())
        if not error < TOLERANCE:  # NaN too
            raise WrongResultError(f"{step.rows}: {error:.4f}")
        return error


def timed_us(call: Callable[[], None]) -> float:
    """Device time of one call, from replays of a graph of several."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    best = float("inf")
    graph.replay()
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        best = min(best, first.elapsed_time(last) / CALLS * 1000)
    return best


def compare(bench: Bench) -> None:
    """The table of chunks and contexts, each result checked."""
    print(f"\n{bench.heads}/{bench.kv_heads}/{bench.dim}, us a layer: undivided > divided (parts)")
    print(f"{'chunk':>6}" + "".join(f"{f'behind {context}':>22}" for context in CONTEXTS))
    worst = 0.0
    for length in LENGTHS:
        config = choose_prefill_config(length, bench.group, bench.dim, torch.bfloat16)
        cells = []
        for context in CONTEXTS:
            step = bench.step([(context, length)])
            undivided = bench.calls(step, config, step.map(config, bench.group, None), None)
            divided, parts = bench.planned(step, config, bench.division(config))
            worst = max(worst, bench.check(step, undivided), bench.check(step, divided))
            cells.append(f"{timed_us(undivided):.1f} > {timed_us(divided):.1f} ({parts})")
        print(f"{length:6}" + "".join(f"{cell:>22}" for cell in cells), flush=True)
    print(f"worst relative error {worst:.4f}")


def compare_mixed(bench: Bench) -> None:
    """Several prompts in a step, and what a captured step pays for the parts that it does not have."""
    print(
        f"\n{bench.heads}/{bench.kv_heads}/{bench.dim}, us a layer: undivided > divided (parts) > undivided, captured"
    )
    steps: dict[str, Rows] = {
        "64 behind 28,672 and 8 prompts of 64": [(28672, 64), *[(0, 64)] * 8],
        "16 behind 28,672 and 20 prompts of 48": [(28672, 16), *[(0, 48)] * 20],
        "64 behind 16,384, twice": [(16384, 64)] * 2,
        "200 behind 8,192 and 100 behind 2,048": [(8192, 200), (2048, 100)],
        "17 rows of 4 behind 2,048": [(2048, 4)] * 17,
        "prompt of 64": [(0, 64)],
        "prompt of 500": [(0, 500)],
    }
    for name, rows in steps.items():
        step = bench.step(rows)
        config = choose_prefill_config(len(step.q), bench.group, bench.dim, torch.bfloat16)
        division = bench.division(config)
        whole = step.map(config, bench.group, None)
        divided, parts = bench.planned(step, config, division)
        padded = np.full((max(len(whole) + 32, division.slots + 8), 4), -1, dtype=np.int32)
        padded[: len(whole)] = whole
        undivided, captured = bench.calls(step, config, whole, None), bench.calls(step, config, padded, division.slots)
        for call in (undivided, divided, captured):
            bench.check(step, call)
        times = [timed_us(call) for call in (undivided, divided, captured)]
        print(f"{name:40} {times[0]:8.1f} > {times[1]:6.1f} ({parts}) > {times[2]:6.1f}", flush=True)


def compare_large(bench: Bench) -> None:
    """Steps of more than 1,024 tokens: TFLOP/s of the tiles, of those of short contexts, and in bulk on Hopper."""
    cases: dict[str, Rows] = {
        "2 x 1,024": [(0, 1024)] * 2,
        "8 x 1,024": [(0, 1024)] * 8,
        "1 x 2,048": [(0, 2048)],
        "1 x 8,192": [(0, 8192)],
        "2,048 behind 6,144": [(6144, 2048)],
        "2,048 behind 26,624": [(26624, 2048)],
    }
    shape = (bench.heads, bench.kv_heads, bench.dim)
    caches = {False: bench.caches, True: bench.caches.to(CODES)}
    print(f"\n{shape}, TFLOP/s{'':20}" + "".join(f"{case:>22}" for case in cases))
    for fp8 in (False, True):
        chosen = [
            choose_prefill_config(SMALL_STEP + 1, bench.group, bench.dim, torch.bfloat16, fp8, short=short)
            for short in (False, True)
        ]
        kinds: list[PrefillConfig | None] = list(dict.fromkeys(chosen))
        if not fp8 and bulk_supports(*shape, BLOCK, torch.bfloat16, torch.device("cuda")):
            kinds.append(None)
        for kind in kinds:
            rates = []
            for rows in cases.values():
                step = bench.step(rows)
                call = bench.large(step, caches[fp8], kind)
                bench.check(step, call, caches[fp8])
                pairs = sum(count * start + count * (count + 1) // 2 for start, count in rows)
                rates.append(4 * bench.heads * bench.dim * pairs / timed_us(call) / 1e6)
            name = f"{'FP8' if fp8 else 'bf16'} {'in bulk' if kind is None else str(kind)[14:-1]}"
            print(f"{name:42}" + "".join(f"{rate:22.0f}" for rate in rates), flush=True)


def tune(bench: Bench) -> None:
    """Divided contexts: other tiles, and another number of programs at once."""
    print(f"\n{bench.heads}/{bench.kv_heads}/{bench.dim}, us a layer, divided (parts)")
    cells = [(length, context) for length in (16, 64, 128, 256, 512) for context in (512, 2048, 8192, 28672)]
    print(f"{'':34}" + "".join(f"{f'{length}+{context}':>12}" for length, context in cells))
    for config in TRIED:
        for resident in (1, 2, 3, 4) if config == TRIED[0] else (1, 2):
            division = bench.division(config)
            programs = bench.processors * resident // bench.kv_heads
            division = replace(division, programs=programs, slots=4 * programs)
            times = []
            for length, context in cells:
                call, parts = bench.planned(step := bench.step([(context, length)]), config, division)
                bench.check(step, call)
                times.append(f"{timed_us(call):.0f} ({parts})")
            print(f"{str(config)[14:-1]:32} {resident}" + "".join(f"{time:>12}" for time in times), flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try tiles and numbers of programs")
    args = parser.parse_args()
    torch.manual_seed(0)
    print({**gpu(), **host(), **torch_versions()})
    for heads, kv_heads, dim in HEADS:
        bench = Bench(heads, kv_heads, dim, CONTEXTS[-1] + 8192)
        compare(bench)
        compare_mixed(bench)
        compare_large(bench)
        if args.tune and heads == HEADS[0][0]:
            tune(bench)
        del bench
    print("all results agree")


if __name__ == "__main__":
    main()
