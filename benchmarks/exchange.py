"""Time of an exchange between GPUs, by the bytes of a rank's part and by method.

    python -m benchmarks.exchange [--ranks 2] [--width 4096] [--rows 1 8 64 256 1024 8192]

Each process has a GPU. Sums with a residual follow each other in a CUDA graph, as in a step. Prints microseconds for a
sum by our kernels (words, blocks) and by NCCL, which includes the addition of the residual.
`parallel.cuda_group.own_limit` and `kernels.comm.peers` have the limits that follow.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from roseinfer.kernels.comm.peers import PeerLayout, Peers
from roseinfer.kernels.comm.push_blocks import push_blocks
from roseinfer.kernels.comm.push_words import push_words
from roseinfer.parallel.cuda_group import START_TIMEOUT_S
from roseinfer.parallel.nccl import Nccl
from roseinfer.parallel.symmetric_memory import open_memory

# Sums in a graph, and replays of it that are timed.
SUMS, REPLAYS = 32, 5
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the microseconds of a run in a graph of SUMS runs: the median of REPLAYS replays."""
    run()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(SUMS):
            run()
    graph.replay()
    found = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / SUMS)
    return sorted(found)[REPLAYS // 2]


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    size = args.ranks
    store = dist.FileStore(f"{folder}/store", size)
    library = Nccl(dist.PrefixStore("nccl", store), rank, size, device)
    largest = max(args.rows) * args.width * 2
    layout = PeerLayout(size, largest)
    memory = open_memory("exchange", dist.PrefixStore("memory", store), rank, size, layout.bytes, device)
    peers = Peers.of(rank, layout, memory.addresses, device, START_TIMEOUT_S)
    if rank == 0:
        print(f"{size} x {torch.cuda.get_device_name()}, torch {torch.__version__}, width {args.width}, bfloat16")
        print(f"{'rows':>6} {'KB':>8} {'words':>8} {'blocks':>8} {'NCCL':>8}   us a sum with its residual", flush=True)
    for rows in args.rows:
        x = torch.zeros(rows, args.width, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)

        def by_nccl(x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
            library.all_reduce(x)
            residual.add_(x)

        ways: dict[str, Callable[[], object]] = {}
        if x.nbytes <= layout.word_limit:
            ways["words"] = partial(push_words, x, residual, peers)
        ways["blocks"] = partial(push_blocks, x, residual, peers)
        ways["NCCL"] = by_nccl
        found = {way: timed(run, device) for way, run in ways.items()}
        if rank == 0:
            times = " ".join(f"{found.get(way, math.nan):8.1f}" for way in ("words", "blocks", "NCCL"))
            print(f"{rows:6} {x.nbytes / 1024:8.0f} {times}", flush=True)
    memory.close()
    library.abort()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=4096, help="numbers of a row")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks:
        parser.error(f"{args.ranks} GPUs are needed, {torch.cuda.device_count()} found")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(measure, (args, folder), args.ranks)


if __name__ == "__main__":
    main()
