"""Copies of KV blocks between a GPU and host memory: that they are right, what they take, what steps beside them lose.

    python -m benchmarks.kv_host [--layers 36 --kv-heads 8 --head-dim 128] [--host-gib 4] [--blocks 1,4,16,64,256]

Without a GPU the same runs between two tensors. `rate`: GB/s on the device. `call`: microseconds of the host until the
copies are queued. The steps are products with the weights of a model of 8B parameters, for 64 rows, in a CUDA graph.
"""

import argparse
import random
from collections.abc import Sequence
from time import perf_counter

import torch

from roseinfer.attention.host_store import GIB, HostStore, num_host_blocks
from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec
from roseinfer.bench.report import header, percentile
from roseinfer.core.plan import HostCopy
from roseinfer.runner.host_copies import Copier, CpuCopier

REPEATS = 7


def make(args: argparse.Namespace, device: torch.device) -> tuple[KVStore, HostStore, Copier]:
    spec = AttentionSpec(heads=args.kv_heads, kv_heads=args.kv_heads, head_dim=args.head_dim, scale=1.0)
    store = KVStore(2 * max(args.blocks) + 8, 16, [spec] * args.layers, torch.bfloat16, device)
    began, width = perf_counter(), store.blocks[0].shape[1]
    count = num_host_blocks(args.host_gib, width)
    if count < 2 * max(args.blocks):
        raise SystemExit(f"--host-gib: {2 * max(args.blocks)} blocks take {2 * max(args.blocks) * width / GIB:.3g} GiB")
    host = HostStore(count, store)
    print(f"{args.host_gib:g} GiB of host memory taken in {perf_counter() - began:.2f} s")
    if device.type != "cuda":
        return store, host, CpuCopier(store, host)
    from roseinfer.runner.cuda_host_copies import CudaCopier

    return store, host, CudaCopier(store, host)


# --- that they are right --------------------------------------------------------------------------------------------
def check(store: KVStore, host: HostStore, copier: Copier, rounds: int = 20) -> None:
    """Random copies behind a device that is kept busy and writes the blocks at the last moment, against a model."""
    rng, device = random.Random(0), store.parts[0].device
    blocks = store.blocks[0]
    count = min(len(blocks) // 2, host.num_blocks // 2, 24)
    known: dict[int, torch.Tensor] = {}
    for number in range(rounds):
        chosen = rng.sample(range(len(blocks)), 2 * count)
        places = rng.sample(range(host.num_blocks), count)
        stores = [HostCopy(block, place) for block, place in zip(chosen[:count], places, strict=True)]
        old = [place for place in known if place not in places]
        loads = [HostCopy(block, rng.choice(old)) for block in chosen[count:] if old]
        if device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # some 10 ms: copies that do not wait would read and be overwritten
        blocks[torch.tensor(chosen, device=device)] = number + 1
        blocks[:, ::4096] = torch.arange(len(blocks), device=device, dtype=torch.uint8)[:, None]
        copier.start(loads, stores).wait()
        for block, place in loads:
            assert torch.equal(blocks[block], known[place]), f"round {number}: block {block} from {place}"
        for block, place in stores:
            known[place] = blocks[block].clone()
    for place, kept in known.items():
        assert torch.equal(host.parts[0][place], kept.cpu()), f"host block {place}"
    print(f"right: {rounds} rounds of {count} copies each way behind late writes")


# --- what they take -------------------------------------------------------------------------------------------------
def rates(store: KVStore, host: HostStore, copier: Copier, counts: Sequence[int]) -> None:
    rng = random.Random(1)
    width = store.blocks[0].shape[1]
    print(f"\n{width / 2**20:.2f} MiB a block\nblocks     load GB/s    store GB/s     both GB/s   call us (load)")
    for count in counts:
        figures: dict[str, list[float]] = {"load": [], "store": [], "both": [], "call": []}
        for _ in range(REPEATS):
            blocks = rng.sample(range(len(store.blocks[0])), 2 * count)
            places = rng.sample(range(host.num_blocks), 2 * count)
            loads = [HostCopy(b, p) for b, p in zip(blocks[:count], places, strict=False)]
            stores = [HostCopy(b, p) for b, p in zip(blocks[count:], places[count:], strict=True)]
            began = perf_counter()
            running = copier.start(loads, [])
            figures["call"].append(perf_counter() - began)
            figures["load"].append(running.wait().load_s)
            figures["store"].append(copier.start([], stores).wait().store_s)
            figures["both"].append(max(copier.start(loads, stores).wait()))
        load, store_, both, call = (percentile(figures[name], 50) for name in ("load", "store", "both", "call"))
        total = count * width / 1e9
        print(
            f"{count:6d} {total / load:13.1f} {total / store_:13.1f} {2 * total / both:13.1f} {1e6 * call:12.0f}"
            f"      ({1e6 * load / count:.1f} and {1e6 * store_ / count:.1f} us a block)"
        )


# --- what steps lose ------------------------------------------------------------------------------------------------
def beside(store: KVStore, host: HostStore, copier: Copier, count: int, rows: int = 64, steps: int = 100) -> None:
    """Steps in a row, of which each is submitted while the one before it runs, with and without copies."""
    device = store.parts[0].device
    weights = [torch.randn(4096, 12288, dtype=torch.bfloat16, device=device) for _ in range(8)]
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=device)

    def step() -> None:
        for turn in range(160):
            torch.mm(x, weights[turn % len(weights)])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rng = random.Random(2)
    print(f"\nsteps of {rows} rows   p50 ms    p99 ms   (copies of {count} blocks each way in every step)")
    for name in ("alone", "loads", "stores", "both"):
        took, ends = [], []
        for _ in range(steps):
            blocks = rng.sample(range(len(store.blocks[0])), 2 * count)
            places = rng.sample(range(host.num_blocks), 2 * count)
            pairs = [HostCopy(b, p) for b, p in zip(blocks, places, strict=True)]
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            loads = pairs[:count] if name in ("loads", "both") else []
            stores = pairs[count:] if name in ("stores", "both") else []
            copies = copier.start(loads, stores) if loads or stores else None
            graph.replay()
            last.record()
            ends.append((first, last, copies))
            if len(ends) > 2:
                began, ended, running = ends.pop(0)
                ended.synchronize()
                if running is not None:
                    running.wait()
                took.append(began.elapsed_time(ended))
        torch.cuda.synchronize()
        print(f"  {name:12s} {percentile(took, 50):10.3f} {percentile(took, 99):9.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--host-gib", type=float, default=4.0)
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--blocks", type=numbers, default=[1, 4, 16, 64, 256])
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(header("KV blocks to and from host memory", vars(args)))
    store, host, copier = make(args, device)
    check(store, host, copier)
    rates(store, host, copier, args.blocks)
    if device.type == "cuda":
        beside(store, host, copier, count=min(64, max(args.blocks)))


if __name__ == "__main__":
    main()
