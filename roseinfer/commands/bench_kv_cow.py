"""roseinfer bench kv-cow: microseconds per copy-on-write, batched and one by one."""

from argparse import Namespace
from dataclasses import asdict

from roseinfer.bench.config import KvCowConfig
from roseinfer.options import Group, OptionParser, OptionSet

NAME = "bench kv-cow"
HELP = "time copy-on-write of KV blocks, batched and one by one"
OPTIONS = OptionSet(Group(KvCowConfig, "benchmark"))


def configure(parser: OptionParser) -> None:
    """Everything is in OPTIONS."""


def run(args: Namespace) -> int:
    given = OPTIONS.read(args)
    config = OPTIONS.build(KvCowConfig, given)

    from roseinfer.bench.kv_cow import measure
    from roseinfer.bench.report import header, table, write_json

    print(header("roseinfer bench kv-cow", given), flush=True)
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
