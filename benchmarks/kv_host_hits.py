"""What K and V in host memory bring to a request, and to others that decode beside it: whole engines, in this process.

    python -m benchmarks.kv_host_hits [--model Qwen/Qwen3-8B] [--lengths 1024,2048,3584] [--repeats 5] [--beside 8]
        [--kv-blocks 1024] [--host-gib 16] [--quantization fp8 --kv-cache-dtype fp8] [--device cpu] [--json FILE]

Conversations begin, and lose their blocks to other prompts. Then each goes on with `--new` tokens: alone, and while
`--beside` requests decode; once more right behind that, when the KV cache has its prefix. The same with an engine that
has host memory and with one that has none. The first conversation of each kind does not count. Weights are dummies, on
which no figure depends. Whether to load or to compute is the engine's own choice: `loaded` is the share of the prefix
that it loaded. On a CPU take `--model tiny` and smaller numbers; there a step's copies come before its rows.
"""

import argparse
import gc
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from roseinfer.bench.report import header, percentile, table, write_json
from roseinfer.core.outputs import OffloadStats
from roseinfer.core.sampling import SamplingParams
from roseinfer.engine.api import EngineInfo
from roseinfer.engine.core import Core
from roseinfer.engine.llm import make_engine_config
from roseinfer.engine.messages import Add
from roseinfer.engine.process import build_engine
from roseinfer.hub import model_folder

FIRST_ID = 10
DECODING_PROMPT = 128
SETTLING_STEPS, QUIET_STEPS, STEPS_BETWEEN = 20, 50, 10
MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """`lengths`: tokens of the prefixes. `new`: tokens behind them. `beside`: requests that decode meanwhile."""

    lengths: tuple[int, ...]
    repeats: int
    new: int
    beside: int
    kv_blocks: int
    seed: int


@dataclass(slots=True)
class Turns:
    """Of one prefix length, alone or beside others. Times in ms. `loaded`: tokens loaded for each turn. `again_ms`:
    asked once more. `gaps_ms`: between tokens of those that decode, as far as they ended while a turn waited.
    """

    length: int
    beside: int
    ttft_ms: list[float] = field(default_factory=list)
    again_ms: list[float] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Measured:
    """Of one engine. `quiet_ms`: gaps between the tokens of those that decode while nobody comes. `rates`: GB/s."""

    turns: list[Turns]
    quiet_ms: list[float]
    rates: dict[str, float]


