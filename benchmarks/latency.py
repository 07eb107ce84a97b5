"""`roseinfer bench latency`, with Hugging Face transformers on the same work in the same run.

python -m benchmarks.latency gpt2 --load-format dummy --batch-size 1 --batch-size 8 [options of bench latency]
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from roseinfer.bench.batches import summarise
from roseinfer.bench.config import LatencyConfig
from roseinfer.bench.load import BatchTimes
from roseinfer.bench.report import header
from roseinfer.cli.commands import Command, bench_latency
from roseinfer.cli.commands.groups import engine_config
from roseinfer.cli.main import run_alone
from roseinfer.config.hub import model_folder
from roseinfer.core.config.engine import EngineConfig

NAME = "latency"
HELP = "measure the latency of batches of equal requests, with transformers beside"
OPTIONS = bench_latency.OPTIONS


class TransformersPeer:
    """Greedy `generate` on a model of the same shape with random weights, whose values do not affect speed."""

    def __init__(self, folder: Path, threads: int | None, seed: int) -> None:
        import transformers

        if threads:
            torch.set_num_threads(threads)
        torch.manual_seed(seed)
        config = transformers.AutoConfig.from_pretrained(folder)
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._stops = transformers.StoppingCriteriaList

    def run(self, prompts: list[list[int]], output_len: int) -> BatchTimes:
        times: list[float] = []

        def note(ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        inputs = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                min_new_tokens=output_len,
                max_new_tokens=output_len,
                pad_token_id=0,
                stopping_criteria=self._stops([note]),
            )
        batch = len(prompts)
        decode_s = times[-1] - times[0]
        return BatchTimes(batch, batch * output_len, times[-1] - start, batch * (output_len - 1), decode_s)


def run(args: Namespace) -> int:
    """Measure roseinfer, then transformers, and print both."""
    given = OPTIONS.read(args)
    bench, engine = OPTIONS.build(LatencyConfig, given), engine_config(OPTIONS, given)
    print(header("roseinfer and transformers", given), flush=True)
    rows = bench_latency.measure(bench, engine, given) + measure_peer(bench, engine)
    bench_latency.report(rows, bench, given)
    return 0


def measure_peer(bench: LatencyConfig, engine: EngineConfig) -> list[dict[str, Any]]:
    """Return one row per batch size, like `bench_latency.measure`."""
    load = bench_latency.workload(bench, engine)
    peer = TransformersPeer(model_folder(engine.model), engine.model.threads, load.seed)
    measured = {}
    for size in load.batch_sizes:
        batches = [peer.run(load.prompts(size, i), load.output_len) for i in range(load.warmup + load.iterations)]
        measured[size] = batches[load.warmup :]
    return summarise("transformers", measured)


def main(argv: Sequence[str] | None = None) -> int:
    return run_alone(cast(Command, sys.modules[__name__]), "python -m benchmarks.latency", argv)


if __name__ == "__main__":
    sys.exit(main())
