"""A layer's products on a GPU with weights in bf16 and in FP8, by the number of rows, and their results.

    python -m benchmarks.fp8_products [--tune [--of MODEL ...]]

Microseconds of a layer of Qwen3-8B without its attention: norms, products, activation and what is added, as the model
runs them, in a CUDA graph of several layers, each with weights of its own, so that none are found in the L2 cache. The
products are compared with float64 on the widened weight: most of the difference is the rounding of activations.
`--tune` tries cuts of `tile_product` beside cuBLAS, shape by shape, of the models named. Needs torch, Triton and a GPU
of compute capability 9.0; ends with an error if a result is wrong. Takes a minute; five with `--tune`.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from benchmarks.gpu_table import gpu, torch_versions
from roseinfer.bench.report import host
from roseinfer.kernels.fp8_product import Fp8Factor
from roseinfer.kernels.fp8_rows import Fp8Rows, plain_rows
from roseinfer.kernels.fp8_tile_configs import TileConfig
from roseinfer.kernels.fp8_tiles import Parts, tile_product
from roseinfer.layers.linear import RMSNorm
from roseinfer.quant.base import NOTHING_MORE, Epilogue, Matmul
from roseinfer.quant.cuda_matmul import CudaMatmul
from roseinfer.quant.fp8_matmul import Fp8Matmul
from roseinfer.quant.fp8_weight import Fp8Weight

HIDDEN, INNER, QKV = 4096, 12288, 6144  # Qwen3-8B
SHAPES = {"qkv": (QKV, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
# [outputs, columns], and whether a residual is added. Of a model with experts, what is beside those.
TUNED = {
    "qwen3-8b": {name: (*shape, shape[0] == HIDDEN) for name, shape in SHAPES.items()},
    "qwen3-30b-a3b": {"qkv": (5120, 2048, False), "o": (2048, 4096, True)},
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
TUNED_ROWS = (16, 32, 64, 128, 192, 256, 384, 576, 832, 1088)
LAYERS, COLD_BYTES = 5, 200e6
TOLERANCE = 0.05  # of the norm of a result: activations have been rounded to FP8
SHARED_BYTES = 228_000
AHEAD_BYTES = 110_000  # of a program, so that two of them fit a multiprocessor
DEVICE = torch.device("cuda")

Call = Callable[[], object]


class WrongResultError(Exception):
    """A product differs from the reference by more than rounding explains."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The products of a layer, and its feed-forward part as one call of (x)."""

    norm: RMSNorm
    qkv: Matmul
    out: Matmul
    feed_forward: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        self.qkv.after(self.norm, x)
        self.feed_forward(self.out(attended, x))


def draw_weight(outs: int, columns: int) -> torch.Tensor:
    return torch.randn(outs, columns, device=DEVICE, dtype=torch.bfloat16) / columns**0.5


@cache
def parts() -> Parts:
    return Parts.allocate(DEVICE)


def make_norm() -> RMSNorm:
    norm = RMSNorm(HIDDEN, 1e-6)
    norm.weight = torch.rand(HIDDEN, device=DEVICE, dtype=torch.bfloat16) + 0.5
    return norm


def make_layer(kind: str) -> Layer:
    """`kind`: "bf16", or what has a scale: "channel", "block"."""
    norm, epilogues = make_norm(), {"gate_up": Epilogue("silu", gated=True)}

    def product(name: str) -> Matmul:
        weight, epilogue = draw_weight(*SHAPES[name]), epilogues.get(name, NOTHING_MORE)
        if kind == "bf16":
            return CudaMatmul(weight, None, epilogue)
        return Fp8Matmul(Fp8Weight.of(weight, block=kind == "block"), None, epilogue, parts())

    up, down = product("gate_up"), product("down")
    if isinstance(up, Fp8Matmul):
        pair = up.paired(down)
        assert pair is not None
        return Layer(norm, product("qkv"), product("o"), lambda x: pair(norm, x, x))
    return Layer(norm, product("qkv"), product("o"), lambda x: down(up.after(norm, x), x))