class Driver:
    """Steps an engine and looks at the clock whenever tokens come."""

    def __init__(self, core: Core, info: EngineInfo, seed: int) -> None:
        self.core, self.info = core, info
        self._rng = random.Random(seed)
        self._number = 0
        self._newest: dict[str, float] = {}
        self._cached: dict[str, int] = {}
        self.decoding: set[str] = set()
        self.gaps_ms: list[float] = []  # of those

    def words(self, count: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, self.info.vocab_size) for _ in range(count)]

    def add(self, prompt: list[int], max_tokens: int) -> str:
        self._number += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.core.add(Add(str(self._number), prompt, params))
        return f"{self._number}:0"

    def step(self) -> None:
        outputs = self.core.step()
        now = perf_counter()
        for output in outputs:
            name = output.request_id
            if output.end is not None and output.end.error is not None:
                sys.exit(f"a request failed: {output.end.error}")
            if output.end is not None and name in self.decoding:
                sys.exit("requests that decode have ended too soon: fewer --repeats or --lengths")
            if output.started is not None:
                self._cached[name] = output.started.cached_tokens
            if output.token_ids:
                if name in self.decoding and name in self._newest:
                    self.gaps_ms.append(1e3 * (now - self._newest[name]))
                self._newest[name] = now

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(MOST_STEPS):
            if done():
                return
            self.step()
        sys.exit("the engine gets no further")

    def rest(self) -> None:
        """Until nobody is left."""
        self.until(lambda: not self.core.busy)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Milliseconds to the first token, which is the only one, and tokens of the prompt that were not computed."""
        began = perf_counter()
        name = self.add(prompt, 1)
        self.until(lambda: name in self._newest)
        return 1e3 * (self._newest[name] - began), self._cached[name]

    def let_decode(self, count: int) -> None:
        """Have so many requests decode from now on."""
        length = self.info.max_model_len - DECODING_PROMPT
        self.decoding = {self.add(self.words(min(DECODING_PROMPT, length)), length) for _ in range(count)}
        self.until(lambda: self.decoding <= self._newest.keys())

    def stop_decoding(self) -> None:
        names, self.decoding = list(self.decoding), set()
        self.core.abort(names)
        self.rest()

    @property
    def offload(self) -> OffloadStats:
        return self.core.stats().offload or OffloadStats()


# --- what is measured -------------------------------------------------------------------------------------------------
def measure(driver: Driver, sizes: Sizes) -> Measured:
    """All lengths alone, then beside others."""
    turns = [Turns(length, beside) for beside in dict.fromkeys((0, sizes.beside)) for length in sizes.lengths]
    prefixes = [[driver.words(each.length) for _ in range(sizes.repeats + 1)] for each in turns]
    for prefix in (prefix for several in prefixes for prefix in several):
        driver.ask(prefix)
    lost = 0
    while lost < sizes.kv_blocks * driver.info.block_size * 5 // 4:
        lost += len(prompt := driver.words(max(sizes.lengths)))
        driver.ask(prompt)
    driver.rest()
    begun = driver.offload
    rates = {"stores while prompts are computed": _rate(driver.info, begun.stored, begun.stores_s)}
    quiet_ms: list[float] = []
    for each, several in zip(turns, prefixes, strict=True):
        if each.beside and not driver.decoding:
            begun = _rate_since(driver, begun, rates, "loads alone")
            driver.let_decode(each.beside)
            driver.steps(SETTLING_STEPS)
            quiet_ms = _gaps(driver, lambda: driver.steps(QUIET_STEPS))
        for number, prefix in enumerate(several):
            _take_turn(driver, each, prefix, sizes, counts=number > 0)
    _rate_since(driver, begun, rates, "loads beside steps" if driver.decoding else "loads alone")
    driver.stop_decoding()
    return Measured(turns, quiet_ms, {name: rate for name, rate in rates.items() if rate})


def _take_turn(driver: Driver, turns: Turns, prefix: list[int], sizes: Sizes, *, counts: bool) -> None:
    before, first = driver.offload.loaded, len(driver.gaps_ms)
    ttft_ms, cached = driver.ask(prefix + driver.words(sizes.new))
    gaps_ms = driver.gaps_ms[first:]
    loaded = (driver.offload.loaded - before) * driver.info.block_size
    if cached > loaded:
        sys.exit(f"the KV cache still had {cached - loaded} tokens of a prefix: take fewer --kv-blocks")
    driver.steps(STEPS_BETWEEN)
    again_ms, _ = driver.ask(prefix + driver.words(sizes.new))
    driver.steps(STEPS_BETWEEN)
    if counts:
        turns.ttft_ms.append(ttft_ms)
        turns.again_ms.append(again_ms)
        turns.loaded.append(loaded)
        turns.gaps_ms += gaps_ms


def _gaps(driver: Driver, run: Callable[[], None]) -> list[float]:
    first = len(driver.gaps_ms)
    run()
    return driver.gaps_ms[first:]


def _rate_since(driver: Driver, begun: OffloadStats, rates: dict[str, float], name: str) -> OffloadStats:
    now = driver.offload
    rates[name] = _rate(driver.info, now.loaded - begun.loaded, now.loads_s - begun.loads_s)
    return now


def _rate(info: EngineInfo, blocks: int, seconds: float) -> float:
    return blocks * info.block_bytes / seconds / 1e9 if seconds else 0.0


def run(sizes: Sizes, host_gib: float, **options: Any) -> tuple[Measured, EngineInfo]:
    """With an engine of its own. `options` as those of `LLM`."""
    room = {"num_kv_blocks": sizes.kv_blocks, "max_num_seqs": sizes.beside + 8, "kv_offloading_size": host_gib}
    config = make_engine_config(load_format="dummy", scheduling_policy="fifo", seed=sizes.seed, **room, **options)
    began = perf_counter()
    core, info = build_engine(config, model_folder(config.model))
    _check_room(sizes, info)
    print(f"engine with {host_gib:g} GiB of host memory: started in {perf_counter() - began:.1f} s", flush=True)
    began = perf_counter()
    found = measure(Driver(core, info, sizes.seed), sizes)
    print(f"  measured in {perf_counter() - began:.1f} s", flush=True)
    core.close()
    return found, info


def _check_room(sizes: Sizes, info: EngineInfo) -> None:
    longest = max(sizes.lengths) + sizes.new + 1
    if longest > info.max_model_len:
        sys.exit(f"--max-model-len: prefix, new tokens and answer are {longest} tokens")
    held = sizes.beside * 2 * DECODING_PROMPT + longest
    if held > sizes.kv_blocks * info.block_size:
        sys.exit(f"--kv-blocks: {-(-held // info.block_size)} at least for {held} tokens")


# --- what is said -----------------------------------------------------------------------------------------------------
def _spread(values: list[float]) -> str:
    return f"{percentile(values, 50):.1f} ({min(values):.1f} to {max(values):.1f})"


def ttft_rows(computed: Measured, loaded: Measured) -> list[dict[str, Any]]:
    rows = []
    for off, on in zip(computed.turns, loaded.turns, strict=True):
        ratio = percentile(off.ttft_ms, 50) / percentile(on.ttft_ms, 50)
        rows.append(
            {
                "prefix": on.length,
                "decode beside": on.beside,
                "computed": _spread(off.ttft_ms),
                "from host memory": _spread(on.ttft_ms),
                "ratio": f"{ratio:.1f}",
                "loaded": f"{fmean(on.loaded) / on.length:.0%}",
                "in the KV cache": _spread(on.again_ms),
            }
        )
    return rows


def gap_rows(computed: Measured, loaded: Measured) -> list[dict[str, Any]]:
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, found in (("none", computed), ("some", loaded)):
        kinds["nobody", name] = found.quiet_ms
        for each in found.turns:
            if each.beside:
                kinds[f"one with a prefix of {each.length}", name] = each.gaps_ms
    return [
        {
            "who comes": who,
            "host memory": name,
            "gaps": len(gaps),
            "p50": percentile(gaps, 50),
            "p90": percentile(gaps, 90),
            "longest": max(gaps, default=None),
        }
        for (who, name), gaps in sorted(kinds.items(), key=lambda kind: kind[0][0] != "nobody")
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--lengths", type=lambda text: tuple(map(int, text.split(","))), default=(1024, 2048, 3584))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--beside", type=int, default=8)
    parser.add_argument("--kv-blocks", type=int, default=1024)
    parser.add_argument("--host-gib", type=float, default=16.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    print(header("requests whose prefix is in host memory", vars(args)), flush=True)
    sizes = Sizes(args.lengths, args.repeats, args.new, args.beside, args.kv_blocks, args.seed)
    engine = ("model", "max_model_len", "max_num_batched_tokens", "quantization", "kv_cache_dtype", "device", "threads")
    options = {name: getattr(args, name) for name in engine}
    loaded, info = run(sizes, args.host_gib, **options)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    computed, _ = run(sizes, 0.0, **options)
    print(f"\n{info.block_bytes / 2**20:.2f} MiB a block; weights {info.weights}, K and V {info.kv_cache}")
    print(f"\nms to the first token, p50 (least to most of {sizes.repeats}):")
    print(table(ttft_rows(computed, loaded)))
    if sizes.beside:
        print(f"\nms between two tokens of {sizes.beside} that decode, until who comes has its first token:")
        print(table(gap_rows(computed, loaded)))
    print("\ncopies, GB/s while some were under way:")
    for name, rate in loaded.rates.items():
        print(f"  {name}: {rate:.3g}")
    if args.json:
        write_json(args.json, {"computed": asdict(computed), "loaded": asdict(loaded)}, vars(args))


if __name__ == "__main__":
    main()
