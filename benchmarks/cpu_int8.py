#!/usr/bin/env python3
"""Decoding GPT-2 124M on a CPU in int8, in other formats and by llama.cpp, in alternating batches.

    python -m benchmarks.cpu_int8
    python -m benchmarks.cpu_int8 --kinds float32 int8 bfloat16 Q8_0 --peer-python VENV/bin/python

Weights and prompts are random. Each kind is loaded in a process of its own, and they take turns batch by batch, so that
a machine whose speed varies does so for all. A rate is tokens a second from when every request of a batch has its first
token. The ratio to the first kind is the median of the rounds' own ratios. `--peer-python` names the Python of an
environment with llama-cpp-python and gguf, which runs the kinds in capitals (see benchmarks/llama_cpp_worker.py).
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.core.cpu_settings import prepare_cpu_libraries
from roseinfer.core.request import Prompt

if TYPE_CHECKING:
    from roseinfer.engine.core import EngineCore

# The largest batch gets a cache that is touched completely before the measurement: first uses of memory are slow on a
# virtual machine and say nothing about the weights' format.
BLOCK_SIZE = 16
PEER = Path(__file__).with_name("llama_cpp_worker.py")


class Worker:
    """Child process that answers each line with a number of prompts by a decoding rate in tokens per second."""

    def __init__(self, kind: str, args: argparse.Namespace) -> None:
        self.kind = kind
        options = ["--threads", args.threads, "--input-len", args.input_len, "--output-len", args.output_len]
        options += ["--streams", max(args.batch_sizes)]
        if kind.isupper():
            command = [args.peer_python, PEER, "--kind", kind, *options]
        else:
            command = [sys.executable, "-m", "benchmarks.cpu_int8", "--worker", kind, "--model", args.model, *options]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen([str(part) for part in command], stdin=pipe, stdout=pipe, text=True)

    def ask(self, batch_size: int) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(f"{batch_size}\n")
        self._child.stdin.flush()
        return float(self.line())

    def line(self) -> str:
        assert self._child.stdout is not None
        text = self._child.stdout.readline()
        if not text:
            raise SystemExit(f"{self.kind}: the process ended")
        return text.strip()

    def close(self) -> str:
        """Stop the child and return its last line."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        last = self.line()
        self._child.wait()
        return last


def serve(args: argparse.Namespace) -> None:
    """Run a child for roseinfer's formats: an engine core that is stepped here, like llama.cpp's."""
    from roseinfer.bench.batches import vocab_size
    from roseinfer.bench.load import make_prompts
    from roseinfer.config.hub import model_folder
    from roseinfer.core.config.engine import CacheConfig, EngineConfig, ModelConfig
    from roseinfer.engine.build import build_engine

    format_of = {"quantization": args.worker} if args.worker == "int8" else {"dtype": args.worker}
    options = {"load_format": "dummy", "device": "cpu", "threads": args.threads}
    model = ModelConfig(model=args.model, **options, **format_of)
    blocks = args.streams * (-(-(args.input_len + args.output_len) // BLOCK_SIZE) + 1)
    config = EngineConfig(model=model, cache=CacheConfig(num_kv_blocks=blocks))
    core, _ = build_engine(config, model_folder(model))
    print(f"roseinfer {args.worker}", flush=True)
    for number, line in enumerate(sys.stdin):
        prompts = make_prompts(int(line), args.input_len, vocab_size(model), number)
        print(decode(core, f"batch-{number}", prompts, args.output_len), flush=True)
    core.close()
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


def decode(core: "EngineCore", name: str, prompts: list[list[int]], output_len: int) -> float:
    """Return tokens per second between the first token of the last prompt and the last token."""
    from roseinfer.core.sampling import SequenceParams
    from roseinfer.engine.messages import Add

    params = SequenceParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(Add(f"{name}-{i}", Prompt(prompt, params)))
    begun: set[str] = set()
    start, tokens = 0.0, 0
    while core.busy:
        outputs = core.step()
        if len(begun) == len(prompts):
            tokens += sum(len(output.token_ids) for output in outputs)
            continue
        begun.update(output.request_id for output in outputs if output.token_ids)
        start = time.perf_counter()
    return tokens / (time.perf_counter() - start)


def measure(workers: list[Worker], batch_sizes: list[int], rounds: int, warm_up: int) -> None:
    from roseinfer.bench.report import table

    rows = []
    for size in batch_sizes:
        rates: dict[str, list[float]] = {worker.kind: [] for worker in workers}
        for number in range(warm_up + rounds):
            for worker in workers:
                rate = worker.ask(size)
                if number >= warm_up:
                    rates[worker.kind].append(rate)
        first = rates[workers[0].kind]
        for kind, found in rates.items():
            ratios = [rate / base for rate, base in zip(found, first, strict=True)]
            row = {"kind": kind, "streams": size, "decode tok/s": statistics.median(found), "best": max(found)}
            row |= {f"of {workers[0].kind}": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
            rows.append(row)
    print(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["float32", "int8"], help="the first is what others are told by")
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--input-len", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--peer-python", help="of an environment with llama-cpp-python and gguf")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    prepare_cpu_libraries()
    if args.worker:
        serve(args)
        return
    if any(kind.isupper() for kind in args.kinds) and not args.peer_python:
        parser.error("kinds of llama.cpp need --peer-python")

    from roseinfer.bench.report import header

    print(header("decoding in eight bits", vars(args)), flush=True)
    workers = [Worker(kind, args) for kind in args.kinds]
    names = [worker.line() for worker in workers]
    measure(workers, args.batch_sizes, args.rounds, args.warm_up)
    for name, worker in zip(names, workers, strict=True):
        print(f"{name}: {worker.close()}")


if __name__ == "__main__":
    main()
