"""Growth of the engine's memory on a CPU with prompts of ever new lengths.

    python -m benchmarks.memory_growth tiny
    python -m benchmarks.memory_growth gpt2 --load-format dummy

A product with a new number of rows gets a new kernel, so the cache of kernels must be bounded. Prompts of random tokens
run one at a time, each length once, in random order; the engine runs in this process, whose resident memory is read
from /proc (Linux). The first prompts allocate what every engine needs: activations of long prompts, and most pages of
the KV cache. Growth is counted after them.
"""

import argparse
import itertools
import random
import resource
from pathlib import Path

from roseinfer.bench.report import header
from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig
from roseinfer.core.outputs import COMPLETE
from roseinfer.core.request import Prompt
from roseinfer.core.sampling import SequenceParams
from roseinfer.engine.build import build_engine
from roseinfer.engine.core import EngineCore
from roseinfer.engine.messages import Add

SHORTEST = 4
OUTPUT_TOKENS = 2


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def draw_lengths(rng: random.Random, count: int, longest: int) -> list[int]:
    """Return `count` different lengths, the longest first, so that its activations are allocated from the start."""
    lengths = range(SHORTEST, longest)
    if count - 1 > len(lengths):
        raise SystemExit(f"there are only {len(lengths) + 1} lengths from {SHORTEST} to {longest}")
    return [longest, *rng.sample(lengths, count - 1)]


def run_prompt(core: EngineCore, name: str, tokens: list[int]) -> None:
    core.add(Add(name, Prompt(tokens, SequenceParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True))))
    while core.busy:
        for output in core.step():
            if output.end is not None and output.end.reason not in COMPLETE:
                raise SystemExit(f"{name} did not end as it should: {output.end}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", choices=("int8",))
    parser.add_argument("--first", type=int, default=40, help="prompts before growth is counted")
    parser.add_argument("--new", type=int, default=700, help="prompts of lengths not seen before, while it is counted")
    parser.add_argument("--longest", type=int, help="tokens of the longest prompt; default: all the model takes")
    parser.add_argument("--every", type=int, default=100, help="prompts between the lines of the table")
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="default: the engine's")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    weights = {"load_format": args.load_format, "dtype": args.dtype, "quantization": args.quantization}
    model = ModelConfig(model=args.model, device="cpu", seed=args.seed, **weights)
    cache = CacheConfig(kv_cache_memory_bytes=args.kv_cache_memory_bytes)
    core, info = build_engine(EngineConfig(model=model, cache=cache), model_folder(model))
    print(header("memory growth", vars(args)))
    rng = random.Random(args.seed)
    longest = min(info.facts.max_model_len - OUTPUT_TOKENS, args.longest or info.facts.max_model_len)
    lengths = draw_lengths(rng, args.first + args.new, longest)
    print("| prompts | resident MB |\n| ---: | ---: |")
    print(f"| 0 | {resident_mb():.0f} |", flush=True)
    settled = 0.0
    for done, length in zip(itertools.count(1), lengths, strict=False):
        run_prompt(core, f"prompt-{done}", rng.choices(range(info.facts.vocab_size), k=length))
        if done == args.first:
            settled = resident_mb()
        if done in (args.first, len(lengths)) or done % args.every == 0:
            print(f"| {done} | {resident_mb():.0f} |", flush=True)
    core.close()
    print(f"growth over {args.new} new lengths after the first {args.first}: {resident_mb() - settled:.0f} MB")


if __name__ == "__main__":
    main()
