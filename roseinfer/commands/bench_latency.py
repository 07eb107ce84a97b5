"""roseinfer bench latency: how long batches of equal requests take, and how many tokens a second that is."""

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from roseinfer.bench.config import LatencyConfig
from roseinfer.commands.groups import ENGINE, engine_config
from roseinfer.core.config import EngineConfig
from roseinfer.core.errors import ConfigError
from roseinfer.options import Group, OptionParser, OptionSet

if TYPE_CHECKING:
    from roseinfer.bench.batches import Workload

NAME = "bench latency"
HELP = "time batches of equal requests"
OPTIONS = OptionSet(Group(LatencyConfig, "benchmark"), *ENGINE)
DEFAULT_BATCH_SIZES = (8,)


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    bench, engine = OPTIONS.build(LatencyConfig, given), engine_config(OPTIONS, given)

    from roseinfer.bench.report import header, table, write_json

    print(header("roseinfer bench latency", given), flush=True)
    if bench.breakdown:
        return _break_down(bench, engine, given)
    rows = asyncio.run(_measure(bench, engine, _serve_flags(given)))
    if bench.peer:
        rows += _measure_peer(bench, engine)
    for row in rows:
        print(f"{row['engine']}, batch {row['batch']}: Avg latency: {row['latency s avg']} seconds")
    print(table(rows))
    if bench.json:
        write_json(bench.json, {"results": rows}, given)
    return 0


def _break_down(bench: LatencyConfig, engine: EngineConfig, given: dict[str, Any]) -> int:
    """The step of each batch size, on one engine."""
    from roseinfer.bench.breakdown_report import as_json, as_text
    from roseinfer.bench.breakdown_run import break_down
    from roseinfer.bench.report import write_json

    if engine.profile.profile is not None:
        raise ConfigError("breakdown and profile both watch the engine: one at a time")
    engine_options = {option.name for group in ENGINE for option in group.options()}
    options = {name: value for name, value in given.items() if name in engine_options}
    results = []
    for found in break_down(bench, engine.model, bench.batch_size or DEFAULT_BATCH_SIZES, options):
        print(f"\n{as_text(found)}", flush=True)
        results.append(as_json(found))
    if bench.json:
        write_json(bench.json, {"breakdown": results}, given)
    return 0


def _workload(bench: LatencyConfig, engine: EngineConfig) -> "Workload":
    from roseinfer.bench.batches import Workload, vocab_size

    return Workload(
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

    load = _workload(bench, engine)
    async with offline_sender(engine) as send:
        rows = summarise("roseinfer", await measure(send, load))
    if bench.http:
        async with online_sender(engine.model.model, serve_flags) as send:
            rows += summarise("roseinfer over HTTP", await measure(send, load))
    return rows


def _measure_peer(bench: LatencyConfig, engine: EngineConfig) -> list[dict[str, Any]]:
    from roseinfer.bench.batches import summarise
    from roseinfer.bench.transformers_peer import TransformersPeer
    from roseinfer.hub import model_folder

    load = _workload(bench, engine)
    peer = TransformersPeer(model_folder(engine.model), engine.model.threads, load.seed)
    measured = {}
    for size in load.batch_sizes:
        batches = [peer.run(load.prompts(size, i), load.output_len) for i in range(load.warmup + load.iterations)]
        measured[size] = batches[load.warmup :]
    return summarise("transformers", measured)


def _serve_flags(given: dict[str, Any]) -> list[str]:
    """The engine options that were given, as `roseinfer serve` takes them."""
    flags = []
    for group in ENGINE:
        for option in group.options():
            if option.name in given and option.name != group.positional:
                flags += option.as_flags(given[option.name])
    return flags
