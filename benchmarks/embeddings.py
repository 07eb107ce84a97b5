"""Throughput of embeddings in one process, compared with what the card allows.

    python -m benchmarks.embeddings [--model qwen3-0.6b] [--texts 1000] [--tokens 128] [--repeats 5]

The model has the shape of the GPU table's model of that name and dummy weights (Qwen3-Embedding-0.6B has that of
Qwen3-0.6B). All texts are given at once as random token ids, so nothing is tokenised. Prints texts per second of
`LLM.embed` (median, with the range), and of the device alone: the time of its kernels, by PyTorch's profiler, in one
more repeat. The bound is the arithmetic of the matrix products and of causal attention at 711 TFLOP/s (a bf16 product
of 8192-cubed matrices on one H200, see benchmarks/bounds.py). Without a GPU it prints no share of the bound.
"""

import argparse
import json
import random
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.bounds import CARD
from benchmarks.gpu_rows import MODELS
from benchmarks.model_cost import Chunk, ModelCost
from benchmarks.model_folders import write_folder
from roseinfer import LLM
from roseinfer.bench.report import header
from roseinfer.models.config import read_model_spec


def flops_of(folder: Path, texts: int, tokens: int) -> float:
    """Return the arithmetic of all texts: matrix products of the layers, and causal attention."""
    cost = replace(ModelCost.of(read_model_spec(folder), 2), head_weights=0)
    return cost.work([Chunk(0, tokens, 0)]).flops * texts


def device_seconds(llm: LLM, prompts: list[list[int]]) -> float:
    """Return the time of all kernels while `prompts` are embedded."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        llm.embed(prompts, use_tqdm=False)
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", choices=list(MODELS))
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=128, help="of each text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args()
    generator = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as made:
        folder = write_folder(args.model, Path(made))
        llm = LLM(model=str(folder), load_format="dummy", runner="pooling", seed=args.seed)
        prompts = [generator.choices(range(1000, 30_000), k=args.tokens) for _ in range(args.texts)]
        found_s = []
        for repeat in range(args.repeats + 1):
            for prompt in prompts:  # another first token, so that no text is in the prefix cache
                prompt[0] = 1000 + (prompt[0] + repeat + 1) % 29_000
            start_s = perf_counter()
            llm.embed(prompts, use_tqdm=False)
            found_s.append(perf_counter() - start_s)
        seconds = sorted(found_s[1:])
        print(
            header("embeddings", {"model": args.model, "texts": args.texts, "tokens": args.tokens, "seed": args.seed})
        )
        result = {"texts_s": args.texts / statistics.median(seconds), "seconds": seconds}
        low, high = args.texts / seconds[-1], args.texts / seconds[0]
        print(f"  LLM.embed   {result['texts_s']:,.0f} texts/s median   {low:,.0f} to {high:,.0f}")
        if torch.cuda.is_available():
            for prompt in prompts:
                prompt[0] = 1000 + (prompt[0] + 1) % 29_000
            flops, busy_s = flops_of(folder, args.texts, args.tokens), device_seconds(llm, prompts)
            bound = CARD.matrix_flops_s
            print(f"  bound       {args.texts * bound / flops:,.0f} texts/s at {bound / 1e12:.0f} TFLOP/s")
            shares = flops / statistics.median(seconds) / bound, flops / busy_s / bound
            print(f"  LLM.embed   {shares[0]:.1%} of the bound")
            print(
                f"  device      {shares[1]:.1%} of the bound: {args.texts / busy_s:,.0f} texts/s, {busy_s * 1e3:.1f} ms"
            )
            result |= {"device_s": busy_s, "share": shares[0], "device_share": shares[1]}
    if args.json is not None:
        args.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
