#!/usr/bin/env python3
"""How the layout of weights decides the speed of a CPU's matrix products.

Every layout multiplies by all weights of GPT-2 124M (12 layers and the output head) in the order of a forward pass,
so no matrix is still in the cache when its turn comes again. The best whole pass bounds what decoding can reach. Those
in int8 round their inputs, too, and that is in their time.

    python -m benchmarks.cpu_gemm --threads 2 --rows 1 8 32 512
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from roseinfer.quant.int8_matmul import Int8Matmul
from roseinfer.quant.int8_product import FbgemmProduct, OnednnProduct, why_not
from roseinfer.quant.int8_weight import Int8Weight

LAYERS = 12
LAYER_SHAPES = ((768, 2304), (768, 768), (768, 3072), (3072, 768))
HEAD_SHAPE = (768, 50257)

Product = Callable[[torch.Tensor], torch.Tensor]
Prepare = Callable[[torch.Tensor, torch.Tensor], Product]


class Layout(NamedTuple):
    """A way to keep weights, in so many bytes each, and to multiply by them."""

    prepare: Prepare
    weight_bytes: int = 4


class Timing(NamedTuple):
    """Milliseconds of a whole pass, and the median of one product of each shape."""

    pass_ms: float
    shape_ms: dict[tuple[int, int], float]


def linear(weight: torch.Tensor, bias: torch.Tensor) -> Product:
    return lambda x: F.linear(x, weight, bias)


def transposed(weight: torch.Tensor, bias: torch.Tensor) -> Product:
    turned = weight.t().contiguous()
    return lambda x: torch.addmm(bias, x, turned)


def weight_first(weight: torch.Tensor, bias: torch.Tensor) -> Product:
    column = bias[:, None]
    return lambda x: torch.addmm(column, weight, x.t())


def onednn(hint: int) -> Prepare:
    def prepare(weight: torch.Tensor, bias: torch.Tensor) -> Product:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, hint)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")

    return prepare


def mkl(hint: int) -> Prepare:
    def prepare(weight: torch.Tensor, bias: torch.Tensor) -> Product:
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, hint)
        return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, bias, hint)

    return prepare


def int8(kind: type[FbgemmProduct] | type[OnednnProduct]) -> Prepare:
    return lambda weight, bias: Int8Matmul(kind(Int8Weight.of(weight)), bias)


def layouts(hints: list[int]) -> dict[str, Layout]:
    """Those that this PyTorch has; packing is tuned for a number of rows, the hint."""
    found = {"F.linear": Layout(linear), "x @ W": Layout(transposed), "W @ x.T": Layout(weight_first)}
    if hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        found |= {f"oneDNN packed for {hint}": Layout(onednn(hint)) for hint in hints}
    if hasattr(torch.ops.mkl, "_mkl_linear") and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight"):
        found |= {f"MKL packed for {hint}": Layout(mkl(hint)) for hint in hints}
    if why_not() is None:
        found |= {"int8, FBGEMM": Layout(int8(FbgemmProduct), 1), "int8, oneDNN": Layout(int8(OnednnProduct), 1)}
    return found


def shapes() -> list[tuple[int, int]]:
    return [*LAYER_SHAPES * LAYERS, HEAD_SHAPE]


def draw_weights(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, k, generator=generator) * 0.02, torch.randn(n, generator=generator)) for k, n in shapes()]


def check(products: list[Product], weights: list[tuple[torch.Tensor, torch.Tensor]], weight_bytes: int) -> None:
    """A fast wrong product is worth nothing."""
    tolerance = 1e-4 if weight_bytes == 4 else 0.05
    for product, (weight, bias) in zip(products, weights, strict=True):
        x = torch.linspace(-1, 1, weight.shape[1]).expand(3, -1).contiguous()
        out = product(x)
        out = out if out.shape[0] == 3 else out.t()
        torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=tolerance, atol=tolerance)


def measure(products: list[Product], rows: int, seconds: float) -> Timing:
    inputs = {k: torch.randn(rows, k) for k in (768, 3072)}
    durations: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes()}
    passes: list[float] = []
    end = time.perf_counter() + seconds
    while len(passes) < 4 or time.perf_counter() < end:
        began = time.perf_counter()
        for product, shape in zip(products, shapes(), strict=True):
            start = time.perf_counter()
            product(inputs[shape[0]])
            durations[shape].append(time.perf_counter() - start)
        passes.append(time.perf_counter() - began)
    # The first pass makes kernels and buffers.
    medians = {shape: statistics.median(times[len(times) // len(passes) :]) for shape, times in durations.items()}
    return Timing(min(passes[1:]) * 1e3, {shape: ms * 1e3 for shape, ms in medians.items()})


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def report(name: str, rows: int, timing: Timing, weight_bytes: int) -> None:
    elements = sum(k * n for k, n in shapes())
    gb_per_s = weight_bytes * elements / timing.pass_ms / 1e6
    gflops = 2 * elements * rows / timing.pass_ms / 1e6
    each = " | ".join(f"{timing.shape_ms[shape]:.3f}" for shape in (*LAYER_SHAPES, HEAD_SHAPE))
    tokens_per_s = rows / timing.pass_ms * 1e3
    print(
        f"| {name} | {rows} | {timing.pass_ms:.2f} | {tokens_per_s:.1f} | {gb_per_s:.1f} | {gflops:.0f} | {each} |",
        flush=True,
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 512], help="rows of the products' inputs")
    parser.add_argument("--hints", type=int, nargs="+", default=[1, 32], help="rows that packing is tuned for")
    parser.add_argument("--only", nargs="+", default=[""], help="layouts with one of these in their name")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each line of the table")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"{processor()}, {capability}, {args.threads} threads; torch {torch.__version__}; seed {args.seed}")
    print("Products of GPT-2 124M: best whole pass, and medians of single products in ms.\n")
    names = " | ".join(f"{k}x{n}" for k, n in (*LAYER_SHAPES, HEAD_SHAPE))
    print(f"| layout | rows | pass ms | tok/s | weights GB/s | GFLOP/s | {names} |")
    print("|---|" + "---:|" * 10)
    weights = draw_weights(args.seed)
    for name, layout in layouts(args.hints).items():
        if not any(part in name for part in args.only):
            continue
        products = [layout.prepare(weight, bias) for weight, bias in weights]
        check(products, weights, layout.weight_bytes)
        for rows in args.rows:
            report(name, rows, measure(products, rows, args.seconds), layout.weight_bytes)


if __name__ == "__main__":
    main()
