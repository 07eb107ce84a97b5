"""roseinfer bench throughput: requests and tokens per second of an engine that is never idle."""

import asyncio
from argparse import Namespace

from roseinfer.bench.config import ThroughputConfig
from roseinfer.cli.commands.groups import ENGINE, engine_config
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import EngineConfig

NAME = "bench throughput"
HELP = "measure tokens per second with many requests at once"
OPTIONS = OptionSet(Group(ThroughputConfig, "benchmark"), *ENGINE)


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    bench, engine = OPTIONS.build(ThroughputConfig, given), engine_config(OPTIONS, given)

    from roseinfer.bench.report import header, write_json

    print(header("roseinfer bench throughput", given), flush=True)
    seconds = asyncio.run(_measure(bench, engine))
    prompt_tokens, output_tokens = bench.num_prompts * bench.input_len, bench.num_prompts * bench.output_len
    result = {
        "elapsed_time": seconds,
        "num_requests": bench.num_prompts,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": bench.num_prompts / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_second": output_tokens / seconds,
    }
    print(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, {result['output_tokens_per_second']:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}\nTotal num output tokens:  {output_tokens}")
    if bench.json:
        write_json(bench.json, result, given)
    return 0


async def _measure(bench: ThroughputConfig, engine: EngineConfig) -> float:
    from roseinfer.bench.batches import offline_sender, vocab_size
    from roseinfer.bench.load import make_prompts, run_batch

    prompts = make_prompts(bench.num_prompts, bench.input_len, vocab_size(engine.model), engine.model.seed)
    warmup = make_prompts(2, bench.input_len, vocab_size(engine.model), engine.model.seed + 1)
    async with offline_sender(engine) as send:
        await run_batch(send, "warmup", warmup, 2)
        return (await run_batch(send, "request", prompts, bench.output_len)).total_s
