"""roseinfer bench latency: latency and throughput of batches of equal requests."""

import asyncio
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from roseinfer.bench.config import LatencyConfig
from roseinfer.cli.commands.groups import ENGINE, engine_config
from roseinfer.config.options import Group, OptionSet
from roseinfer.core.config.engine import EngineConfig

if TYPE_CHECKING:
    from roseinfer.bench.batches import BatchWorkload

NAME = "bench latency"
HELP = "measure the latency of batches of equal requests"
OPTIONS = OptionSet(Group(LatencyConfig, "benchmark"), *ENGINE)
DEFAULT_BATCH_SIZES = (8,)


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    bench, engine = OPTIONS.build(LatencyConfig, given), engine_config(OPTIONS, given)

    from roseinfer.bench.report import header

    print(header("roseinfer bench latency", given), flush=True)
    report(measure(bench, engine, given), bench, given)
    return 0


def measure(bench: LatencyConfig, engine: EngineConfig, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Measure each batch size offline and, if requested, over HTTP. `given` holds the options for the server."""
    return asyncio.run(_measure(bench, engine, _serve_flags(given)))


def report(rows: list[dict[str, Any]], bench: LatencyConfig, given: Mapping[str, Any]) -> None:
    """Print the rows, and write them to a file if requested."""
    from roseinfer.bench.report import table, write_json

    for row in rows:
        print(f"{row['engine']}, batch {row['batch']}: Avg latency: {row['latency s avg']} seconds")
    print(table(rows))
    if bench.json:
        write_json(bench.json, {"results": rows}, given)


def workload(bench: LatencyConfig, engine: EngineConfig) -> "BatchWorkload":
    from roseinfer.bench.batches import BatchWorkload, vocab_size

    return BatchWorkload(
        batch_sizes=bench.batch_size or DEFAULT_BATCH_SIZES,
        input_len=bench.input_len,
        output_len=bench.output_len,
        warmup=bench.num_iters_warmup,
        iterations=bench.num_iters,
        seed=engine.model.seed,
        vocab_size=vocab_size(engine.model),
    )


async def _measure(bench: LatencyConfig, engine: EngineConfig, serve_flags: list[str]) -> list[dict[str, Any]]:
    from roseinfer.bench.batches import measure, offline_sender, online_sender, summarise

    load = workload(bench, engine)
    async with offline_sender(engine) as send:
        rows = summarise("roseinfer", await measure(send, load))
    if bench.http:
        async with online_sender(engine.model.model, serve_flags) as send:
            rows += summarise("roseinfer over HTTP", await measure(send, load))
    return rows


def _serve_flags(given: Mapping[str, Any]) -> list[str]:
    """Return the given engine options as arguments of `roseinfer serve`."""
    flags = []
    for group in ENGINE:
        for option in group.options():
            if option.name in given and option.name != group.positional:
                flags += option.as_flags(given[option.name])
    return flags
