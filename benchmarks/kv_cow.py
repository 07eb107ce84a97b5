"""What it costs when requests that share a partly filled block each append a token: batched, and one by one.

    python -m benchmarks.kv_cow [--old-len 1] [--batch-size 16] [--iters 5000] [--layers 12] [--device cuda]

A step is: every request joins the cached prefix, its block is copied, one token's K and V are appended for each
layer, and the request ends. `Batched` does that as the engine does, with one trip to the block pool and one copy for
all requests and layers; `OneByOne` takes the requests one after the other and copies K and V layer by layer.
"""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch

from roseinfer.attention.kv_store import KVStore
from roseinfer.attention.spec import AttentionSpec
from roseinfer.bench.report import header, table, write_json
from roseinfer.cli import run_alone
from roseinfer.commands import Command
from roseinfer.core.config.engine import CacheConfig
from roseinfer.core.config.option import check_positive, option
from roseinfer.core.errors import ConfigError, RoseinferError
from roseinfer.core.plan import BlockCopy
from roseinfer.kv.manager import KvManager
from roseinfer.options import Group, OptionParser, OptionSet

NAME = "kv_cow"
HELP = "time copy-on-write of KV blocks, batched and one by one"
PARENT = "parent"
ROUNDS = 20
WARMUP_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCowConfig:
    """A batch of requests that share a partly filled block and each append one token to it."""

    old_len: int = option(1, "tokens that the requests share")
    batch_size: int = option(16, "requests that diverge at once")
    iters: int = option(5000, "batches that count")
    layers: int = option(12, "layers of the KV cache")
    heads: int = option(12, "KV heads")
    head_dim: int = option(64, "numbers of each head")
    block_size: int = option(16, "tokens of a KV block, a power of two up to 256")
    dtype: str = option(
        "auto",
        "of the cache; auto = bfloat16 on a GPU, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "auto = cuda if there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads; default: all cores")
    json: str | None = option(None, "write the result to this file", metavar="FILE")

    def __post_init__(self) -> None:
        check_positive(self, "old_len", "batch_size", "iters", "layers", "heads", "head_dim")
        if self.threads is not None:
            check_positive(self, "threads")
        CacheConfig(block_size=self.block_size)  # raises if it is no block size
        if self.old_len % self.block_size == 0:
            raise ConfigError(
                f"old_len {self.old_len} fills its last block of block_size {self.block_size}: nothing is copied"
            )


OPTIONS = OptionSet(Group(KvCowConfig, "benchmark"))


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    """Measure both ways and print microseconds per request and layer."""
    given = OPTIONS.read(args)
    config = OPTIONS.build(KvCowConfig, given)
    print(header("copy-on-write", given), flush=True)
    result = measure(config)
    rows = {
        "batched": result.batched_us,
        "  of it bookkeeping": result.bookkeeping_us,
        "naive (per request and layer)": result.naive_us,
    }
    print(f"{config.iters} times {config.batch_size} requests, {config.layers} layers, {config.old_len} tokens shared")
    print(table([{"copy-on-write": name, "us": us} for name, us in rows.items()]))
    print(f"naive / batched: {result.speedup:.1f}; the contents of both caches are right")
    if config.json:
        write_json(config.json, {**asdict(result), "speedup": result.speedup}, given)
    return 0


class WrongContentsError(RoseinferError):
    """A way of copying left something else in the cache than the tokens that belong there."""


@dataclass(frozen=True, slots=True)
class KvCowResult:
    """Microseconds per copy-on-write: of one request and one layer. `bookkeeping_us` is part of `batched_us`."""

    batched_us: float
    naive_us: float
    bookkeeping_us: float

    @property
    def speedup(self) -> float:
        return self.naive_us / self.batched_us


class Cache:
    """A KV cache that holds a prefix of `old_len` tokens, whose last block is partly filled.

    `appended`: [batch, layers, 2, heads, head_dim], the K and V of each request's next token.
    """

    def __init__(self, config: KvCowConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.tail = config.old_len % config.block_size
        prefix_blocks = -(-config.old_len // config.block_size)
        num_blocks = prefix_blocks + config.batch_size
        self.kv = KvManager(num_blocks, config.block_size)
        spec = AttentionSpec(heads=config.heads, kv_heads=config.heads, head_dim=config.head_dim, scale=1.0)
        self.store = KVStore(num_blocks, config.block_size, [spec] * config.layers, dtype, device)
        self.names = [f"request-{i}" for i in range(config.batch_size)]
        shape = (config.batch_size, config.layers, 2, config.heads, config.head_dim)
        random = torch.Generator().manual_seed(0)
        self.appended = torch.randn(shape, generator=random).to(device, dtype)
        self.kv.open(PARENT)
        assert self.kv.grow(PARENT, config.old_len) is not None
        filled = torch.randn(self.store.data[:prefix_blocks].shape, generator=random).to(device, dtype)
        self.store.data[list(self.kv.table(PARENT))] = filled

    def share(self, name: str) -> None:
        self.kv.open(name)
        self.kv.fork(PARENT, name, self.config.old_len)

    def free(self, copies: list[BlockCopy]) -> None:
        self.kv.copies_done(copies)
        for name in self.names:
            self.kv.close(name)

    def contents(self) -> torch.Tensor:
        """What the requests see: [batch, old_len + 1, layers, 2, heads, head_dim]."""
        tables = torch.tensor([self.kv.table(name) for name in self.names], device=self.device)
        blocks = self.store.data[tables].permute(0, 1, 4, 2, 3, 5, 6)
        return blocks.flatten(1, 2)[:, : self.config.old_len + 1].clone()

    def expected(self) -> torch.Tensor:
        """The prefix and each request's own token."""
        table = torch.tensor(self.kv.table(PARENT), device=self.device)
        prefix = self.store.data[table].permute(0, 3, 1, 2, 4, 5).flatten(0, 1)[: self.config.old_len]
        prefix = prefix[None].expand(self.config.batch_size, *prefix.shape)
        return torch.cat((prefix, self.appended[:, None]), dim=1)


class Batched:
    """All requests and layers at once."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._wants = [(name, cache.config.old_len + 1) for name in cache.names]
        # [blocks, layers, 2, heads, head_dim]: the slot behind the prefix's last token, in every block.
        self._slot = cache.store.data[:, :, :, cache.tail]

    def step(self) -> list[BlockCopy]:
        """Leaves the requests open; `Cache.free` ends them."""
        cache, copies = self._cache, self.grow()
        src, dst, _ = zip(*copies, strict=True)
        pairs = _upload((src, dst), cache.device)
        cache.store.copy_blocks(pairs[0], pairs[1], cache.tail)
        self._slot.index_copy_(0, pairs[1], cache.appended)
        return copies

    def grow(self) -> list[BlockCopy]:
        """The bookkeeping of `step`."""
        for name in self._cache.names:
            self._cache.share(name)
        grown = self._cache.kv.grow_many(self._wants)
        assert grown is not None, "there is a block for each request"
        return [growth.copy for growth in grown if growth.copy is not None]


class OneByOne:
    """The same work request by request, and within a request layer by layer, K and V apart."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        # K and V of each layer, and each request's tokens for them.
        self._planes = cache.store.data.flatten(1, 2).unbind(1)
        self._tokens = [tokens.unbind() for tokens in cache.appended.flatten(1, 2)]

    def step(self) -> list[BlockCopy]:
        """Leaves the requests open; `Cache.free` ends them."""
        cache, copies = self._cache, []
        for i, name in enumerate(cache.names):
            cache.share(name)
            growth = cache.kv.grow(name, cache.config.old_len + 1)
            assert growth is not None and growth.copy is not None, "the last block of the prefix is shared"
            self._copy_and_append(growth.copy, self._tokens[i])
            copies.append(growth.copy)
        return copies

    def _copy_and_append(self, copy: BlockCopy, tokens: tuple[torch.Tensor, ...]) -> None:
        src, dst, end = copy
        for plane, token in zip(self._planes, tokens, strict=True):
            plane[dst, :end].copy_(plane[src, :end])
            plane[dst, end].copy_(token)


@torch.inference_mode()
def measure(config: KvCowConfig) -> KvCowResult:
    """Both ways in turns, each turn timed as a whole.

    Raises `ConfigError` for a GPU that is not there, `WrongContentsError` if the cache does not hold what it should.
    """
    device, dtype = _device(config), _dtype(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    caches = [Cache(config, device, dtype) for _ in range(2)]
    batched, naive = Batched(caches[0]), OneByOne(caches[1])
    for way, cache in ((batched, caches[0]), (naive, caches[1])):
        for _ in range(WARMUP_STEPS):
            _check(cache, way.step())
    seconds = [0.0, 0.0, 0.0]
    for steps in _turns(config.iters):
        seconds[0] += _time(batched.step, caches[0], steps)
        seconds[1] += _time(naive.step, caches[1], steps)
        seconds[2] += _time(batched.grow, caches[0], steps)
    for way, cache in ((batched, caches[0]), (naive, caches[1])):
        _check(cache, way.step())
    scale = 1e6 / (config.iters * config.batch_size * config.layers)
    return KvCowResult(*(scale * total for total in seconds))


def _turns(iters: int) -> list[int]:
    """`iters` in at most ROUNDS parts."""
    rounds = min(ROUNDS, iters)
    return [iters // rounds + (i < iters % rounds) for i in range(rounds)]


def _time(step: Callable[[], list[BlockCopy]], cache: Cache, steps: int) -> float:
    _synchronize(cache.device)
    began = time.perf_counter()
    for _ in range(steps):
        cache.free(step())
    _synchronize(cache.device)
    return time.perf_counter() - began


def _check(cache: Cache, copies: list[BlockCopy]) -> None:
    same = torch.equal(cache.contents(), cache.expected())
    cache.free(copies)
    cache.kv.check_integrity()
    if not same:
        raise WrongContentsError("the cache does not hold the tokens that were copied and appended")


def _upload(pairs: tuple[tuple[int, ...], tuple[int, ...]], device: torch.device) -> torch.Tensor:
    """One transfer, through pinned memory, that nobody waits for."""
    if device.type != "cuda":
        return torch.tensor(pairs)
    return torch.tensor(pairs, pin_memory=True).to(device, non_blocking=True)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device(config: KvCowConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is cuda, but PyTorch finds no CUDA GPU")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _dtype(config: KvCowConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if _device(config).type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def main(argv: Sequence[str] | None = None) -> int:
    return run_alone(cast(Command, sys.modules[__name__]), "python -m benchmarks.kv_cow", argv)


if __name__ == "__main__":
    sys.exit(main())