def timed_us(calls: Sequence[Call]) -> float:
    """Device time of one of the calls, from replays of a graph of all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(4):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        last.synchronize()
        best = min(best, first.elapsed_time(last) / len(calls) * 1000)
    return best


def compare_layers() -> None:
    kinds = {kind: [make_layer(kind) for _ in range(LAYERS)] for kind in ("bf16", "channel", "block")}
    print(f"\nus a layer without attention\n{'rows':>6}" + "".join(f"{kind:>10}" for kind in kinds))
    for rows in ROWS:
        x, attended = (torch.randn(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        times = [timed_us([partial(layer, x, attended) for layer in layers]) for layers in kinds.values()]
        print(f"{rows:6}" + "".join(f"{time:10.1f}" for time in times), flush=True)


def check_products() -> None:
    """Each shape at numbers of rows on both sides of every border between kernels."""
    worst = 0.0
    for name, shape in SHAPES.items():
        weight = draw_weight(*shape)
        for block in (False, True):
            rounded = Fp8Weight.of(weight, block=block)
            product = Fp8Matmul(rounded, None, NOTHING_MORE, parts())
            wide = rounded.widen(torch.float32).double().T
            for rows in (1, 3, 5, 17, 65, 129, 256, 257, 1000):
                x = torch.randn(rows, weight.shape[1], device=DEVICE, dtype=torch.bfloat16)
                exact = x.double() @ wide
                error = float((product(x).double() - exact).norm() / exact.norm())
                worst = max(worst, error)
                if not error < TOLERANCE:  # NaN too
                    raise WrongResultError(f"{name}, {rows} rows, {'block' if block else 'channel'}: {error:.4f}")
    print(f"largest relative error {worst:.4f}")


def configs(rows: int, outs: int, columns: int, blocks: bool) -> Iterator[TileConfig]:
    """What is worth a try."""
    ways = [(min(rows, 64), True), (64, False), (128, False)] if rows >= 64 else [(16, True), (rows, True)]
    for block_m, weight_first in dict.fromkeys(ways):
        for block_n in (64, 128):
            for block_k in (128,) if blocks else (128, 256):
                for stages in (3, 4, 5, 6):
                    needed = (block_m + block_n) * block_k * stages + 4 * block_m * block_n
                    for shares in (1, 2, 3, 4, 6):
                        programs = -(-rows // block_m) * -(-outs // block_n) * shares
                        idle = programs < 90 and shares < 4
                        if needed > SHARED_BYTES or columns // block_k % shares or idle:
                            continue
                        if shares > 1 and programs > 560:
                            continue
                        warps = 8 if block_m * block_n > 64 * 128 else 4
                        yield TileConfig(block_m, block_n, block_k, shares, warps, stages, weight_first)
    yield from _ahead(rows, outs, columns)


def _ahead(rows: int, outs: int, columns: int) -> Iterator[TileConfig]:
    """With the weight asked for before the input is there, which shows in a chain of layers rather than here."""
    for block_m, shares, warps in itertools.product({16, min(rows, 64)}, (2, 4, 8), (4, 8)):
        held = (block_m + 64) * columns // shares
        if columns // 128 % shares == 0 and held <= AHEAD_BYTES and block_m * columns // shares <= 16384 * warps:
            yield TileConfig(block_m, 64, 128, shares, warps, 0, True, ahead=True)


def by_library(factor: Fp8Factor, x: Fp8Rows, residual: torch.Tensor | None) -> None:
    found = factor.by_library(x, torch.bfloat16, None)
    if residual is not None:
        residual.add_(found)


def tune_shape(outs: int, columns: int, adds: bool, *, blocks: bool) -> None:
    count = max(2, round(COLD_BYTES / (outs * columns)))
    weights = [Fp8Weight.of(draw_weight(outs, columns), block=blocks) for _ in range(count)]
    factors = [Fp8Factor(weight.codes, weight.scales, parts()) for weight in weights]
    for rows in TUNED_ROWS:
        x = plain_rows(torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16), grouped=blocks)
        residual = torch.randn(rows, outs, device=DEVICE, dtype=torch.bfloat16) if adds else None
        library = timed_us([partial(by_library, factor, x, residual) for factor in factors])
        found = []
        for config in configs(rows, outs, columns, blocks):
            run = partial(tile_product, config=config, parts=parts(), dtype=torch.bfloat16, residual=residual)
            calls = [partial(run, x, weight.codes, weight.scales) for weight in weights]
            found.append((timed_us(calls), str(config)))
        print(f"{rows:4} x {outs} x {columns} {'by blocks' if blocks else ''}: cuBLAS {library:.1f} us")
        for time, config_name in sorted(found)[:3]:
            print(f"  {time:6.1f} us, {outs * columns / time / 1e6:.2f} TB/s: {config_name}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="try cuts of the tiles of each shape")
    parser.add_argument("--of", nargs="+", choices=TUNED, default=["qwen3-8b"], help="whose shapes (default: qwen3-8b)")
    args = parser.parse_args()
    torch.manual_seed(0)
    print({**gpu(), **host(), **torch_versions()})
    check_products()
    compare_layers()
    if args.tune:
        for outs, columns, adds in (shape for model in args.of for shape in TUNED[model].values()):
            for blocks in (False, True):
                tune_shape(outs, columns, adds, blocks=blocks)


if __name__ == "__main__":
    main()
